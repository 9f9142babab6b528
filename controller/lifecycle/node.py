"""A node: three independent facts – what the operator wants, the lease, the health.

They are never one enum: a drained node that reboots must come back drained. `state_word` makes
the word that people see out of the three.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from protos.messages import AdminState, GpuFacts, NodeFacts, RankId

CRITICAL_XIDS = frozenset({48, 63, 64, 74, 79, 95, 119, 120, 154})
"""Xid errors after which a card must not get work (NVIDIA, "XID Errors", r570: double-bit ECC,
row remap pending or failed, NVLink, fallen off the bus, uncontained ECC, GSP RPC timeout, GSP
error, GPU recovery action). The application's own errors (13, 31, 43, 45, 68, 69, 109) are not
among them."""

FAULTY_JOBS_LIMIT = 3
"""Failed launches of that many different jobs in a row take the node out of service."""
NAMED_GPUS = 4
"""As many GPUs as a sentence names one by one."""
FLAPS_LIMIT = 3
FLAP_WINDOW_S = 600.0


class Lease(StrEnum):
    """Whether the agent is heard."""

    CONNECTED = "CONNECTED"
    LOST = "LOST"


class GpuFaultKind(StrEnum):
    """A lasting reason why a GPU is out of service."""

    DIRTY = "DIRTY"
    """Something was left on it by a job; ends with a reboot, a clean report or a resume."""
    XID = "XID"
    """The driver reported a critical Xid; ends with a reboot or a resume."""
    LOST = "LOST"
    """The driver did not reach it; ends with a reboot or a resume."""
    MISSING = "MISSING"
    """The node had it once and does not list it now; ends when it is listed again."""


@dataclass(frozen=True, slots=True)
class GpuFault:
    """Why a GPU is out of service until somebody or something clears it."""

    kind: GpuFaultKind
    text: str
    at_s: float
    rank: RankId | None = None
    """Who left it dirty."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node as the controller knows it."""

    name: str
    node_id: str
    boot_id: str
    instance_id: str
    address: str
    facts: NodeFacts
    """GPUs that have gone missing stay listed with their last known facts."""
    admin: AdminState = AdminState.ACTIVE
    admin_reason: str = ""
    admin_actor: str = ""
    lease: Lease = Lease.CONNECTED
    health: tuple[str, ...] = ()
    """Reasons against the whole node as its agent tells them now."""
    gpu_health: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The same by GPU uuid; only GPUs with reasons."""
    faults: tuple[str, ...] = ()
    """Reasons against the whole node that last until it is resumed."""
    gpu_faults: Mapping[str, tuple[GpuFault, ...]] = field(default_factory=dict)
    """By GPU uuid; only GPUs with faults."""
    launch_fault_jobs: tuple[int, ...] = ()
    """Jobs that it failed to launch since it last launched one."""
    lost_at_s: tuple[float, ...] = ()
    """When its lease ended lately."""

    @property
    def is_connected(self) -> bool:
        """Whether its lease holds."""
        return self.lease is Lease.CONNECTED

    @property
    def accepts_work(self) -> bool:
        """Whether new work may be placed on it."""
        return (
            self.is_connected
            and self.admin is AdminState.ACTIVE
            and not self.health
            and not self.faults
        )

    def gpu_reasons(self, uuid: str) -> tuple[str, ...]:
        """Why a GPU must not get work; empty when it may."""
        lasting = tuple(fault.text for fault in self.gpu_faults.get(uuid, ()))
        said = tuple(map(_without_card, lasting))
        present = (
            text
            for text in self.gpu_health.get(uuid, ())
            # Xids are lasting faults, here only: they end when a person says so, not when the
            # agent forgets or remembers them.
            if critical_xid(text) is None
            and not any(s.startswith(_without_card(text)) for s in said)
        )
        return (*lasting, *present)


def critical_xid(text: str) -> int | None:
    """The number of the critical Xid that an agent's reason (`Xid 79: ...`) tells, if it does."""
    found = re.match(r"Xid (\d+)\b", text)
    xid = None if found is None else int(found[1])
    return xid if xid in CRITICAL_XIDS else None


def _without_card(text: str) -> str:
    """A reason without the card's name in front, to compare: `GPU 1 is lost` and `GPU is lost`."""
    return re.sub(r"^GPU( \d+)?:? ", "", text)


def gpus_out_of_service(node: Node) -> str:
    """Which GPUs must not get work, and why, in a sentence; empty when all may."""
    out = [(gpu, against) for gpu in node.facts.gpus if (against := node.gpu_reasons(gpu.uuid))]
    if not out:
        return ""
    named = "; ".join(gpu_words(gpu, against[0]) for gpu, against in out[:NAMED_GPUS])
    more = f" and {len(out) - NAMED_GPUS} more" if len(out) > NAMED_GPUS else ""
    return f"{len(out)} of {len(node.facts.gpus)} GPUs out of service: {named}{more}"


def gpu_words(gpu: GpuFacts, reason: str) -> str:
    """A reason that says which card of its node it is about."""
    name = f"GPU {gpu.index}"
    return reason if reason.startswith(name) else f"{name}: {reason}"


