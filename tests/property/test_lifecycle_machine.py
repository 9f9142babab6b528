"""Random histories of users, operators, agents and failures; the invariants hold at each step.

The agents here are real enough to break the rules if the rules allow it: they run what they are
told to, keep it through a broken connection, lose it with a reboot, and repeat themselves.
"""

from __future__ import annotations

import tempfile
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from controller.lifecycle import events, rules
from controller.lifecycle.effects import Effect, Launch, Stop
from controller.lifecycle.errors import NotAllowed
from controller.lifecycle.invariants import check_all
from controller.lifecycle.node_rules import welcome_lists
from controller.lifecycle.state import ClusterState, Outcome, held_on
from controller.store.store import Store
from protos.messages import (
    AttemptState,
    ExitFacts,
    GpuFacts,
    Hello,
    JobSpec,
    JobState,
    LaunchFault,
    NodeFacts,
    OnNodeFail,
    OomKind,
    RankId,
    RankPhase,
    RankReport,
    RankUsage,
    StopReason,
)

NODES = ("n1", "n2", "n3")
GPUS = 3
NATURAL_ENDS = (
    ExitFacts(exit_code=0),
    ExitFacts(exit_code=3),
    ExitFacts(signal=9, oom=OomKind.HOST),
    ExitFacts(exit_code=0, stop_reason=StopReason.TIME_LIMIT),
)
LAUNCH_FAULTS = (
    ExitFacts(launch_fault=LaunchFault.JOB, message="no such folder"),
    ExitFacts(launch_fault=LaunchFault.NODE, message="no space"),
)

KINDS = (
    *("submit", "place", "orders_arrive", "process_starts") * 6,
    *("process_ends", "gpus_checked", "agent_returns") * 4,
    *("wish", "agent_repeats_itself", "resume", "connection_breaks", "lease_ends") * 2,
    *("drain", "launch_fails", "start_deadline", "node_reboots", "gpu_falls_off"),
)
"""What happens, as often as it is named."""

Draw = Callable[[st.SearchStrategy[Any]], Any]


def facts(node: str) -> NodeFacts:
    gpus = tuple(GpuFacts(f"{node}-{i}", i, "Mock", "P100", str(i)) for i in range(GPUS))
    return NodeFacts(node, "linux", 64, 1 << 40, gpus)


@dataclass
class FakeAgent:
    """What really happens on a node."""

    name: str
    boot: int = 1
    connected: bool = False
    orders: deque[Effect] = field(default_factory=deque)
    ranks: dict[RankId, RankReport] = field(default_factory=dict)
    held: dict[RankId, tuple[str, ...]] = field(default_factory=dict)
    """GPUs that a process or its remains occupy."""

    def hello(self) -> Hello:
        return Hello(
            self.name,
            f"id-{self.name}",
            f"boot-{self.boot}",
            "instance",
            facts(self.name),
            tuple(self.ranks.values()),
        )

    def end(self, rank: RankId, exit_facts: ExitFacts) -> None:
        self.ranks[rank] = replace(
            self.ranks[rank], phase=RankPhase.ENDED, exit=exit_facts, usage=RankUsage(1.0)
        )

    def in_phase(self, *phases: RankPhase) -> list[RankId]:
        return sorted(rank for rank, report in self.ranks.items() if report.phase in phases)


