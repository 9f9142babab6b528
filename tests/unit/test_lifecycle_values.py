"""The tables and small functions of the lifecycle, and the page that is made of them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from controller.lifecycle import attempt, job
from controller.lifecycle.docs import states_markdown
from controller.lifecycle.job import end_of, launch_pause_s
from controller.lifecycle.node import Lease, Node, reasons, state_word
from protos.messages import (
    AdminState,
    AttemptState,
    ExitFacts,
    JobState,
    LaunchFault,
    NodeFacts,
    OnNodeFail,
    OomKind,
    StopReason,
)

FACTS = NodeFacts("n1", "linux", 8, 1 << 30)


def test_the_tables_name_every_state() -> None:
    assert set(job.ALLOWED) == set(JobState)
    assert set(attempt.ALLOWED) == set(AttemptState)


def test_the_page_on_states_is_the_one_that_the_tables_make() -> None:
    page = Path(__file__).parents[2] / "docs" / "states.md"
    assert page.read_text() == states_markdown(), "run python -m controller.lifecycle.docs"


def test_every_end_has_a_verdict_that_a_running_job_may_take() -> None:
    causes = (None, *StopReason)
    exits = [
        ExitFacts(code, signal, oom=oom, stop_reason=own, launch_fault=fault)
        for (code, signal), oom, own, fault in product(
            [(0, None), (1, None), (None, 9), (None, None)], OomKind, causes, LaunchFault
        )
    ]
    for cause, exit_facts, policy in product(causes, exits, OnNodeFail):
        verdict = end_of(cause, exit_facts, policy)
        assert verdict.state in job.ALLOWED[JobState.RUNNING]
        assert verdict.state in job.ALLOWED[JobState.STARTING]
        assert verdict.text
        assert not verdict.is_node_fault or verdict.state is JobState.PENDING


def test_pauses_double_up_to_a_minute() -> None:
    assert [launch_pause_s(n) for n in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize(
    ("admin", "lease", "health", "busy", "word", "accepts"),
    [
        (AdminState.ACTIVE, Lease.CONNECTED, (), False, "UP", True),
        (AdminState.ACTIVE, Lease.LOST, (), True, "DOWN", False),
        (AdminState.ACTIVE, Lease.CONNECTED, ("x",), False, "UNHEALTHY", False),
        (AdminState.DRAIN, Lease.CONNECTED, (), True, "DRAINING", False),
        (AdminState.DRAIN, Lease.CONNECTED, (), False, "DRAINED", False),
        (AdminState.DRAIN, Lease.LOST, (), False, "DOWN+DRAIN", False),
        (AdminState.DRAIN, Lease.CONNECTED, ("x",), False, "UNHEALTHY+DRAIN", False),
        (AdminState.ACTIVE, Lease.LOST, ("x",), False, "DOWN", False),
    ],
)
def test_three_facts_make_one_word(
    admin: AdminState,
    lease: Lease,
    health: tuple[str, ...],
    busy: bool,
    word: str,
    accepts: bool,
) -> None:
    node = Node("n1", "", "", "", "", FACTS, admin, "", "", lease, health)
    assert state_word(node, is_busy=busy) == word
    assert node.accepts_work == accepts
    assert bool(reasons(node)) != accepts


def test_ports_differ_between_attempts_and_avoid_those_in_use() -> None:
    first = attempt.master_port(5, 1, frozenset())
    assert 20_000 <= first < 30_000
    assert attempt.master_port(5, 2, frozenset()) != first
    assert attempt.master_port(5, 1, frozenset({first})) != first
