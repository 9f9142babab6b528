"""The scheduling loop with the real service and scheduler, on clocks that tests hold."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from controller.dispatch import Dispatch
from controller.loop import SchedulingLoop
from controller.scheduler.allocator.protocol import Allocator
from controller.scheduler.cycle import Scheduler
from controller.scheduler.policies import make_allocator, make_prioritizer
from controller.scheduler.types import ClusterView, Placement, RankedJob
from controller.service import Service, Submission
from controller.store.store import Store
from protos.messages import (
    ExitFacts,
    GpuFacts,
    Hello,
    JobSpec,
    JobState,
    LaunchFault,
    LaunchOrder,
    NodeFacts,
    RankPhase,
    RankReport,
)

FCFS = Scheduler(make_prioritizer("fcfs"), make_allocator("greedy"))


class Clock:
    """Time that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.s = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.s += seconds
        await asyncio.sleep(0)


class Bench:
    """A service with four GPUs, and loops over it."""

    def __init__(self, service: Service, dispatch: Dispatch, clock: Clock) -> None:
        self.service = service
        self.dispatch = dispatch
        self.clock = clock
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, allocator: Allocator | None = None, min_interval_s: float = 0.005) -> None:
        loop = SchedulingLoop(
            self.service,
            FCFS if allocator is None else replace(FCFS, allocator=allocator),
            monotonic=self.clock,
            sleep=self.clock.sleep,
            min_interval_s=min_interval_s,
        )
        self.tasks.append(asyncio.create_task(loop.run()))

    async def submit(self, *requests: str, gpus: int = 1) -> list[int]:
        spec = JobSpec("j", "ann", ("true",), "/", gpus=gpus)
        return await self.service.submit([Submission(r, spec) for r in requests], "ann")

    async def order(self) -> LaunchOrder:
        async with asyncio.timeout(20):
            order = await self.dispatch.queue("n1").get()
        assert isinstance(order, LaunchOrder)
        return order

    async def report(self, order: LaunchOrder, exit_facts: ExitFacts | None = None) -> None:
        phase = RankPhase.RUNNING if exit_facts is None else RankPhase.RELEASED
        await self.service.rank_report("n1", RankReport(order.rank, phase, 7, exit_facts))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.001)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    clock = Clock()
    with Store.open(tmp_path) as store:
        dispatch = Dispatch()
        service = Service(
            store, dispatch, cluster="c", scheduler=FCFS, version="0",
            lease_s=10.0, heartbeat_s=1.0, now=clock, monotonic=clock,
        )  # fmt: skip
        await service.load()
        opened = Bench(service, dispatch, clock)
        opened.tasks.append(asyncio.create_task(service.run()))
        gpus = tuple(GpuFacts(f"g{i}", i, "Mock", "P100", str(i)) for i in range(4))
        facts = NodeFacts("n1", "linux", 16, 1 << 36, gpus)
        await service.agent_hello(Hello("n1", "id", "b", "i", facts, ()), "10.0.0.1")
        yield opened
        for task in reversed(opened.tasks):
            task.cancel()
        await asyncio.gather(*opened.tasks, return_exceptions=True)


async def test_jobs_start_when_they_come_and_when_others_end(bench: Bench) -> None:
    bench.start()
    first, second = await bench.submit("1", "2", gpus=4)
    order = await bench.order()
    assert order.rank.job_id == first
    await bench.report(order, ExitFacts(exit_code=0))
    assert (await bench.order()).rank.job_id == second


async def test_nothing_is_decided_while_nothing_happens(bench: Bench) -> None:
    bench.start()
    await bench.submit("1")
    order = await bench.order()
    await bench.until(lambda: not bench.service.changed.is_set())
    cycles = bench.service.stats.cycles
    await bench.report(order)  # it runs: no news for the scheduler
    for _ in range(50):
        await asyncio.sleep(0)
    assert bench.service.stats.cycles == cycles


async def test_cycles_are_paced(bench: Bench) -> None:
    bench.start(min_interval_s=3.0)
    await bench.submit("1")
    await bench.order()
    await bench.until(lambda: bool(bench.clock.slept))
    assert bench.clock.slept[0] == 3.0


class Failing:
    """An allocator that fails a few times."""

    name = "failing"

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def place(self, ranked: Sequence[RankedJob], cluster: ClusterView, now_s: float) -> Placement:
        if self.failures:
            self.failures -= 1
            raise ZeroDivisionError("a defect in the policy")
        return make_allocator("greedy").place(ranked, cluster, now_s)


async def test_a_cycle_that_fails_is_told_and_tried_again(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    allocator = Failing(3)
    bench.start(allocator)
    await bench.submit("1")
    await bench.order()
    assert allocator.failures == 0
    assert [s for s in bench.clock.slept if s >= 0.1] == [0.1, 0.2, 0.4]
    assert "ZeroDivisionError: a defect in the policy" in caplog.text
    await bench.until(lambda: bench.service.info().last_error == "")


async def test_a_defect_that_stays_is_shown_and_never_kills_the_loop(bench: Bench) -> None:
    bench.start(Failing(10**9))
    await bench.submit("1")
    await bench.until(lambda: len(bench.clock.slept) > 10)
    assert bench.service.info().last_error == "ZeroDivisionError: a defect in the policy"
    assert max(bench.clock.slept) == 10.0
    assert not bench.tasks[-1].done()


class Slow:
    """An allocator that thinks until it is let go."""

    name = "slow"

    def __init__(self) -> None:
        self.thinking = threading.Event()
        self.go = threading.Event()

    def place(self, ranked: Sequence[RankedJob], cluster: ClusterView, now_s: float) -> Placement:
        self.thinking.set()
        self.go.wait(20)
        return make_allocator("greedy").place(ranked, cluster, now_s)


async def test_a_slow_decision_stops_nobody_and_is_checked_when_it_comes(bench: Bench) -> None:
    slow = Slow()
    bench.start(slow)
    cancelled, kept = await bench.submit("1", "2")
    await bench.until(slow.thinking.is_set)
    await bench.service.cancel([cancelled], "ann")
    slow.go.set()
    assert (await bench.order()).rank.job_id == kept
    view = await bench.service.job(cancelled)
    assert view is not None
    assert view.state is JobState.CANCELLED
    assert view.attempts == ()


async def test_the_end_of_a_pause_is_not_missed(bench: Bench) -> None:
    bench.start()
    await bench.submit("1")
    order = await bench.order()
    await bench.report(order, ExitFacts(launch_fault=LaunchFault.NODE, message="no space"))
    bench.clock.s += 2.5
    await bench.service.tick()
    again = await bench.order()
    assert (again.rank.job_id, again.rank.attempt) == (order.rank.job_id, 2)