class ClusterHistory(RuleBasedStateMachine):
    """The rules, driven by everybody at once."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ClusterState()
        self.agents = {name: FakeAgent(name) for name in NODES}
        self.now_s = 1_000.0
        self.last_job = 0
        self.final: dict[int, tuple[JobState, int]] = {}

    # Plumbing

    def apply(self, event: events.Event) -> Outcome:
        self.now_s += 1.0
        outcome = rules.apply(self.state, event)
        self.state.absorb(outcome.changes)
        for effect in outcome.effects:
            if self.agents[effect.node].connected:
                self.agents[effect.node].orders.append(effect)
        return outcome

    def connect(self, agent: FakeAgent) -> None:
        agent.orders.clear()
        agent.connected = True
        hello = agent.hello()
        self.apply(events.AgentConnected(hello, "10.0.0.1", self.now_s))
        kill, forget = welcome_lists(self.state, hello)
        for rank in kill:
            agent.end(rank, ExitFacts(signal=9, stop_reason=StopReason.FENCED))
        for rank in forget:
            del agent.ranks[rank]

    def report(self, agent: FakeAgent, rank: RankId) -> None:
        report = agent.ranks[rank]
        self.apply(events.RankReported(agent.name, report, self.now_s))
        if report.phase is RankPhase.RELEASED:
            del agent.ranks[rank]

    def take_order(self, agent: FakeAgent) -> None:
        match agent.orders.popleft():
            case Launch(rank=rank):
                if rank not in agent.ranks:
                    attempt = self.state.attempt((rank.job_id, rank.attempt))
                    assert attempt is not None
                    agent.ranks[rank] = RankReport(rank, RankPhase.LAUNCHING)
                    agent.held[rank] = attempt.ranks[rank.node_rank].gpu_uuids
            case Stop(rank=rank, reason=reason):
                if rank in agent.in_phase(RankPhase.LAUNCHING, RankPhase.RUNNING):
                    agent.end(rank, ExitFacts(signal=15, stop_reason=reason))

    def release(self, agent: FakeAgent, rank: RankId, *, dirty: bool) -> None:
        gpus = agent.held.pop(rank, ())
        why = {gpus[0]: "pid 7 in D state"} if dirty and gpus else {}
        agent.ranks[rank] = replace(agent.ranks[rank], phase=RankPhase.RELEASED, dirty_gpus=why)

    def pick(self, draw: Draw, *phases: RankPhase) -> tuple[FakeAgent, RankId] | None:
        found = [
            (agent.name, rank) for agent in self.agents.values() for rank in agent.in_phase(*phases)
        ]
        if not found:
            return None
        name, rank = draw(st.sampled_from(found))
        return self.agents[name], rank

    # People

    @initialize()
    def everybody_joins(self) -> None:
        for agent in self.agents.values():
            self.connect(agent)

    @rule(data=st.data(), kinds=st.lists(st.sampled_from(KINDS), min_size=10, max_size=30))
    def time_passes(self, data: st.DataObject, kinds: list[str]) -> None:
        for kind in kinds:
            getattr(self, kind)(data.draw)
            self.check()

    def submit(self, draw: Draw) -> None:
        if len(self.state.jobs) > 8:
            return
        self.last_job += 1
        nodes = draw(st.sampled_from([1, 1, 2]))
        spec = JobSpec(
            f"job{self.last_job}",
            "ann",
            ("true",),
            "/",
            gpus=draw(st.sampled_from([0, 1, 1, 2])) * nodes,
            nodes=nodes,
            hold=draw(st.integers(0, 9)) == 0,
            on_node_fail=draw(st.sampled_from(OnNodeFail)),
        )
        self.apply(events.JobSubmitted(self.last_job, f"r{self.last_job}", spec, self.now_s, "ann"))

    def wish(self, draw: Draw) -> None:
        if not self.state.jobs:
            return
        job_id = draw(st.sampled_from(sorted(self.state.jobs)))
        event = draw(
            st.sampled_from(
                [
                    events.CancelRequested(job_id, "ann", "", self.now_s),
                    events.HoldRequested(job_id, "ann", self.now_s),
                    events.ReleaseRequested(job_id, "ann", self.now_s),
                    events.RequeueRequested(job_id, "ann", self.now_s),
                ]
            )
        )
        before = self.state.jobs[job_id]
        try:
            self.apply(event)
        except NotAllowed:
            assert self.state.jobs[job_id] == before
        else:
            if isinstance(event, events.RequeueRequested) and before.state.is_final:
                self.final.pop(job_id, None)

    def drain(self, draw: Draw) -> None:
        self.apply(events.NodeDrained(draw(st.sampled_from(NODES)), "root", "disk", self.now_s))

    def resume(self, draw: Draw) -> None:
        self.apply(events.NodeResumed(draw(st.sampled_from(NODES)), "root", "", self.now_s))

    # The scheduler

    def free_gpus(self, name: str) -> list[int]:
        held = {u for r, a in held_on(self.state, name) for u in a.ranks[r].gpu_uuids}
        node = self.state.nodes[name]
        return [
            gpu.index
            for gpu in node.facts.gpus
            if gpu.uuid not in held and not node.gpu_reasons(gpu.uuid)
        ]

    def place(self, draw: Draw) -> None:
        waiting = [j.job_id for j in self.state.jobs.values() if j.state is JobState.PENDING]
        if not waiting:
            return
        job = self.state.jobs[draw(st.sampled_from(sorted(waiting)))]
        places = []
        for name in draw(st.permutations(NODES)):
            free = self.free_gpus(name)
            is_open = self.state.nodes[name].accepts_work
            if is_open and len(free) >= job.spec.gpus_per_node and len(places) < job.spec.nodes:
                chosen = tuple(free[: job.spec.gpus_per_node])
                places.append(events.Place(name, tuple(f"{name}-{i}" for i in chosen), chosen))
        if len(places) == job.spec.nodes:
            self.apply(events.JobPlaced(job.job_id, tuple(places), self.now_s))

    def start_deadline(self, draw: Draw) -> None:
        attempts = self.state.attempts.values()
        live = sorted(a.key for a in attempts if a.state is not AttemptState.ENDED)
        if live:
            job_id, number = draw(st.sampled_from(live))
            self.apply(events.StartDeadlinePassed(job_id, number, self.now_s, 60.0))

    # Agents

    def orders_arrive(self, draw: Draw) -> None:
        agent = self.agents[draw(st.sampled_from(NODES))]
        while agent.connected and agent.orders:
            self.take_order(agent)

    def process_starts(self, draw: Draw) -> None:
        if found := self.pick(draw, RankPhase.LAUNCHING):
            agent, rank = found
            agent.ranks[rank] = replace(agent.ranks[rank], phase=RankPhase.RUNNING, pid=7)
            self.tell(draw, agent, rank)

    def launch_fails(self, draw: Draw) -> None:
        if found := self.pick(draw, RankPhase.LAUNCHING):
            found[0].end(found[1], draw(st.sampled_from(LAUNCH_FAULTS)))
            self.tell(draw, *found)

    def process_ends(self, draw: Draw) -> None:
        if found := self.pick(draw, RankPhase.RUNNING):
            found[0].end(found[1], draw(st.sampled_from(NATURAL_ENDS)))
            self.tell(draw, *found)

    def gpus_checked(self, draw: Draw) -> None:
        if found := self.pick(draw, RankPhase.ENDED):
            self.release(*found, dirty=draw(st.integers(0, 5)) == 0)
            self.tell(draw, *found)

    def agent_repeats_itself(self, draw: Draw) -> None:
        if found := self.pick(draw, *RankPhase):
            self.tell(draw, *found)

    def tell(self, draw: Draw, agent: FakeAgent, rank: RankId) -> None:
        if agent.connected and draw(st.integers(0, 3)):
            self.report(agent, rank)

    # Failures

    def connection_breaks(self, draw: Draw) -> None:
        agent = self.agents[draw(st.sampled_from(NODES))]
        agent.connected = False
        agent.orders.clear()

    def lease_ends(self, draw: Draw) -> None:
        name = draw(st.sampled_from(NODES))
        if not self.agents[name].connected:
            self.apply(events.NodeLost(name, self.now_s, 10.0))

    def agent_returns(self, draw: Draw) -> None:
        self.connect(self.agents[draw(st.sampled_from(NODES))])

    def node_reboots(self, draw: Draw) -> None:
        agent = self.agents[draw(st.sampled_from(NODES))]
        agent.boot += 1
        agent.connected = False
        agent.orders.clear()
        agent.held.clear()
        keeps_state = draw(st.booleans())
        agent.ranks = {
            rank: report
            for rank, report in agent.ranks.items()
            if keeps_state and report.phase in {RankPhase.ENDED, RankPhase.RELEASED}
        }

    def gpu_falls_off(self, draw: Draw) -> None:
        name = draw(st.sampled_from(NODES))
        if self.agents[name].connected:
            lost = frozenset({f"{name}-{draw(st.integers(0, GPUS - 1))}"})
            self.apply(events.NodeHealthReported(name, (), {}, lost, (), self.now_s))

    # What must hold

    def check(self) -> None:
        assert check_all(self.state) == []
        for agent in self.agents.values():
            users = Counter(gpu for gpus in agent.held.values() for gpu in gpus)
            assert all(count == 1 for count in users.values()), users
        for job in self.state.jobs.values():
            if job.state.is_final:
                known = self.final.setdefault(job.job_id, (job.state, job.attempt))
                assert known == (job.state, job.attempt), "final is final"
            else:
                assert job.job_id not in self.final

    def teardown(self) -> None:
        """When everybody is back and does their work, everything ends and all is given back."""
        for _ in range(8):
            for job in list(self.state.jobs.values()):
                self.apply(events.CancelRequested(job.job_id, "ann", "", self.now_s))
            for agent in self.agents.values():
                if not agent.connected:
                    self.connect(agent)
                while agent.orders:
                    self.take_order(agent)
                for rank in agent.in_phase(*RankPhase):
                    self.report(agent, rank)
                for rank in agent.in_phase(RankPhase.ENDED):
                    self.release(agent, rank, dirty=False)
        assert check_all(self.state) == []
        unfinished = [job for job in self.state.jobs.values() if not job.state.is_final]
        assert unfinished == []
        assert [a for a in self.state.attempts.values() if a.is_held] == []
        assert all(not agent.held for agent in self.agents.values())
        super().teardown()


ClusterHistory.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=8,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestClusterHistory = ClusterHistory.TestCase


class StoredHistory(ClusterHistory):
    """The same histories, every step committed: the schema accepts them, nothing gets lost."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = Store.open(Path(self.folder.name))

    def apply(self, event: events.Event) -> Outcome:
        outcome = super().apply(event)
        self.store.commit(outcome.changes, outcome.records)
        return outcome

    def teardown(self) -> None:
        try:
            self.compare()
            super().teardown()
            self.compare()
        finally:
            self.store.close()
            self.folder.cleanup()

    def compare(self) -> None:
        stored = self.store.load().state
        self.state.forget_settled(sorted(self.state.jobs))
        assert stored.jobs == self.state.jobs
        assert stored.attempts == self.state.attempts
        assert stored.nodes == self.state.nodes


StoredHistory.TestCase.settings = settings(ClusterHistory.TestCase.settings, max_examples=40)
TestStoredHistory = StoredHistory.TestCase
