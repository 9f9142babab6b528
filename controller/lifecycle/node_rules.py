"""What agents, leases and operators do to nodes, and through them to attempts."""

from __future__ import annotations

from dataclasses import replace

from controller.lifecycle import attempt as attempts
from controller.lifecycle import ending, rank_rules
from controller.lifecycle import node as nodes
from controller.lifecycle.attempt import Attempt
from controller.lifecycle.effects import Record
from controller.lifecycle.errors import NotAllowed
from controller.lifecycle.events import (
    CONTROLLER,
    AgentConnected,
    NodeDrained,
    NodeFactsChanged,
    NodeHealthReported,
    NodeLost,
    NodeResumed,
    RankReported,
)
from controller.lifecycle.node import GpuFault, GpuFaultKind, Lease, Node
from controller.lifecycle.state import Draft, StateView, held_on
from protos.messages import (
    AdminState,
    AttemptState,
    Hello,
    OnNodeFail,
    RankId,
    RankPhase,
    RankReport,
    StopReason,
    XidEvent,
)


def agent_connected(draft: Draft, event: AgentConnected) -> None:
    """A node joins or returns: what it tells of its ranks is reconciled with what we know."""
    hello, at_s = event.hello, event.at_s
    known = draft.node(hello.node_name)
    address = hello.advertise_address or event.address
    if known is None:
        node = Node(
            hello.node_name, hello.node_id, hello.boot_id, hello.instance_id, address, hello.facts
        )
        draft.put(node)
        _record(draft, node, "NodeJoined", f"Node {node.name} joined.", at_s)
        _reconcile(draft, event, is_new_boot=True)
        return
    is_new_boot = (known.node_id, known.boot_id) != (hello.node_id, hello.boot_id)
    node = replace(
        known,
        node_id=hello.node_id,
        boot_id=hello.boot_id,
        instance_id=hello.instance_id,
        address=address,
        lease=Lease.CONNECTED,
    )
    if is_new_boot:
        for kind in (GpuFaultKind.DIRTY, GpuFaultKind.XID, GpuFaultKind.LOST):
            node = nodes.without_gpu_faults(node, kind)
    node = nodes.with_facts(node, hello.facts, at_s)
    draft.put(node)
    how = "with a new boot" if is_new_boot else "with the same boot"
    _record(draft, node, "NodeReturned", f"Node {node.name} is back {how}.", at_s)
    _reconcile(draft, event, is_new_boot=is_new_boot)
    _fail_attempts_on_bad_gpus(draft, node, at_s)


def _reconcile(draft: Draft, event: AgentConnected, *, is_new_boot: bool) -> None:
    hello, at_s = event.hello, event.at_s
    reports = {report.rank: report for report in hello.ranks}
    for node_rank, attempt in held_on(draft, hello.node_name):
        report = reports.get(attempt.rank_id(node_rank))
        if report is None or (is_new_boot and not _knows_its_end(report)):
            rank_rules.rank_missing(draft, attempt.key, node_rank, at_s, is_new_boot=is_new_boot)
    _recover_lost(draft, hello.node_name, at_s)
    for report in hello.ranks:
        rank_rules.rank_reported(draft, RankReported(hello.node_name, report, at_s))


def _knows_its_end(report: RankReport) -> bool:
    """Whether a rank's real exit is known, although its node has booted since."""
    facts = report.exit
    return facts is not None and (facts.exit_code is not None or facts.signal is not None)


def _recover_lost(draft: Draft, node_name: str, at_s: float) -> None:
    """Attempts that waited for this node go on when no other node of theirs is missing."""
    for _, attempt in held_on(draft, node_name):
        if attempt.state is not AttemptState.LOST or attempt.fenced:
            continue
        names = {rank.node for rank in attempt.ranks if not rank.has_ended}
        found = [draft.node(name) for name in names]
        if all(node is not None and node.is_connected for node in found):
            is_running = attempt.started_at_s is not None
            state = AttemptState.RUNNING if is_running else AttemptState.LAUNCHING
            recovered = attempts.move(attempt, state)
            draft.put(recovered)
            text = f"Attempt {attempt.number} is found again on {node_name}."
            ending.record(draft, recovered, "AttemptRecovered", text, at_s)
            if not is_running and attempts.has_started(recovered):
                ending.start(draft, recovered, at_s)


def welcome_lists(state: StateView, hello: Hello) -> tuple[tuple[RankId, ...], tuple[RankId, ...]]:
    """(ranks to kill, ranks to forget) for the answer to a Hello that has been applied."""
    kill, forget = [], []
    for report in hello.ranks:
        rank_id = report.rank
        if report.phase is RankPhase.RELEASED:
            forget.append(rank_id)
        elif report.phase is not RankPhase.ENDED:
            attempt = rank_rules.attempt_of(state, hello.node_name, rank_id)
            if attempt is None or attempt.fenced or attempt.ranks[rank_id.node_rank].has_ended:
                kill.append(rank_id)
    return tuple(kill), tuple(forget)


def node_lost(draft: Draft, event: NodeLost) -> None:
    """A node's lease ended: what runs there cannot be seen, and jobs choose what that means."""
    node = _known(draft, event.node)
    if not node.is_connected:
        return
    lost = nodes.with_loss(node, event.at_s)
    draft.put(lost)
    text = f"Node {node.name} is lost: nothing heard for {event.silent_s:.1f} s."
    _record(draft, lost, "NodeLost", text, event.at_s)
    for node_rank, held in held_on(draft, node.name):
        if not held.ranks[node_rank].has_ended:
            attempt = draft.attempt(held.key)
            assert attempt is not None
            _lose(draft, attempt, node.name, event)


