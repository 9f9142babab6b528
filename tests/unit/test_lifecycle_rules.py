"""The rules of jobs, attempts and nodes, case by case: event in, state, orders and records out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.lifecycle import events, rules
from controller.lifecycle.effects import Effect, Launch, Stop
from controller.lifecycle.errors import IllegalTransition, NotAllowed
from controller.lifecycle.invariants import check_all
from controller.lifecycle.job import EndReason
from controller.lifecycle.node import GpuFaultKind
from controller.lifecycle.node_rules import welcome_lists
from controller.lifecycle.state import ClusterState
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
    XidEvent,
)

NATURAL = ExitFacts(exit_code=0)


def facts(node: str, gpus: int = 4) -> NodeFacts:
    return NodeFacts(
        node,
        "linux",
        64,
        1 << 40,
        tuple(GpuFacts(f"{node}-{i}", i, "Mock", "P100", str(i)) for i in range(gpus)),
    )


class World:
    """A cluster of connected nodes n1..n3 on which a test acts; invariants hold at each step."""

    def __init__(self) -> None:
        self.state = ClusterState()
        self.now_s = 100.0
        self.effects: list[Effect] = []
        self.kinds: list[str] = []
        for name in ("n1", "n2", "n3"):
            self.hello(name)

    def apply(self, event: events.Event) -> list[Effect]:
        outcome = rules.apply(self.state, event)
        self.state.absorb(outcome.changes)
        self.kinds += [record.kind for record in outcome.records]
        assert check_all(self.state) == []
        self.effects = outcome.effects
        return outcome.effects

    def hello(
        self,
        name: str,
        *reports: RankReport,
        boot: str = "b1",
        node_facts: NodeFacts | None = None,
    ) -> tuple[tuple[RankId, ...], tuple[RankId, ...]]:
        hello = Hello(name, f"id-{name}", boot, "i", node_facts or facts(name), reports)
        self.apply(events.AgentConnected(hello, "10.0.0.1", self.now_s))
        return welcome_lists(self.state, hello)

    def submit(self, job_id: int = 1, **spec: object) -> None:
        values: dict[str, object] = {
            "name": "j", "user": "ann", "argv": ("true",), "cwd": "/", "gpus": 1, **spec,
        }  # fmt: skip
        made = JobSpec(**values)  # type: ignore[arg-type]
        self.apply(events.JobSubmitted(job_id, f"r{job_id}", made, self.now_s, "ann"))

    def place(self, job_id: int = 1, *nodes: str, gpu: int = 0) -> list[Effect]:
        places = tuple(events.Place(n, (f"{n}-{gpu}",), (gpu,)) for n in nodes or ("n1",))
        return self.apply(events.JobPlaced(job_id, places, self.now_s))

    def report(
        self,
        phase: RankPhase,
        exit_facts: ExitFacts | None = None,
        *,
        rank: RankId | None = None,
        node: str = "n1",
        dirty: dict[str, str] | None = None,
        elapsed_s: float = 0.0,
    ) -> list[Effect]:
        usage = RankUsage(elapsed_s) if exit_facts is not None else None
        report = RankReport(
            rank or RankId(1, 1), phase, 7, exit_facts, usage, dirty_gpus=dirty or {}
        )
        return self.apply(events.RankReported(node, report, self.now_s))

    def run(self, **spec: object) -> None:
        self.submit(**spec)
        self.place()
        self.report(RankPhase.RUNNING)

    def run_on_two(self, **spec: object) -> None:
        self.submit(gpus=2, nodes=2, **spec)
        self.place(1, "n1", "n2")
        self.report(RankPhase.RUNNING)
        self.report(RankPhase.RUNNING, rank=RankId(1, 1, 1), node="n2")

    def lose(self, name: str = "n1") -> list[Effect]:
        return self.apply(events.NodeLost(name, self.now_s, 10.0))

    def cancel(self) -> list[Effect]:
        return self.apply(events.CancelRequested(1, "bob", "mistake", self.now_s))

    def job(self, job_id: int = 1):
        return self.state.jobs[job_id]

    def attempt(self, number: int = 1, job_id: int = 1):
        return self.state.attempts[job_id, number]

    def gpu_is_held(self, node: str = "n1") -> bool:
        return bool(self.state.held_keys(node))


@pytest.fixture
def world() -> World:
    return World()


# One attempt, from start to end


@pytest.mark.parametrize(
    ("exit_facts", "state", "reason"),
    [
        (ExitFacts(exit_code=0), JobState.COMPLETED, EndReason.EXIT_ZERO),
        (ExitFacts(exit_code=3), JobState.FAILED, EndReason.NON_ZERO_EXIT),
        (ExitFacts(signal=9), JobState.FAILED, EndReason.SIGNALLED),
        (ExitFacts(), JobState.FAILED, EndReason.NON_ZERO_EXIT),
        (
            ExitFacts(signal=9, oom=OomKind.HOST),
            JobState.OUT_OF_MEMORY,
            EndReason.HOST_OUT_OF_MEMORY,
        ),
        (
            ExitFacts(exit_code=1, oom=OomKind.CUDA),
            JobState.OUT_OF_MEMORY,
            EndReason.CUDA_OUT_OF_MEMORY,
        ),
        (
            ExitFacts(exit_code=0, stop_reason=StopReason.TIME_LIMIT),
            JobState.TIMEOUT,
            EndReason.TIME_LIMIT,
        ),
        (
            ExitFacts(signal=9, stop_reason=StopReason.MEMORY_LIMIT),
            JobState.OUT_OF_MEMORY,
            EndReason.HOST_OUT_OF_MEMORY,
        ),
        (
            ExitFacts(launch_fault=LaunchFault.JOB, message="no folder /x"),
            JobState.FAILED,
            EndReason.LAUNCH_FAILED,
        ),
    ],
)
def test_a_job_ends_by_what_its_attempt_came_to(
    world: World, exit_facts: ExitFacts, state: JobState, reason: EndReason
) -> None:
    world.run()
    world.report(RankPhase.ENDED, exit_facts)
    assert (world.job().state, world.job().reason) == (state, reason)
    assert world.job().exit == exit_facts


def test_gpus_are_held_from_placement_until_the_agent_has_checked_them(world: World) -> None:
    world.submit()
    assert not world.gpu_is_held()
    assert world.place() == [Launch("n1", RankId(1, 1))]
    assert world.gpu_is_held()
    world.report(RankPhase.RUNNING)
    world.report(RankPhase.ENDED, NATURAL)
    assert world.job().state is JobState.COMPLETED
    assert world.gpu_is_held()
    world.report(RankPhase.RELEASED, NATURAL)
    assert not world.gpu_is_held()


def test_the_event_log_tells_the_whole_story(world: World) -> None:
    world.kinds.clear()
    world.run()
    world.report(RankPhase.ENDED, NATURAL)
    world.report(RankPhase.RELEASED, NATURAL)
    assert world.kinds == [
        "JobSubmitted",
        "AttemptPlaced",
        "AttemptStarted",
        "AttemptEnded",
        "JobEnded",
        "RankReleased",
    ]


def test_a_later_report_contains_the_earlier_ones(world: World) -> None:
    world.submit()
    world.place()
    world.now_s = 110.0
    world.report(RankPhase.RELEASED, NATURAL, elapsed_s=4.0)
    assert world.job().state is JobState.COMPLETED
    assert world.job().started_at_s == 106.0
    assert not world.gpu_is_held()


def test_a_repeated_report_changes_nothing(world: World) -> None:
    world.run()
    world.report(RankPhase.ENDED, NATURAL)
    before = (world.job(), world.attempt())
    world.kinds.clear()
    for phase in (RankPhase.LAUNCHING, RankPhase.RUNNING, RankPhase.ENDED):
        world.report(phase, ExitFacts(exit_code=9) if phase is RankPhase.ENDED else None)
    assert (world.job(), world.attempt()) == before
    assert world.kinds == []


def test_a_late_report_does_not_stretch_the_run(world: World) -> None:
    world.run()
    world.now_s = 700.0
    world.report(RankPhase.ENDED, NATURAL, elapsed_s=20.0)
    assert world.attempt().ended_at_s == 120.0
    assert world.job().ended_at_s == 120.0


def test_a_final_state_is_never_overwritten(world: World) -> None:
    world.run()
    world.report(RankPhase.ENDED, NATURAL)
    world.cancel()
    world.lose()
    assert world.job().state is JobState.COMPLETED
    with pytest.raises(IllegalTransition, match="job 1 is COMPLETED"):
        world.place()


# Cancel, hold, requeue


def test_a_waiting_job_is_cancelled_at_once(world: World) -> None:
    world.submit()
    assert world.cancel() == []
    assert world.job().state is JobState.CANCELLED
    assert world.job().reason_text == "Cancelled by bob: mistake"


@pytest.mark.parametrize("phase", [RankPhase.LAUNCHING, RankPhase.RUNNING])
def test_a_placed_job_is_cancelled_when_its_processes_have_ended(
    world: World, phase: RankPhase
) -> None:
    world.submit()
    world.place()
    if phase is RankPhase.RUNNING:
        world.report(phase)
    assert world.cancel() == [Stop("n1", RankId(1, 1), StopReason.CANCEL, 30.0)]
    assert not world.job().state.is_final
    world.report(RankPhase.ENDED, NATURAL)
    assert world.job().state is JobState.CANCELLED
    assert "bob: mistake" in world.job().reason_text


def test_a_second_cancel_orders_nothing_and_keeps_the_first_reason(world: World) -> None:
    world.run()
    world.cancel()
    effects = world.apply(events.CancelRequested(1, "eve", "me too", world.now_s))
    assert effects == []
    assert world.job().cancel.actor == "bob"


def test_an_end_that_was_recorded_first_wins_over_a_cancel(world: World) -> None:
    world.run()
    world.report(RankPhase.ENDED, ExitFacts(exit_code=3))
    world.cancel()
    assert world.job().state is JobState.FAILED
    assert world.job().cancel is None


def test_a_cancel_overrides_another_wish_to_stop(world: World) -> None:
    world.run()
    world.apply(events.RequeueRequested(1, "ann", world.now_s))
    assert world.cancel() == [Stop("n1", RankId(1, 1), StopReason.CANCEL, 30.0)]
    world.report(RankPhase.ENDED, ExitFacts(signal=15))
    assert world.job().state is JobState.CANCELLED


def test_the_first_wish_to_stop_stays(world: World) -> None:
    world.submit()
    world.place()
    world.apply(events.StartDeadlinePassed(1, 1, world.now_s, 60.0))
    world.apply(events.RequeueRequested(1, "ann", world.now_s))
    assert world.attempt().stop_reason is StopReason.START_TIMEOUT


def test_a_rank_that_runs_although_it_was_stopped_is_told_again(world: World) -> None:
    world.submit()
    world.place()
    world.cancel()
    effects = world.report(RankPhase.RUNNING)
    assert effects == [Stop("n1", RankId(1, 1), StopReason.CANCEL, 30.0)]


def test_hold_and_release(world: World) -> None:
    world.submit(hold=True)
    assert (world.job().state, world.job().eligible_at_s) == (JobState.HELD, None)
    world.now_s = 150.0
    world.apply(events.ReleaseRequested(1, "ann", world.now_s))
    assert (world.job().state, world.job().eligible_at_s) == (JobState.PENDING, 150.0)
    world.apply(events.HoldRequested(1, "ann", world.now_s))
    assert world.job().state is JobState.HELD


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (events.HoldRequested(1, "ann", 1.0), "only a waiting job can be held"),
        (events.ReleaseRequested(1, "ann", 1.0), "only a held job can be released"),
    ],
)
def test_wishes_that_the_state_rules_out(world: World, event: events.Event, words: str) -> None:
    world.run()
    with pytest.raises(NotAllowed, match=words):
        world.apply(event)


def test_a_running_job_is_requeued_after_its_end(world: World) -> None:
    world.run()
    world.apply(events.RequeueRequested(1, "ann", world.now_s))
    assert world.job().state is JobState.RUNNING
    world.now_s = 160.0
    world.report(RankPhase.ENDED, NATURAL)
    job = world.job()
    assert (job.state, job.restarts, job.eligible_at_s) == (JobState.PENDING, 1, 160.0)
    world.place(gpu=1)
    assert world.job().attempt == 2


def test_a_finished_job_is_requeued_with_the_next_attempt(world: World) -> None:
    world.run()
    world.report(RankPhase.RELEASED, ExitFacts(exit_code=3))
    world.apply(events.RequeueRequested(1, "ann", world.now_s))
    job = world.job()
    assert (job.state, job.exit, job.ended_at_s) == (JobState.PENDING, None, None)
    assert world.place() == [Launch("n1", RankId(1, 2))]


def test_a_job_that_waits_cannot_be_requeued(world: World) -> None:
    world.submit()
    with pytest.raises(NotAllowed, match="it has not run yet"):
        world.apply(events.RequeueRequested(1, "ann", world.now_s))


# Several nodes


def test_an_attempt_runs_when_all_its_ranks_run(world: World) -> None:
    world.submit(gpus=2, nodes=2)
    effects = world.place(1, "n1", "n2")
    assert effects == [Launch("n1", RankId(1, 1, 0)), Launch("n2", RankId(1, 1, 1))]
    world.report(RankPhase.RUNNING)
    assert world.job().state is JobState.STARTING
    world.report(RankPhase.RUNNING, rank=RankId(1, 1, 1), node="n2")
    assert world.job().state is JobState.RUNNING


def test_the_first_bad_end_stops_the_others_and_is_the_attempts_exit(world: World) -> None:
    world.run_on_two()
    effects = world.report(RankPhase.ENDED, ExitFacts(exit_code=7), rank=RankId(1, 1, 1), node="n2")
    assert effects == [Stop("n1", RankId(1, 1, 0), StopReason.RANK_FAILED, 30.0)]
    assert world.job().state is JobState.RUNNING
    world.report(RankPhase.ENDED, ExitFacts(signal=15, stop_reason=StopReason.RANK_FAILED))
    job = world.job()
    assert (job.state, job.exit, job.exit_node_rank) == (
        JobState.FAILED,
        ExitFacts(exit_code=7),
        1,
    )


def test_a_good_end_waits_for_the_others(world: World) -> None:
    world.run_on_two()
    assert world.report(RankPhase.ENDED, NATURAL) == []
    assert world.job().state is JobState.RUNNING
    world.report(RankPhase.ENDED, NATURAL, rank=RankId(1, 1, 1), node="n2")
    assert world.job().state is JobState.COMPLETED


def test_one_ranks_time_limit_is_the_jobs(world: World) -> None:
    world.run_on_two()
    world.report(RankPhase.ENDED, ExitFacts(exit_code=0, stop_reason=StopReason.TIME_LIMIT))
    world.report(RankPhase.ENDED, ExitFacts(signal=15), rank=RankId(1, 1, 1), node="n2")
    assert world.job().state is JobState.TIMEOUT


# Launches that fail


def test_a_nodes_fault_at_launch_pauses_the_job_and_shuts_that_node_out_longer(
    world: World,
) -> None:
    world.submit()
    for n, pause_s in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0)):
        world.place()
        world.report(
            RankPhase.RELEASED,
            ExitFacts(launch_fault=LaunchFault.NODE, message="no space"),
            rank=RankId(1, n),
        )
        job = world.job()
        assert job.state is JobState.PENDING
        assert job.not_before_s == world.now_s + pause_s
        assert job.failed_launches[-1].excluded_until_s == world.now_s + 2 * pause_s
    world.place()
    world.report(RankPhase.RELEASED, ExitFacts(launch_fault=LaunchFault.NODE), rank=RankId(1, 5))
    assert world.job().state is JobState.FAILED
    assert "could not be launched 5 times (on n1)" in world.job().reason_text


def test_three_nodes_that_cannot_launch_a_job_make_it_the_jobs_fault(world: World) -> None:
    world.submit()
    for n, node in enumerate(("n1", "n2", "n3"), start=1):
        world.place(1, node)
        world.report(
            RankPhase.RELEASED,
            ExitFacts(launch_fault=LaunchFault.NODE, message="no space"),
            rank=RankId(1, n),
            node=node,
        )
    assert world.job().state is JobState.FAILED
    assert world.job().reason_text.endswith("(on n1, n2, n3); the last time: no space")


def test_a_node_that_fails_three_jobs_is_out_of_service_until_resumed(world: World) -> None:
    for job_id in (1, 2, 3):
        assert world.state.nodes["n1"].accepts_work
        world.submit(job_id)
        world.place(job_id)
        world.report(
            RankPhase.RELEASED, ExitFacts(launch_fault=LaunchFault.NODE), rank=RankId(job_id, 1)
        )
    assert not world.state.nodes["n1"].accepts_work
    world.apply(events.NodeResumed("n1", "root", "", world.now_s))
    assert world.state.nodes["n1"].accepts_work


def test_a_launch_that_works_clears_the_blame(world: World) -> None:
    world.submit()
    world.place()
    world.report(RankPhase.RELEASED, ExitFacts(launch_fault=LaunchFault.NODE))
    assert world.state.nodes["n1"].launch_fault_jobs == (1,)
    world.place()
    world.report(RankPhase.RUNNING, rank=RankId(1, 2))
    assert world.state.nodes["n1"].launch_fault_jobs == ()
    assert world.job().failed_launches == ()


def test_a_start_that_takes_too_long_is_the_nodes_fault(world: World) -> None:
    world.submit()
    world.place()
    effects = world.apply(events.StartDeadlinePassed(1, 1, world.now_s, 60.0))
    assert effects == [Stop("n1", RankId(1, 1), StopReason.START_TIMEOUT, 30.0)]
    world.report(RankPhase.ENDED, ExitFacts(signal=15, stop_reason=StopReason.START_TIMEOUT))
    job = world.job()
    assert (job.state, job.reason) == (JobState.PENDING, EndReason.NODE_FAULT)
    assert [launch.node for launch in job.failed_launches] == ["n1"]


def test_only_the_slow_node_of_a_gang_is_blamed(world: World) -> None:
    world.submit(gpus=2, nodes=2)
    world.place(1, "n1", "n2")
    world.report(RankPhase.RUNNING)
    world.apply(events.StartDeadlinePassed(1, 1, world.now_s, 60.0))
    assert [launch.node for launch in world.job().failed_launches] == ["n2"]
    assert world.state.nodes["n1"].launch_fault_jobs == ()


def test_a_deadline_after_the_start_does_nothing(world: World) -> None:
    world.run()
    assert world.apply(events.StartDeadlinePassed(1, 1, world.now_s, 60.0)) == []
    assert world.job().state is JobState.RUNNING


# Nodes that are lost and come back


@pytest.mark.parametrize(
    ("policy", "state"),
    [
        (OnNodeFail.REQUEUE, JobState.PENDING),
        (OnNodeFail.FAIL, JobState.NODE_FAIL),
        (OnNodeFail.WAIT, JobState.RUNNING),
    ],
)
def test_a_lost_node_means_to_a_job_what_it_chose(
    world: World, policy: OnNodeFail, state: JobState
) -> None:
    world.run(on_node_fail=policy)
    world.lose()
    assert world.job().state is state
    assert world.attempt().state is AttemptState.LOST
    assert world.attempt().fenced == (policy is not OnNodeFail.WAIT)
    assert world.gpu_is_held()


def test_an_agent_that_returns_kills_what_was_given_up(world: World) -> None:
    world.run()
    world.lose()
    kill, _ = world.hello("n1", RankReport(RankId(1, 1), RankPhase.RUNNING, 7))
    assert kill == (RankId(1, 1),)
    world.place(1, "n2")
    world.report(RankPhase.RELEASED, ExitFacts(signal=9, stop_reason=StopReason.FENCED))
    assert world.job().state is JobState.STARTING
    assert not world.gpu_is_held("n1")


def test_an_agent_that_returns_kills_what_nobody_knows(world: World) -> None:
    kill, _ = world.hello("n1", RankReport(RankId(77, 1), RankPhase.RUNNING, 7))
    assert kill == (RankId(77, 1),)


def test_a_job_that_waits_for_its_node_goes_on_when_it_is_back(world: World) -> None:
    world.run(on_node_fail=OnNodeFail.WAIT)
    world.lose()
    kill, _ = world.hello("n1", RankReport(RankId(1, 1), RankPhase.RUNNING, 7))
    assert kill == ()
    assert world.attempt().state is AttemptState.RUNNING
    assert world.effects == []


def test_a_waiting_attempt_of_two_nodes_starts_when_the_last_one_is_back(world: World) -> None:
    world.submit(gpus=2, nodes=2, on_node_fail=OnNodeFail.WAIT)
    world.place(1, "n1", "n2")
    world.report(RankPhase.RUNNING, rank=RankId(1, 1, 1), node="n2")
    world.lose("n2")
    world.report(RankPhase.RUNNING)
    assert world.job().state is JobState.STARTING
    world.hello("n2", RankReport(RankId(1, 1, 1), RankPhase.RUNNING, 7))
    assert world.job().state is JobState.RUNNING


def test_an_end_during_the_absence_counts_if_nothing_replaced_it(world: World) -> None:
    world.run()
    world.lose()
    assert world.job().state is JobState.PENDING
    world.now_s = 500.0
    world.hello("n1", RankReport(RankId(1, 1), RankPhase.ENDED, 7, NATURAL, RankUsage(5.0)))
    assert world.job().state is JobState.COMPLETED
    assert world.attempt().ended_at_s == 105.0


def test_an_end_during_the_absence_does_not_count_for_a_job_that_runs_again(
    world: World,
) -> None:
    world.run()
    world.lose()
    world.place(1, "n2")
    world.hello("n1", RankReport(RankId(1, 1), RankPhase.ENDED, 7, NATURAL, RankUsage(5.0)))
    assert world.job().state is JobState.STARTING
    assert world.attempt().exit == NATURAL


def test_a_cancel_of_a_job_out_of_sight_does_not_wait_for_its_node(world: World) -> None:
    world.run(on_node_fail=OnNodeFail.WAIT)
    world.lose()
    world.cancel()
    assert world.job().state is JobState.CANCELLED
    kill, _ = world.hello("n1", RankReport(RankId(1, 1), RankPhase.RUNNING, 7))
    assert kill == (RankId(1, 1),)


def test_a_job_that_was_being_cancelled_when_its_node_was_lost_is_cancelled(
    world: World,
) -> None:
    world.run()
    world.cancel()
    world.lose()
    assert world.job().state is JobState.CANCELLED


def test_a_lost_node_stops_the_other_ranks(world: World) -> None:
    world.run_on_two()
    effects = world.lose("n2")
    assert Stop("n1", RankId(1, 1, 0), StopReason.FENCED, 30.0) in effects
    assert world.job().state is JobState.PENDING


def test_a_launch_that_never_arrived_is_ordered_again(world: World) -> None:
    world.submit()
    world.place()
    world.hello("n1")
    assert world.effects == [Launch("n1", RankId(1, 1))]
    assert world.job().state is JobState.STARTING


def test_a_running_rank_that_its_agent_does_not_know_has_failed_with_the_node(
    world: World,
) -> None:
    world.run()
    world.hello("n1")
    job = world.job()
    assert (job.state, job.reason) == (JobState.PENDING, EndReason.NODE_FAILED)
    assert not world.gpu_is_held()


@pytest.mark.parametrize(
    ("policy", "state"),
    [
        (OnNodeFail.REQUEUE, JobState.PENDING),
        (OnNodeFail.WAIT, JobState.PENDING),
        (OnNodeFail.FAIL, JobState.NODE_FAIL),
    ],
)
def test_a_new_boot_proves_the_process_gone(
    world: World, policy: OnNodeFail, state: JobState
) -> None:
    world.run(on_node_fail=policy)
    world.hello("n1", boot="b2")
    assert world.job().state is state
    assert world.attempt().state is AttemptState.ENDED
    assert not world.gpu_is_held()


def test_a_launch_is_not_repeated_on_a_node_that_booted(world: World) -> None:
    world.submit()
    world.place()
    world.hello("n1", boot="b2")
    assert world.effects == []
    assert world.job().state is JobState.PENDING


def test_an_exit_that_was_written_down_before_the_reboot_counts(world: World) -> None:
    world.run()
    report = RankReport(RankId(1, 1), RankPhase.RELEASED, 7, ExitFacts(exit_code=3), RankUsage(5))
    _, forget = world.hello("n1", report, boot="b2")
    assert world.job().state is JobState.FAILED
    assert forget == (RankId(1, 1),)


def test_a_flapping_node_gets_no_new_work(world: World) -> None:
    for _ in range(4):
        world.lose()
        world.hello("n1")
        world.now_s += 60.0
    assert not world.state.nodes["n1"].accepts_work
    assert "flapping" in world.state.nodes["n1"].faults[0]


def test_losses_far_apart_are_no_flapping(world: World) -> None:
    for _ in range(6):
        world.lose()
        world.hello("n1")
        world.now_s += 400.0
    assert world.state.nodes["n1"].accepts_work


# Health


def test_a_dirty_gpu_is_out_of_service_until_it_is_told_clean(world: World) -> None:
    world.run()
    world.report(RankPhase.RELEASED, NATURAL, dirty={"n1-0": "PID 7 in D state"})
    assert "job 1" in world.state.nodes["n1"].gpu_reasons("n1-0")[0]
    assert world.state.nodes["n1"].accepts_work
    world.report(RankPhase.RELEASED, NATURAL)
    assert world.state.nodes["n1"].gpu_reasons("n1-0") == ()


@pytest.mark.parametrize("how", ["resume", "reboot"])
def test_other_ways_to_clear_a_dirty_gpu(world: World, how: str) -> None:
    world.run()
    world.report(RankPhase.RELEASED, NATURAL, dirty={"n1-0": "PID 7 in D state"})
    if how == "resume":
        world.apply(events.NodeResumed("n1", "root", "", world.now_s))
    else:
        world.hello("n1", boot="b2")
    assert world.state.nodes["n1"].gpu_reasons("n1-0") == ()


@pytest.mark.parametrize(("xid", "is_critical"), [(79, True), (48, True), (31, False), (13, False)])
def test_only_critical_xids_take_a_card_out_and_the_agent_cannot_forget_them(
    world: World, xid: int, is_critical: bool
) -> None:
    told = (XidEvent("n1-1", xid, "GPU has fallen off the bus"),)
    world.apply(events.NodeHealthReported("n1", (), {}, frozenset(), told, world.now_s))
    assert bool(world.state.nodes["n1"].gpu_reasons("n1-1")) == is_critical
    world.apply(events.NodeHealthReported("n1", ("clock",), {}, frozenset(), (), world.now_s))
    world.hello("n1")
    assert bool(world.state.nodes["n1"].gpu_reasons("n1-1")) == is_critical


@pytest.mark.parametrize("how", ["resume", "reboot"])
def test_a_resume_or_a_reboot_brings_a_card_back_that_had_an_xid(world: World, how: str) -> None:
    told = (XidEvent("n1-1", 79, "GPU has fallen off the bus"),)
    world.apply(events.NodeHealthReported("n1", (), {}, frozenset(), told, world.now_s))
    if how == "resume":
        world.apply(events.NodeResumed("n1", "root", "", world.now_s))
    else:
        world.hello("n1", boot="b2")
    assert world.state.nodes["n1"].gpu_reasons("n1-1") == ()


def test_an_xid_is_said_once_whichever_way_it_comes(world: World) -> None:
    text = "Xid 79: GPU has fallen off the bus"
    told = (XidEvent("n1-1", 79, text),)
    world.apply(
        events.NodeHealthReported("n1", (), {"n1-1": (text,)}, frozenset(), told, world.now_s)
    )
    assert world.state.nodes["n1"].gpu_reasons("n1-1") == (text,)


def test_health_that_the_agent_tells_follows_what_it_tells(world: World) -> None:
    hot = {"n1-1": ("thermal slowdown",)}
    world.apply(
        events.NodeHealthReported("n1", ("driver mismatch",), hot, frozenset(), (), world.now_s)
    )
    node = world.state.nodes["n1"]
    assert (node.accepts_work, node.gpu_reasons("n1-1")) == (False, ("thermal slowdown",))
    world.apply(events.NodeHealthReported("n1", (), {}, frozenset(), (), world.now_s))
    node = world.state.nodes["n1"]
    assert (node.accepts_work, node.gpu_reasons("n1-1")) == (True, ())


@pytest.mark.parametrize("how", ["lost", "missing"])
def test_an_attempt_whose_gpu_is_gone_ends_as_a_failure_of_the_node(world: World, how: str) -> None:
    world.run(on_node_fail=OnNodeFail.FAIL)
    if how == "lost":
        effects = world.apply(
            events.NodeHealthReported("n1", (), {}, frozenset({"n1-0"}), (), world.now_s)
        )
    else:
        fewer = replace(facts("n1"), gpus=facts("n1").gpus[1:])
        effects = world.apply(events.NodeFactsChanged("n1", fewer, world.now_s))
    assert effects == [Stop("n1", RankId(1, 1), StopReason.FENCED, 30.0)]
    world.report(RankPhase.ENDED, ExitFacts(signal=15, stop_reason=StopReason.FENCED))
    assert world.job().state is JobState.NODE_FAIL
    assert "GPU 0" in world.job().reason_text


def test_a_missing_gpu_is_listed_with_its_reason_until_it_is_back(world: World) -> None:
    fewer = replace(facts("n1"), gpus=facts("n1").gpus[:3])
    world.hello("n1", node_facts=fewer)
    node = world.state.nodes["n1"]
    assert [f.kind for f in node.gpu_faults["n1-3"]] == [GpuFaultKind.MISSING]
    assert len(node.facts.gpus) == 4
    world.hello("n1")
    assert world.state.nodes["n1"].gpu_faults == {}


def test_a_resume_accepts_the_smaller_inventory(world: World) -> None:
    fewer = replace(facts("n1"), gpus=facts("n1").gpus[:3])
    world.hello("n1", node_facts=fewer)
    world.apply(events.NodeResumed("n1", "root", "card sent back", world.now_s))
    assert len(world.state.nodes["n1"].facts.gpus) == 3


def test_a_drained_node_comes_back_drained(world: World) -> None:
    world.run()
    world.apply(events.NodeDrained("n1", "root", "new disk", world.now_s))
    assert world.job().state is JobState.RUNNING
    world.lose()
    world.hello("n1", boot="b2")
    assert not world.state.nodes["n1"].accepts_work


def test_an_unknown_node_cannot_be_drained(world: World) -> None:
    with pytest.raises(NotAllowed, match="no node n9"):
        world.apply(events.NodeDrained("n9", "root", "x", world.now_s))


def test_the_state_given_to_apply_is_not_touched(world: World) -> None:
    world.submit()
    before = world.state.jobs[1]
    outcome = rules.apply(world.state, events.CancelRequested(1, "ann", "", 1.0))
    assert world.state.jobs[1] is before
    assert outcome.changes.jobs[1].state is JobState.CANCELLED