def state_word(node: Node, *, is_busy: bool) -> str:
    """The word to show: UP, DRAINING, DRAINED, DOWN, UNHEALTHY, and combined e.g. DOWN+DRAIN.

    A draining node is DRAINED when nothing runs on it any more, as in Slurm.
    """
    base = "UP"
    if not node.is_connected:
        base = "DOWN"
    elif node.health or node.faults:
        base = "UNHEALTHY"
    if node.admin is AdminState.ACTIVE:
        return base
    if base == "UP":
        return "DRAINING" if is_busy else "DRAINED"
    return f"{base}+DRAIN"


def reasons(node: Node) -> tuple[str, ...]:
    """Why the node does not accept work, in sentences; empty when it does."""
    found: list[str] = []
    if not node.is_connected:
        found.append("its agent is silent")
    if node.admin is AdminState.DRAIN:
        by = f" by {node.admin_actor}" if node.admin_actor else ""
        found.append(f"drained{by}: {node.admin_reason or 'no reason given'}")
    return (*found, *node.faults, *node.health)


def with_gpu_fault(node: Node, uuid: str, fault: GpuFault) -> Node:
    """The node with a GPU out of service; a second fault of the same kind replaces the first."""
    others = tuple(f for f in node.gpu_faults.get(uuid, ()) if f.kind is not fault.kind)
    return replace(node, gpu_faults={**node.gpu_faults, uuid: (*others, fault)})


def with_xid(node: Node, uuid: str, text: str, at_s: float) -> Node:
    """The node with a critical Xid (`Xid 79: ...`) on a GPU, noted once by its number."""
    known = node.gpu_faults.get(uuid, ())
    xid = critical_xid(text)
    assert xid is not None, text
    if any(f.kind is GpuFaultKind.XID and critical_xid(f.text) == xid for f in known):
        return node
    fault = GpuFault(GpuFaultKind.XID, text, at_s)
    return replace(node, gpu_faults={**node.gpu_faults, uuid: (*known, fault)})


def without_gpu_faults(
    node: Node, kind: GpuFaultKind, *, uuid: str | None = None, rank: RankId | None = None
) -> Node:
    """The node without faults of one kind, of one GPU and of one rank where they are named."""

    def keeps(gpu: str, fault: GpuFault) -> bool:
        if fault.kind is not kind or (uuid is not None and gpu != uuid):
            return True
        return rank is not None and fault.rank != rank

    left = {
        gpu: tuple(fault for fault in faults if keeps(gpu, fault))
        for gpu, faults in node.gpu_faults.items()
    }
    left = {gpu: faults for gpu, faults in left.items() if faults}
    return node if left == node.gpu_faults else replace(node, gpu_faults=left)


def with_facts(node: Node, facts: NodeFacts, at_s: float) -> Node:
    """The node with a new inventory: GPUs that it had and does not list are kept as MISSING."""
    listed = {gpu.uuid for gpu in facts.gpus}
    missing = tuple(gpu for gpu in node.facts.gpus if gpu.uuid not in listed)
    node = replace(node, facts=replace(facts, gpus=facts.gpus + missing))
    for gpu in facts.gpus:
        node = without_gpu_faults(node, GpuFaultKind.MISSING, uuid=gpu.uuid)
    for gpu in missing:
        if not any(f.kind is GpuFaultKind.MISSING for f in node.gpu_faults.get(gpu.uuid, ())):
            text = f"GPU {gpu.index} ({gpu.name}) is missing: the node no longer lists it"
            node = with_gpu_fault(node, gpu.uuid, GpuFault(GpuFaultKind.MISSING, text, at_s))
    return node


def resumed(node: Node) -> Node:
    """The node in service again: drain and lasting health reasons cleared, inventory accepted.

    What its agent still tells (`health`, `gpu_health`) stays.
    """
    missing = {
        uuid
        for uuid, faults in node.gpu_faults.items()
        if any(fault.kind is GpuFaultKind.MISSING for fault in faults)
    }
    gpus = tuple(gpu for gpu in node.facts.gpus if gpu.uuid not in missing)
    return replace(
        node,
        facts=replace(node.facts, gpus=gpus),
        admin=AdminState.ACTIVE,
        admin_reason="",
        admin_actor="",
        faults=(),
        gpu_faults={},
        launch_fault_jobs=(),
        # A node that is silent now stays lost since then; what is forgiven is flapping.
        lost_at_s=() if node.is_connected else node.lost_at_s[-1:],
    )


def with_launch_fault(node: Node, job_id: int, why: str) -> Node:
    """The node blamed for a failed launch; after those of three jobs it is out of service."""
    if job_id in node.launch_fault_jobs:
        return node
    jobs = (*node.launch_fault_jobs, job_id)
    node = replace(node, launch_fault_jobs=jobs)
    text = f"launches of {FAULTY_JOBS_LIMIT} or more different jobs failed on it in a row"
    if len(jobs) < FAULTY_JOBS_LIMIT or any(fault.startswith(text) for fault in node.faults):
        return node
    return with_fault(node, f"{text}; the last: {why.rstrip('.')}")


def with_fault(node: Node, text: str) -> Node:
    """The node with one more lasting reason."""
    return node if text in node.faults else replace(node, faults=(*node.faults, text))


def with_loss(node: Node, at_s: float) -> Node:
    """The node with its lease ended; more than three times in ten minutes is flapping."""
    recent = (*(t for t in node.lost_at_s if at_s - t < FLAP_WINDOW_S), at_s)
    node = replace(node, lease=Lease.LOST, lost_at_s=recent)
    if len(recent) <= FLAPS_LIMIT:
        return node
    return with_fault(node, f"flapping: lost more than {FLAPS_LIMIT} times in 10 min")
