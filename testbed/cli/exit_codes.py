"""The numbers that `rltune` ends with; scripts depend on them (docs/cli.md)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum

from protos.messages import ExitFacts, JobState, JobView, LaunchFault
from testbed.client_errors import (
    ControllerUnreachable,
    InvalidRequest,
    NodeUnreachable,
    NotAllowed,
    NotFound,
    RltuneError,
    TryAgain,
    WaitTimedOut,
)

SIGTERM = 15
_NOT_FOUND = re.compile(
    r"command .*( was not found in PATH=| does not exist on this node$)", re.DOTALL
)
_NOT_EXECUTABLE = re.compile(
    r".*("
    r"asks for the interpreter .*, which does not exist on this node"
    r"|the loader that .* does not exist on this node"
    r"| is not executable: "
    r"| is a directory, not a program"
    r"| is not a program for this machine"
    r")",
    re.DOTALL,
)
"""The node agent's words (node_agent/supervisor.py): the facts have no number for these."""


class ExitCode(IntEnum):
    """Ours; a job's own code may be any number."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    NOT_ALLOWED = 5
    OUTPUT_LOST = 74
    """EX_IOERR: what was to be printed could not be."""
    TRY_AGAIN = 75
    NOT_EXECUTABLE = 126
    COMMAND_NOT_FOUND = 127
    """As shells say it of a program that could not be started."""
    TIMED_OUT = 124
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    """128 + SIGPIPE, as other programs end when `head` has read enough."""


_OF_ERRORS: tuple[tuple[type[RltuneError], ExitCode], ...] = (
    (InvalidRequest, ExitCode.USAGE),
    (NotFound, ExitCode.NOT_FOUND),
    (ControllerUnreachable, ExitCode.UNREACHABLE),
    (NodeUnreachable, ExitCode.UNREACHABLE),
    (NotAllowed, ExitCode.NOT_ALLOWED),
    (TryAgain, ExitCode.TRY_AGAIN),
    (WaitTimedOut, ExitCode.TIMED_OUT),
)


def error_exit_code(error: RltuneError) -> ExitCode:
    """How a command ends that ran into `error`."""
    return next((code for kind, code in _OF_ERRORS if isinstance(error, kind)), ExitCode.FAILED)


def job_exit_code(job: JobView) -> int:
    """How `submit --wait`, `wait` and `logs -f` end for one job that has ended.

    Its own exit code, 128 + n after signal n, 124 after its time limit. What has no code of its
    own: 143 (as SIGTERM gives) for a cancelled job, 127 or 126 for a program that is not there or
    cannot be run, else 1.
    """
    if job.state is JobState.COMPLETED:
        return ExitCode.OK
    if job.state is JobState.TIMEOUT:
        return ExitCode.TIMED_OUT
    if job.exit is not None and job.exit.signal is not None:
        return 128 + job.exit.signal
    if job.exit is not None and job.exit.exit_code:
        return job.exit.exit_code
    if job.state is JobState.CANCELLED:
        return 128 + SIGTERM
    return _launch_exit_code(job.exit)


def _launch_exit_code(facts: ExitFacts | None) -> ExitCode:
    if facts is None or facts.launch_fault is not LaunchFault.JOB:
        return ExitCode.FAILED
    if _NOT_FOUND.match(facts.message):
        return ExitCode.COMMAND_NOT_FOUND
    return ExitCode.NOT_EXECUTABLE if _NOT_EXECUTABLE.match(facts.message) else ExitCode.FAILED


def jobs_exit_code(jobs: Iterable[JobView]) -> int:
    """For several jobs: the highest."""
    return max((job_exit_code(job) for job in jobs), default=ExitCode.OK)
