"""The service on a real database, with clocks that only move when a test moves them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from controller.dispatch import Dispatch, Order
from controller.lifecycle.errors import IllegalTransition
from controller.lifecycle.events import JobPlaced, Place
from controller.scheduler.cycle import Scheduler
from controller.scheduler.policies import make_allocator, make_prioritizer
from controller.scheduler.types import Decision, RankPlacement, Start, WaitNote, WaitReason
from controller.service import (
    JobFilter,
    NoSuchNode,
    Refused,
    Rejected,
    Service,
    StoreUnavailable,
    Submission,
)
from controller.store.store import Store
from protos.messages import (
    AttemptState,
    ClusterEvent,
    ExitFacts,
    GpuFacts,
    GpuSample,
    Hello,
    HostSample,
    JobSpec,
    JobState,
    LaunchFault,
    LaunchOrder,
    NodeFacts,
    OnNodeFail,
    RankId,
    RankPhase,
    RankReport,
    RankUsage,
    StopOrder,
    StopReason,
    Telemetry,
    XidEvent,
)

SPEC = JobSpec("j", "ann", ("true",), "/", gpus=1)
DONE = ExitFacts(exit_code=0)


FCFS = Scheduler(make_prioritizer("fcfs"), make_allocator("greedy"))


@dataclass
class Clock:
    """Wall and monotonic time, moved by hand."""

    wall_s: float = 1_000_000.0
    monotonic_s: float = 50.0

    def pass_(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds


class Bench:
    """A service with its clock, and the agents and scheduler that a test plays."""

    def __init__(self, service: Service, dispatch: Dispatch, store: Store, clock: Clock) -> None:
        self.service = service
        self.dispatch = dispatch
        self.store = store
        self.clock = clock

    async def hello(
        self,
        name: str = "n1",
        *reports: RankReport,
        boot: str = "b1",
        node_id: str = "",
        instance: str = "i1",
        gpus: int = 4,
    ):
        cards = tuple(GpuFacts(f"{name}-{i}", i, "Mock", "P100", str(i)) for i in range(gpus))
        facts = NodeFacts(name, "linux", 16, 1 << 36, cards)
        hello = Hello(name, node_id or f"id-{name}", boot, instance, facts, reports)
        return await self.service.agent_hello(hello, "10.0.0.7")

    async def beat(self, name: str = "n1", **telemetry: object) -> None:
        await self.service.agent_heartbeat(
            name, "i1", Telemetry(host=HostSample(cpu_utilization_pct=5.0), **telemetry)
        )

    async def submit(self, request: str = "r1", **changes: object) -> int:
        (job_id,) = await self.service.submit(
            [Submission(request, replace(SPEC, **changes))], "ann"
        )
        return job_id

    async def place(self, job_id: int, *places: tuple[str, tuple[int, ...]]) -> int:
        ranks = tuple(
            RankPlacement(node, tuple(f"{node}-{i}" for i in gpus), gpus)
            for node, gpus in places or (("n1", (0,)),)
        )
        start = Start(job_id, ranks, {"packing": 1.0})
        decision = Decision((start,), {}, (), policy="fcfs", allocator="greedy")
        return await self.service.commit_decision(decision, self.service.snapshot().version)

    async def report(
        self,
        job_id: int,
        phase: RankPhase,
        exit_facts: ExitFacts | None = None,
        *,
        attempt: int = 1,
        node: str = "n1",
        node_rank: int = 0,
        elapsed_s: float = 0.0,
    ) -> None:
        usage = RankUsage(elapsed_s) if exit_facts else None
        rank = RankId(job_id, attempt, node_rank)
        await self.service.rank_report(node, RankReport(rank, phase, 7, exit_facts, usage))

    async def running(self, request: str = "r1", **changes: object) -> int:
        job_id = await self.submit(request, **changes)
        assert await self.place(job_id) == 1
        await self.report(job_id, RankPhase.RUNNING)
        return job_id

    async def pass_time(self, seconds: float, *beating: str) -> None:
        """Time passes in steps short enough not to be taken for a stall; some nodes beat."""
        for _ in range(round(seconds)):
            self.clock.pass_(1.0)
            for name in beating:
                await self.beat(name)
            await self.service.tick()

    async def state(self, job_id: int) -> JobState:
        view = await self.service.job(job_id)
        assert view is not None
        return view.state

    def orders(self, node: str = "n1") -> list[Order]:
        queue = self.dispatch.queue(node)
        return [queue.get_nowait() for _ in range(queue.qsize())]

    async def history(self, **wanted: object) -> list[ClusterEvent]:
        events = self.service.watch(follow=False, **wanted)  # type: ignore[arg-type]
        return [event async for event in events]


@asynccontextmanager
async def controller(folder: Path, clock: Clock) -> AsyncIterator[Bench]:
    """One life of a controller."""
    with Store.open(folder) as store:
        dispatch = Dispatch()
        service = Service(
            store,
            dispatch,
            cluster="test",
            scheduler=FCFS,
            version="0",
            lease_s=10.0,
            heartbeat_s=1.0,
            now=lambda: clock.wall_s,
            monotonic=lambda: clock.monotonic_s,
        )
        await service.load()
        serving = asyncio.create_task(service.run())
        try:
            yield Bench(service, dispatch, store, clock)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def bench(tmp_path: Path, clock: Clock) -> AsyncIterator[Bench]:
    async with controller(tmp_path, clock) as opened:
        await opened.hello()
        yield opened


# Jobs


async def test_a_job_from_submission_to_its_end(bench: Bench, clock: Clock) -> None:
    job_id = await bench.submit(time_limit_s=60.0, env={"A": "1"})
    clock.pass_(3.0)
    assert await bench.place(job_id) == 1
    (order,) = bench.orders()
    assert isinstance(order, LaunchOrder)
    assert (order.rank, order.gpu_uuids, order.gpu_type) == (RankId(job_id, 1), ("n1-0",), "P100")
    assert (order.env, order.time_limit_s, order.cluster) == ({"A": "1"}, 60.0, "rltune")
    assert (order.node_names, order.node_addresses) == (("n1",), ("10.0.0.7",))
    assert order.master_port == 0
    await bench.report(job_id, RankPhase.RUNNING)
    clock.pass_(5.0)
    view = await bench.service.job(job_id)
    assert (view.state, view.wait_s, view.run_s, view.gpu_s) == (JobState.RUNNING, 3.0, 5.0, 5.0)
    await bench.report(job_id, RankPhase.ENDED, DONE, elapsed_s=5.0)
    await bench.report(job_id, RankPhase.RELEASED, DONE, elapsed_s=5.0)
    clock.pass_(100.0)
    view = await bench.service.job(job_id)
    assert (view.state, view.wait_s, view.run_s) == (JobState.COMPLETED, 3.0, 5.0)
    assert view.attempts[0].ranks[0].phase is RankPhase.RELEASED
    assert await bench.service.jobs(JobFilter()) == [view]
    assert bench.service.info().jobs_by_state == {"COMPLETED": 1}


async def test_the_same_request_never_makes_a_second_job(bench: Bench) -> None:
    submission = Submission("same", SPEC)
    both = asyncio.gather(
        bench.service.submit([submission], "ann"), bench.service.submit([submission], "ann")
    )
    (first,), (second,) = await both
    assert first == second
    await bench.service.cancel([first], "ann")
    assert await bench.service.submit([submission], "ann") == [first]
    other = Submission("same", replace(SPEC, user="bob"))
    assert await bench.service.submit([other], "bob") != [first]


async def test_a_request_is_known_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    async with controller(tmp_path, clock) as bench:
        first = await bench.submit("r1")
        await bench.service.cancel([first], "ann")
    async with controller(tmp_path, clock) as bench:
        assert await bench.submit("r1") == first
        assert await bench.submit("r2") == first + 1


async def test_what_can_never_run_is_rejected_all_or_none(bench: Bench) -> None:
    good, bad = Submission("a", SPEC), Submission("b", replace(SPEC, gpus=99, name="big"))
    with pytest.raises(Rejected, match=r"job 2 of 2 \(big\).*99 P100") as caught:
        await bench.service.submit([good, bad], "ann")
    assert caught.value.code == "never_fits"
    assert await bench.service.jobs(JobFilter()) == []
    job_id, _ = await bench.service.submit([good, replace(bad, allow_infeasible=True)], "ann")
    assert await bench.state(job_id) is JobState.PENDING


async def test_actions_answer_for_each_job(bench: Bench) -> None:
    waiting = await bench.submit("w")
    running = await bench.running("r")
    results = await bench.service.cancel([waiting, running, 999], "bob", "enough")
    assert [(r.ok, r.state, r.message) for r in results] == [
        (True, JobState.CANCELLED, "cancelled"),
        (True, JobState.RUNNING, "being cancelled"),
        (False, None, "no job 999"),
    ]
    view = await bench.service.job(running)
    assert view.completing
    assert bench.orders()[-1] == StopOrder(RankId(running, 1), StopReason.CANCEL, 30.0)
    (again,) = await bench.service.cancel([waiting], "bob")
    assert (again.ok, again.message) == (True, "already CANCELLED")


async def test_a_cancel_of_a_finished_job_is_no_failure(bench: Bench) -> None:
    job_id = await bench.running()
    await bench.report(job_id, RankPhase.RELEASED, DONE)
    (result,) = await bench.service.cancel([job_id], "bob")
    assert (result.ok, result.state) == (True, JobState.COMPLETED)
    assert result.message == "already COMPLETED"


async def test_hold_release_requeue(bench: Bench) -> None:
    job_id = await bench.submit()
    (held,) = await bench.service.hold([job_id], "ann")
    assert (held.ok, held.message) == (True, "now HELD")
    assert bench.service.snapshot().queue == ()
    view = await bench.service.job(job_id)
    assert (view.reason, view.eligible_at_s, view.wait_s) == ("Held", None, 0.0)
    await bench.service.release([job_id], "ann")
    await bench.place(job_id)
    (refused,) = await bench.service.hold([job_id], "ann")
    assert not refused.ok
    assert "only a waiting job can be held" in refused.message
    await bench.report(job_id, RankPhase.RELEASED, ExitFacts(exit_code=3))
    (requeued,) = await bench.service.requeue([job_id], "ann")
    assert (requeued.ok, requeued.state) == (True, JobState.PENDING)
    await bench.place(job_id)
    assert bench.orders()[-1].rank == RankId(job_id, 2)
    assert len((await bench.service.job(job_id)).attempts) == 2


async def test_lists(bench: Bench) -> None:
    first = await bench.submit("1", name="one")
    second = await bench.submit("2", user="bob")
    await bench.service.cancel([first], "ann")
    pending = frozenset({JobState.PENDING})

    async def ids(wanted: JobFilter) -> list[int]:
        return [view.job_id for view in await bench.service.jobs(wanted)]

    assert await ids(JobFilter()) == [second, first]
    assert await ids(JobFilter(limit=1)) == [second]
    assert await ids(JobFilter(before_job_id=second)) == [first]
    assert await ids(JobFilter(states=pending)) == [second]
    assert await ids(JobFilter(states=pending, user="ann")) == []
    assert await ids(JobFilter(states=pending, job_ids=(first,))) == []
    assert await bench.service.job(999) is None
    assert await bench.service.explain(999) is None


# Decisions


async def test_stale_starts_are_skipped(bench: Bench) -> None:
    first, second = await bench.submit("1"), await bench.submit("2")
    assert await bench.place(first) == 1
    assert await bench.place(first) == 0, "it no longer waits"
    assert await bench.place(second, ("n1", (0,))) == 0, "its GPU is taken"
    assert await bench.place(second, ("n9", (0,))) == 0, "no such node"
    await bench.service.set_node("n1", True, "disk", "root")
    assert await bench.place(second, ("n1", (1,))) == 0, "drained"
    await bench.service.set_node("n1", False, "", "root")
    await bench.service.agent_gone("n1", "i1")
    assert await bench.place(second, ("n1", (1,))) == 0, "its agent is not connected"
    await bench.hello("n1", RankReport(RankId(first, 1), RankPhase.RUNNING, 7))
    assert await bench.place(second, ("n1", (1,))) == 1


@pytest.mark.parametrize("demand", [{"cpus": 9}, {"memory_bytes": (1 << 35) + 1}])
async def test_cpus_and_memory_are_held_until_release(bench: Bench, demand: dict[str, int]) -> None:
    first, second = await bench.submit("1", **demand), await bench.submit("2", **demand)
    assert await bench.place(first) == 1
    assert await bench.place(second, ("n1", (1,))) == 0
    await bench.report(first, RankPhase.ENDED, DONE)
    assert await bench.place(second, ("n1", (1,))) == 0
    await bench.report(first, RankPhase.RELEASED, DONE)
    assert await bench.place(second, ("n1", (1,))) == 1


async def test_one_decision_cannot_give_a_gpu_away_twice(bench: Bench) -> None:
    first, second = await bench.submit("1"), await bench.submit("2")
    ranks = (RankPlacement("n1", ("n1-0",), (0,)),)
    decision = Decision((Start(first, ranks), Start(second, ranks)), {}, (), "p", "a")
    assert await bench.service.commit_decision(decision, 0) == 1
    assert await bench.state(second) is JobState.PENDING


async def test_a_gang_gets_a_port_and_its_peers(bench: Bench) -> None:
    await bench.hello("n2")
    first = await bench.submit("1", gpus=2, nodes=2)
    second = await bench.submit("2", gpus=2, nodes=2)
    await bench.place(first, ("n1", (0,)), ("n2", (0,)))
    await bench.place(second, ("n1", (1,)), ("n2", (1,)))
    orders = bench.orders("n1") + bench.orders("n2")
    ports = {order.rank.job_id: order.master_port for order in orders}
    assert len(set(ports.values())) == 2
    assert all(20_000 <= port < 30_000 for port in ports.values())
    assert orders[0].node_names == ("n1", "n2")
    assert {order.rank.node_rank for order in orders} == {0, 1}


async def test_the_queue_says_why(bench: Bench) -> None:
    job_id = await bench.submit()
    assert (await bench.service.explain(job_id)).text == "no scheduling cycle has looked at it yet"
    note = WaitNote(WaitReason.RESOURCES, 1, 1, "n1", 0, 0, "gpus")
    await bench.service.commit_decision(Decision((), {job_id: note}, (), "fcfs", "greedy"), 0)
    view = await bench.service.job(job_id)
    assert view.reason == "Resources"
    assert "the best node (n1) has 0 free" in view.reason_text
    assert (await bench.service.explain(job_id)).text == view.reason_text
    await bench.place(job_id, ("n1", (2,)))
    explained = await bench.service.explain(job_id)
    assert explained.lines[0] == "started on n1 (GPU 2)"
    assert explained.terms == {"packing": 1.0}
    await bench.report(job_id, RankPhase.RELEASED, DONE)
    explained = await bench.service.explain(job_id)
    assert (explained.reason, explained.lines[0]) == ("ExitZero", "started on n1 (GPU 2)")


async def test_only_news_for_the_scheduler_wakes_it(bench: Bench) -> None:
    changed = bench.service.changed

    async def wakes(doing: Awaitable[object]) -> bool:
        changed.clear()
        await doing
        return changed.is_set()

    assert await wakes(bench.submit())
    assert await wakes(bench.place(1))
    assert not await wakes(bench.report(1, RankPhase.RUNNING))
    assert not await wakes(bench.beat())
    assert await wakes(bench.report(1, RankPhase.RELEASED, DONE))
    assert await wakes(bench.service.set_node("n1", True, "x", "root"))


# Agents


async def test_a_second_agent_of_the_same_name_is_refused_while_the_first_lives(
    bench: Bench,
) -> None:
    with pytest.raises(Refused, match="another agent is connected as node n1") as caught:
        await bench.hello(node_id="other", instance="i2")
    assert caught.value.code == "duplicate_node"
    await bench.beat()
    await bench.service.agent_gone("n1", "i1")
    await bench.hello(node_id="other", instance="i2")


async def test_the_same_agent_takes_its_half_open_session_over(bench: Bench) -> None:
    await bench.hello(instance="i2")
    with pytest.raises(Refused, match="say Hello again"):
        await bench.beat()
    await bench.service.agent_gone("n1", "i1")
    assert bench.service.snapshot().cluster.nodes[0].accepts_work


async def test_an_old_stream_that_closes_late_does_not_end_the_new_session(bench: Bench) -> None:
    await bench.hello()
    await bench.service.agent_gone("n1", "i1")
    assert bench.service.snapshot().cluster.nodes[0].accepts_work
    await bench.service.agent_gone("n1", "i1")
    capacity = bench.service.snapshot().cluster.nodes[0]
    assert (capacity.accepts_work, capacity.reasons) == (False, ("its agent is not connected",))


async def test_an_agent_of_another_protocol_is_refused(bench: Bench) -> None:
    facts = NodeFacts("n5", "linux", 1, 1)
    with pytest.raises(Refused, match="protocol 9"):
        await bench.service.agent_hello(
            Hello("n5", "i", "b", "i", facts, (), protocol_major=9), "10.0.0.9"
        )


async def test_a_lost_answer_is_harmless(bench: Bench) -> None:
    job_id = await bench.submit()
    await bench.place(job_id)
    await bench.hello()  # the order went down with the old stream
    (order,) = bench.orders()
    assert order.rank == RankId(job_id, 1)
    await bench.report(job_id, RankPhase.RELEASED, DONE)
    welcome = await bench.hello("n1", RankReport(RankId(job_id, 1), RankPhase.RELEASED, 7, DONE))
    assert welcome.acknowledged == (RankId(job_id, 1),)
    assert bench.orders() == []


async def test_a_stop_that_was_asked_while_the_agent_was_away_is_sent_when_it_is_back(
    bench: Bench,
) -> None:
    job_id = await bench.running()
    await bench.service.agent_gone("n1", "i1")
    await bench.service.cancel([job_id], "ann")
    await bench.hello("n1", RankReport(RankId(job_id, 1), RankPhase.RUNNING, 7))
    assert bench.orders() == [StopOrder(RankId(job_id, 1), StopReason.CANCEL, 30.0)]


async def test_heartbeats_write_nothing_unless_health_changes(bench: Bench) -> None:
    before = await bench.history()
    await bench.beat(gpus=(GpuSample("n1-0", gpu_utilization_pct=3.0),))
    assert await bench.history() == before
    hot = GpuSample("n1-0", health=("too hot",))
    await bench.beat(gpus=(hot,), node_health=("clock",), xids=(XidEvent("n1-1", 79, "bus"),))
    (node,) = bench.service.nodes()
    out = "2 of 4 GPUs out of service: GPU 0: too hot; GPU 1: Xid 79: bus"
    assert node.reasons == ("clock", out)
    assert node.state == "UNHEALTHY"
    assert node.gpus[0].reasons == ("too hot",)
    assert node.gpus[1].reasons == ("Xid 79: bus",)
    told = len(await bench.history())
    await bench.beat(gpus=(hot,), node_health=("clock",))
    assert len(await bench.history()) == told
    await bench.beat()  # the collector gives no sample: no opinion
    assert bench.service.nodes()[0].gpus[0].reasons == ("too hot",)
    await bench.beat(gpus=(GpuSample("n1-0"),))
    (node,) = bench.service.nodes()
    assert [len(gpu.reasons) for gpu in node.gpus] == [0, 1, 0, 0]


async def test_node_views(bench: Bench, clock: Clock) -> None:
    job_id = await bench.running(cpus=3, memory_bytes=1 << 30)
    sample = GpuSample("n1-0", gpu_utilization_pct=50.0)
    await bench.beat(gpus=(sample,))
    clock.pass_(2.0)
    (node,) = bench.service.nodes()
    assert (node.state, node.jobs, node.cpus_used) == ("UP", (job_id,), 3)
    assert (node.memory_used_bytes, node.last_seen_s_ago) == (1 << 30, 2.0)
    assert [gpu.job_id for gpu in node.gpus] == [job_id, None, None, None]
    assert node.gpus[0].sample == sample
    info = bench.service.info()
    assert (info.gpus_total, info.gpus_used, info.nodes_up) == (4, 1, 1)


async def test_drain_and_resume(bench: Bench) -> None:
    job_id = await bench.running()
    await bench.service.set_node("n1", True, "new disk", "root")
    (node,) = bench.service.nodes()
    assert node.state == "DRAINING"
    assert node.reasons == ("drained by root: new disk",)
    await bench.report(job_id, RankPhase.RELEASED, DONE)
    assert bench.service.nodes()[0].state == "DRAINED"
    await bench.service.set_node("n1", False, "", "root")
    assert bench.service.nodes()[0].state == "UP"
    with pytest.raises(NoSuchNode):
        await bench.service.set_node("n9", True, "x", "root")


# Leases, deadlines, pauses: nobody sleeps


async def test_a_silent_node_is_lost_after_its_lease(bench: Bench) -> None:
    job_id = await bench.running()
    await bench.pass_time(9)
    assert await bench.state(job_id) is JobState.RUNNING
    await bench.pass_time(1)
    assert await bench.state(job_id) is JobState.PENDING
    assert bench.service.nodes()[0].state == "DOWN"
    with pytest.raises(Refused, match="say Hello again"):
        await bench.beat()
    welcome = await bench.hello("n1", RankReport(RankId(job_id, 1), RankPhase.RUNNING, 7))
    assert welcome.kill == (RankId(job_id, 1),)
    assert bench.service.nodes()[0].state == "UP"


async def test_heartbeats_keep_the_lease(bench: Bench) -> None:
    await bench.pass_time(60, "n1")
    assert bench.service.nodes()[0].state == "UP"


async def test_a_closed_stream_is_no_lost_node(bench: Bench) -> None:
    job_id = await bench.running(on_node_fail=OnNodeFail.FAIL)
    await bench.service.agent_gone("n1", "i1")
    await bench.pass_time(9)
    await bench.hello("n1", RankReport(RankId(job_id, 1), RankPhase.RUNNING, 7))
    await bench.pass_time(9)
    assert await bench.state(job_id) is JobState.RUNNING


async def test_nobody_is_judged_for_our_own_stall(bench: Bench, clock: Clock) -> None:
    job_id = await bench.running()
    clock.pass_(500.0)
    await bench.service.tick()
    assert await bench.state(job_id) is JobState.RUNNING
    await bench.pass_time(10)
    assert await bench.state(job_id) is JobState.PENDING


async def test_after_a_restart_everybody_gets_a_full_term(tmp_path: Path, clock: Clock) -> None:
    async with controller(tmp_path, clock) as bench:
        await bench.hello()
        job_id = await bench.running()
    clock.pass_(3600.0)
    async with controller(tmp_path, clock) as bench:
        await bench.pass_time(9)
        assert await bench.state(job_id) is JobState.RUNNING
        welcome = await bench.hello("n1", RankReport(RankId(job_id, 1), RankPhase.RUNNING, 7))
        assert welcome.kill == ()
        assert bench.orders() == []
        await bench.report(job_id, RankPhase.ENDED, ExitFacts(exit_code=5))
        view = await bench.service.job(job_id)
        assert (view.state, view.exit) == (JobState.FAILED, ExitFacts(exit_code=5))


async def test_an_end_while_the_controller_was_away_is_recorded(
    tmp_path: Path, clock: Clock
) -> None:
    async with controller(tmp_path, clock) as bench:
        await bench.hello()
        job_id = await bench.running()
    async with controller(tmp_path, clock) as bench:
        report = RankReport(RankId(job_id, 1), RankPhase.RELEASED, 7, DONE, RankUsage(4.0))
        welcome = await bench.hello("n1", report)
        assert welcome.acknowledged == (RankId(job_id, 1),)
        assert await bench.state(job_id) is JobState.COMPLETED


async def test_a_launch_that_a_dead_controller_did_not_send_is_sent_by_the_next(
    tmp_path: Path, clock: Clock
) -> None:
    async with controller(tmp_path, clock) as bench:
        await bench.hello()
        job_id = await bench.submit()
        await bench.place(job_id)
    async with controller(tmp_path, clock) as bench:
        assert await bench.place(job_id) == 0, "it must not be placed twice"
        await bench.hello()
        assert [order.rank for order in bench.orders()] == [RankId(job_id, 1)]


async def test_a_start_that_takes_too_long_is_stopped_and_tried_again(bench: Bench) -> None:
    job_id = await bench.submit()
    await bench.place(job_id)
    bench.orders()
    await bench.pass_time(59, "n1")
    assert bench.orders() == []
    await bench.pass_time(1, "n1")
    assert bench.orders() == [StopOrder(RankId(job_id, 1), StopReason.START_TIMEOUT, 30.0)]
    await bench.report(job_id, RankPhase.RELEASED, ExitFacts(signal=9))
    assert await bench.state(job_id) is JobState.PENDING


async def test_a_stop_that_does_nothing_is_repeated(bench: Bench) -> None:
    job_id = await bench.running()
    await bench.service.cancel([job_id], "ann")
    assert len(bench.orders()) == 2
    await bench.pass_time(65, "n1")
    assert bench.orders() == [StopOrder(RankId(job_id, 1), StopReason.CANCEL, 30.0)] * 2


async def test_a_failed_launch_pauses_the_job_and_excludes_the_node(
    bench: Bench, clock: Clock
) -> None:
    job_id = await bench.submit()
    await bench.place(job_id)
    fault = ExitFacts(launch_fault=LaunchFault.NODE, message="no space")
    await bench.report(job_id, RankPhase.RELEASED, fault)
    (waiting,) = bench.service.snapshot().queue
    assert waiting.not_before_s == clock.wall_s + 1.0
    assert waiting.excluded_nodes == {"n1"}
    bench.service.changed.clear()
    await bench.pass_time(1, "n1")
    assert bench.service.changed.is_set(), "the pause is over"
    assert bench.service.snapshot().queue[0].excluded_nodes == {"n1"}
    bench.service.changed.clear()
    await bench.pass_time(1, "n1")
    assert bench.service.changed.is_set(), "the exclusion is over"
    assert bench.service.snapshot().queue[0].excluded_nodes == frozenset()


# The log of events


async def test_watchers_get_history_and_news_without_gap_or_double(bench: Bench) -> None:
    for n in range(5):
        await bench.submit(f"a{n}")
    seen: list[int] = []

    async def follow() -> None:
        async for event in bench.service.watch(after_event_id=2):
            seen.append(event.event_id)
            if event.kind == "JobEnded":
                return

    async with asyncio.timeout(20):
        watcher = asyncio.create_task(follow())
        for n in range(5):
            await bench.submit(f"b{n}")
            await asyncio.sleep(0)
        await bench.service.cancel([1], "ann")
        await watcher
    assert seen == list(range(3, seen[-1] + 1))


async def test_a_watcher_from_before_this_controller_reads_the_store(
    tmp_path: Path, clock: Clock
) -> None:
    async with controller(tmp_path, clock) as bench:
        first = await bench.submit("1")
    async with controller(tmp_path, clock) as bench:
        second = await bench.submit("2")
        assert [event.job_id for event in await bench.history()] == [first, second]
        assert [e.job_id for e in await bench.history(job_ids=(second,))] == [second]
        assert [e.job_id for e in await bench.history(job_ids=(first,))] == [first]
        assert await bench.history(node="n1") == []


# Accounting


async def test_telemetry_of_an_attempt_is_weighted_by_time(bench: Bench, clock: Clock) -> None:
    job_id = await bench.running()

    async def sample(after_s: float, utilization_pct: float | None, memory: int | None) -> None:
        clock.pass_(after_s)
        mine = GpuSample("n1-0", memory, gpu_utilization_pct=utilization_pct)
        others = GpuSample("n1-1", 1 << 40, gpu_utilization_pct=100.0)
        await bench.beat(gpus=(mine, others))

    await sample(0.0, 0.0, 10)
    await sample(1.0, 80.0, 500)
    await sample(3.0, 40.0, 300)
    await sample(1.0, None, None)
    await bench.report(job_id, RankPhase.ENDED, DONE, elapsed_s=5.0)
    view = await bench.service.job(job_id)
    (attempt,) = view.attempts
    assert attempt.gpu_utilization_mean_pct == pytest.approx((80.0 * 1 + 40.0 * 3) / 4)
    assert attempt.gpu_memory_peak_bytes == 500


async def test_stale_samples_count_for_nothing(bench: Bench, clock: Clock) -> None:
    job_id = await bench.running()
    await bench.beat(gpus=(GpuSample("n1-0"),))
    clock.pass_(1.0)
    frozen = (GpuSample("n1-0", 10, gpu_utilization_pct=99.0),)
    await bench.beat(gpus=frozen, telemetry_age_s=7.0)
    await bench.report(job_id, RankPhase.ENDED, DONE)
    view = await bench.service.job(job_id)
    assert view.attempts[0].gpu_utilization_mean_pct is None


async def test_telemetry_goes_on_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    busy = (GpuSample("n1-0", 10, gpu_utilization_pct=60.0),)
    idle = (GpuSample("n1-0", 5, gpu_utilization_pct=0.0),)
    async with controller(tmp_path, clock) as bench:
        await bench.hello()
        job_id = await bench.running()
        for _ in range(32):
            clock.pass_(1.0)
            await bench.beat(gpus=busy)
            await bench.service.tick()
    async with controller(tmp_path, clock) as bench:
        await bench.hello("n1", RankReport(RankId(job_id, 1), RankPhase.RUNNING, 7))
        await bench.beat(gpus=idle)
        clock.pass_(10.0)
        await bench.beat(gpus=idle)
        await bench.report(job_id, RankPhase.ENDED, DONE)
        (attempt,) = (await bench.service.job(job_id)).attempts
    stored_s = 29.0  # stored at the flush after 30 s; the first sample has no span
    expected = 60.0 * stored_s / (stored_s + 10.0)
    assert attempt.gpu_utilization_mean_pct == pytest.approx(expected)
    assert attempt.gpu_memory_peak_bytes == 10


async def test_fair_share_counts_running_and_ended_work_and_decays(
    bench: Bench, clock: Clock
) -> None:
    def usage() -> dict[str, float]:
        return dict(bench.service.snapshot().cluster.usage_gpu_s)

    job_id = await bench.running()
    clock.pass_(10.0)
    assert usage() == {"ann": 10.0}
    await bench.report(job_id, RankPhase.RELEASED, DONE, elapsed_s=10.0)
    assert usage() == {"ann": pytest.approx(10.0)}
    clock.pass_(7 * 86_400.0)
    assert usage() == {"ann": pytest.approx(5.0)}


async def test_fair_share_survives_a_restart(tmp_path: Path, clock: Clock) -> None:
    async with controller(tmp_path, clock) as bench:
        await bench.hello()
        job_id = await bench.running()
        clock.pass_(8.0)
        await bench.report(job_id, RankPhase.RELEASED, DONE, elapsed_s=8.0)
    async with controller(tmp_path, clock) as bench:
        assert bench.service.snapshot().cluster.usage_gpu_s == {"ann": pytest.approx(8.0)}


# When things go wrong


async def test_a_commit_that_fails_changes_nothing_and_fails_only_who_asked(
    bench: Bench, tmp_path: Path
) -> None:
    first = await bench.submit("1")
    snapshot = bench.service.snapshot()
    blocker = sqlite3.connect(tmp_path / "controller.db")
    blocker.execute("CREATE TRIGGER trouble BEFORE INSERT ON events BEGIN "
                    "SELECT RAISE(ABORT, 'trouble'); END")  # fmt: skip
    with pytest.raises(Exception, match="trouble"):
        await bench.submit("2")
    with pytest.raises(Exception, match="trouble"):
        await bench.place(first)
    assert bench.orders() == []
    assert bench.service.snapshot().queue == snapshot.queue
    blocker.execute("DROP TRIGGER trouble")
    blocker.close()
    assert await bench.submit("2") == first + 1


async def test_a_locked_database_is_told_and_recovered_from(bench: Bench, tmp_path: Path) -> None:
    bench.store._connection.execute("PRAGMA busy_timeout = 1")
    blocker = sqlite3.connect(tmp_path / "controller.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked"):
        await bench.submit("1")
    await bench.pass_time(12)
    assert bench.service.nodes()[0].state == "UP", "the loss could not be stored"
    blocker.execute("ROLLBACK")
    blocker.close()
    await bench.service.tick()
    assert bench.service.nodes()[0].state == "DOWN", "it is tried again"


async def test_a_store_that_cannot_be_read_fails_who_asked_and_not_the_writer(
    bench: Bench, tmp_path: Path
) -> None:
    bench.store._connection.execute("ALTER TABLE jobs RENAME TO away")
    with pytest.raises(StoreUnavailable, match="no such table"):
        await bench.service.requeue([12_345], "alice")  # looked for in the store
    bench.store._connection.execute("ALTER TABLE away RENAME TO jobs")
    assert await bench.submit("1") == 1


async def test_one_bad_command_of_a_batch_fails_alone(bench: Bench) -> None:
    job_id = await bench.submit("1")
    writer = bench.service._core.writer
    place = Place("n1", ("n1-0",), (0,))

    def twice(gpu_of: int) -> Callable[[object], Awaitable[None]]:
        event = JobPlaced(gpu_of, (place,), 1.0)
        return lambda transaction: transaction.apply(event)

    other = await bench.submit("2")
    results = await asyncio.gather(
        writer.do(twice(job_id)),
        writer.do(twice(other)),  # the same GPU: the schema refuses it
        bench.submit("3"),
        return_exceptions=True,
    )
    assert [type(result).__name__ for result in results] == ["NoneType", "StoreRefused", "int"]
    assert await bench.state(job_id) is JobState.STARTING
    assert await bench.state(other) is JobState.PENDING


async def test_an_illegal_transition_tells_the_jobs_story(bench: Bench) -> None:
    job_id = await bench.submit()
    await bench.service.cancel([job_id], "ann")
    event = JobPlaced(job_id, (Place("n1", ("n1-0",), (0,)),), 1.0)
    with pytest.raises(IllegalTransition) as caught:
        await bench.service._core.writer.do(lambda tx: tx.apply(event), job_ids=[job_id])
    assert [note.split()[1][:-1] for note in caught.value.__notes__] == ["JobSubmitted", "JobEnded"]


async def test_callers_are_told_when_the_controller_stops(tmp_path: Path, clock: Clock) -> None:
    async with controller(tmp_path, clock) as bench:
        await bench.submit("1")
    with pytest.raises(StoreUnavailable, match="stopping"):
        await bench.submit("2")


async def test_many_callers_share_a_transaction(bench: Bench) -> None:
    commits = []
    bench.store._connection.set_trace_callback(
        lambda statement: commits.append(statement) if statement == "COMMIT" else None
    )
    ids = await asyncio.gather(*(bench.submit(f"r{n}") for n in range(100)))
    assert sorted(ids) == list(range(1, 101))
    assert len(commits) <= 3


async def test_an_attempt_out_of_sight_stops_counting_when_its_job_ends(
    bench: Bench, clock: Clock
) -> None:
    job_id = await bench.running(on_node_fail=OnNodeFail.FAIL)
    await bench.pass_time(10)
    clock.pass_(1000.0)
    view = await bench.service.job(job_id)
    assert (view.state, view.run_s) == (JobState.NODE_FAIL, 10.0)
    assert view.attempts[0].state is AttemptState.LOST