def _lose(draft: Draft, attempt: Attempt, node_name: str, event: NodeLost) -> None:
    if attempt.state is not AttemptState.LOST:
        attempt = attempts.move(attempt, AttemptState.LOST)
        draft.put(attempt)
        text = f"Attempt {attempt.number} is out of sight with node {node_name}."
        ending.record(draft, attempt, "AttemptLost", text, event.at_s)
    if attempt.fenced:
        return
    if attempt.stop_reason is not None:
        ending.give_up(draft, attempt, event.at_s, attempt.stop_reason)
    elif ending.job_of(draft, attempt).spec.on_node_fail is not OnNodeFail.WAIT:
        failure = f"Node {node_name} was lost: nothing heard for {event.silent_s:.1f} s."
        attempt = replace(attempt, node_failure=failure)
        ending.give_up(draft, attempt, event.at_s, StopReason.FENCED)


def node_facts_changed(draft: Draft, event: NodeFactsChanged) -> None:
    """A node's inventory changed while connected."""
    node = nodes.with_facts(_known(draft, event.node), event.facts, event.at_s)
    draft.put(node)
    text = f"Node {node.name} has {node.facts.cpus} CPUs and {len(event.facts.gpus)} GPUs now."
    _record(draft, node, "NodeFactsChanged", text, event.at_s)
    _fail_attempts_on_bad_gpus(draft, node, event.at_s)


def node_health_reported(draft: Draft, event: NodeHealthReported) -> None:
    """A node's health changed.

    Lost cards and critical Xids last until somebody resumes the node, or it boots again. An Xid
    counts by its event or by the reason that its agent tells, whichever arrives: events are told
    once and may get lost. A reason that was told before is no news, so a resume ends it for good.
    """
    before = _known(draft, event.node)
    node = replace(before, health=event.health, gpu_health=dict(event.gpu_health))
    indices = {gpu.uuid: gpu.index for gpu in node.facts.gpus}
    for uuid in sorted(event.lost_gpus & indices.keys()):
        if not any(f.kind is GpuFaultKind.LOST for f in node.gpu_faults.get(uuid, ())):
            text = f"GPU {indices[uuid]} is lost: the driver no longer reaches it"
            node = nodes.with_gpu_fault(node, uuid, GpuFault(GpuFaultKind.LOST, text, event.at_s))
    xids = [(xid.uuid, _xid_words(xid)) for xid in event.xids]
    for uuid, told in event.gpu_health.items():
        known = before.gpu_health.get(uuid, ())
        xids += [(uuid, text) for text in told if text not in known]
    for uuid, text in xids:
        if uuid in indices and nodes.critical_xid(text) is not None:
            node = nodes.with_xid(node, uuid, text, event.at_s)
    if node == before:
        return
    draft.put(node)
    _record(draft, node, "NodeHealthChanged", _health_words(node), event.at_s)
    _fail_attempts_on_bad_gpus(draft, node, event.at_s)


def _xid_words(xid: XidEvent) -> str:
    number = f"Xid {xid.xid}"
    if not xid.message or xid.message.startswith(number):
        return xid.message or number
    return f"{number}: {xid.message}"


def _health_words(node: Node) -> str:
    found = [*node.faults, *node.health]
    for gpu in node.facts.gpus:
        found += [nodes.gpu_words(gpu, text) for text in node.gpu_reasons(gpu.uuid)]
    return f"Node {node.name}: {'; '.join(found) or 'healthy'}."


def _fail_attempts_on_bad_gpus(draft: Draft, node: Node, at_s: float) -> None:
    """An attempt cannot go on without its GPU: its end counts as a failure of the node."""
    for node_rank, attempt in held_on(draft, node.name):
        rank = attempt.ranks[node_rank]
        gone = next(
            (
                fault.text
                for uuid in rank.gpu_uuids
                for fault in node.gpu_faults.get(uuid, ())
                if fault.kind in {GpuFaultKind.LOST, GpuFaultKind.MISSING}
            ),
            None,
        )
        if gone is not None and not rank.has_ended and attempt.stop_reason is None:
            failed = replace(attempt, node_failure=f"On {node.name}, {gone}.")
            ending.stop(draft, failed, StopReason.FENCED, at_s)


def node_drained(draft: Draft, event: NodeDrained) -> None:
    """No new work on a node; what runs goes on."""
    node = replace(
        _known(draft, event.node),
        admin=AdminState.DRAIN,
        admin_reason=event.reason,
        admin_actor=event.actor,
    )
    draft.put(node)
    text = f"Node {node.name} drained by {event.actor}: {event.reason or 'no reason given'}"
    _record(draft, node, "NodeDrained", text, event.at_s, event.actor)


def node_resumed(draft: Draft, event: NodeResumed) -> None:
    """A node takes work again; drain and lasting health reasons are cleared."""
    node = nodes.resumed(_known(draft, event.node))
    draft.put(node)
    text = f"Node {node.name} resumed by {event.actor}."
    if event.reason:
        text = f"{text[:-1]}: {event.reason}"
    _record(draft, node, "NodeResumed", text, event.at_s, event.actor)


def _known(draft: Draft, name: str) -> Node:
    node = draft.node(name)
    if node is None:
        raise NotAllowed(f"there is no node {name}")
    return node


def _record(
    draft: Draft, node: Node, kind: str, text: str, at_s: float, actor: str = CONTROLLER
) -> None:
    draft.records.append(Record(at_s, kind, text, actor, node=node.name))
