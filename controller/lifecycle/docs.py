"""Writes `docs/states.md` out of the tables.

`python -m controller.lifecycle.docs > docs/states.md`
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import TypeVar

from controller.lifecycle import attempt, job
from controller.lifecycle.job import EndReason, end_of
from controller.lifecycle.node import Lease, Node, state_word
from protos.messages import (
    AdminState,
    ExitFacts,
    LaunchFault,
    NodeFacts,
    OnNodeFail,
    OomKind,
    StopReason,
)

_State = TypeVar("_State", bound=StrEnum)

_INTRO = """# States

Generated from `controller/lifecycle` by `python -m controller.lifecycle.docs`; a test compares.

Attempts hold GPUs, jobs do not: a job may be final while a process of its is still being cleaned
up, and its GPUs are free only when the agent has checked them (rank phase `RELEASED`). A wish to
stop is a field (`stop_reason`), not a state; a job with such a wish is shown as `COMPLETING`.
"""

_JOBS_NOTE = """
A final state straight from `PENDING` (other than `CANCELLED`) is the end of an attempt whose node
was lost and that turned out to have ended by itself before the job ran again. From a final state
only a requeue leads on.
"""

_ATTEMPTS_NOTE = """
`LOST` means out of sight, not dead: its GPUs stay held until its agent reports, or a new boot of
the node proves the process gone. A *fenced* attempt decides nothing any more and is killed where
it turns up. `LOST` goes back to `LAUNCHING` when the launch had not been acknowledged and the job
waits for its node (`--on-node-fail wait`).
"""

_ENDS: tuple[tuple[str, StopReason | None, ExitFacts], ...] = (
    ("exit code 0", None, ExitFacts(exit_code=0)),
    ("exit code 3", None, ExitFacts(exit_code=3)),
    ("signal 9", None, ExitFacts(signal=9)),
    ("host memory ran out", None, ExitFacts(signal=9, oom=OomKind.HOST)),
    ("GPU memory ran out", None, ExitFacts(exit_code=1, oom=OomKind.CUDA)),
    (
        "the node stopped it at its time limit, whatever the exit code",
        None,
        ExitFacts(exit_code=0, stop_reason=StopReason.TIME_LIMIT),
    ),
    (
        "the node stopped it at its memory limit",
        None,
        ExitFacts(signal=9, stop_reason=StopReason.MEMORY_LIMIT),
    ),
    ("launch failed, the job's fault", None, ExitFacts(launch_fault=LaunchFault.JOB)),
    ("launch failed, the node's fault", None, ExitFacts(launch_fault=LaunchFault.NODE)),
    ("a rank failed first, with exit code 3", StopReason.RANK_FAILED, ExitFacts(exit_code=3)),
    ("cancelled, whatever the exit", StopReason.CANCEL, ExitFacts(exit_code=0)),
    ("requeued by a person", StopReason.REQUEUE, ExitFacts(signal=15)),
    ("preempted", StopReason.PREEMPT, ExitFacts(signal=15)),
    ("did not start in time", StopReason.START_TIMEOUT, ExitFacts(signal=15)),
)


def _transitions(allowed: Mapping[_State, Iterable[_State]]) -> Iterator[str]:
    yield "| from | to |"
    yield "|---|---|"
    for state, targets in allowed.items():
        words = ", ".join(f"`{target}`" for target in sorted(targets))
        yield f"| `{state}` | {words or '– (final)'} |"


def _ends() -> Iterator[str]:
    yield "| how the attempt ended | job becomes | reason |"
    yield "|---|---|---|"
    for words, stop_reason, exit_facts in _ENDS:
        end = end_of(stop_reason, exit_facts, OnNodeFail.REQUEUE)
        yield f"| {words} | `{end.state}` | `{end.reason}` |"
    for policy in OnNodeFail:
        end = end_of(StopReason.FENCED, ExitFacts(), policy)
        words = f"its process is gone with its node, `--on-node-fail {policy.lower()}`"
        yield f"| {words} | `{end.state}` | `{end.reason}` |"


def _node_words() -> Iterator[str]:
    yield "| lease | healthy | admin | word | accepts work |"
    yield "|---|---|---|---|---|"
    for lease in Lease:
        for health in ((), ("driver mismatch",)):
            for admin in AdminState:
                node = Node(
                    "n", "", "", "", "", NodeFacts("n", "", 1, 0), admin, "", "", lease, health
                )
                words = dict.fromkeys(state_word(node, is_busy=busy) for busy in (True, False))
                shown = " / ".join(f"`{word}`" for word in words)
                yield (
                    f"| `{lease}` | {'no' if health else 'yes'} | `{admin}` | {shown} "
                    f"| {'yes' if node.accepts_work else 'no'} |"
                )


def states_markdown() -> str:
    """The whole of `docs/states.md`."""
    lines = [
        _INTRO,
        "## Jobs\n",
        *_transitions(job.ALLOWED),
        _JOBS_NOTE,
        "## Attempts\n",
        *_transitions(attempt.ALLOWED),
        _ATTEMPTS_NOTE,
        "## What an attempt's end makes of its job\n",
        *_ends(),
        "\nA launch that failed by a node's fault is tried again after 1, 2, 4 ... 60 s, and that",
        "node is left out for twice as long; after failures on 3 different nodes, or 5 in all, the",
        "job is `FAILED`. A node that fails the launches of 3 different jobs in a row is taken out",
        "of service until it is resumed.\n",
        "## Fixed words for how a job ended\n",
        *(f"- `{reason}`" for reason in EndReason if reason),
        "\n## Nodes\n",
        "Three independent facts, one word to show. A node may be draining while it is busy",
        "(`DRAINING`) or not any more (`DRAINED`).\n",
        *_node_words(),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(states_markdown())
