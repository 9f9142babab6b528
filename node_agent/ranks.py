"""What the launcher knows of one rank, and the exit facts that only an agent can state."""

from __future__ import annotations

import asyncio
import os

from node_agent.attempts import AttemptDir, ProcessIdentity, StopRequest
from node_agent.supervisor import ERRNO_EXIT_BASE
from protos.messages import ExitFacts, LaunchFault, RankPhase, RankReport, StopReason


class TrackedRank:
    """One rank; the launcher's task for it alone changes its phase."""

    def __init__(self, folder: AttemptDir, gpu_uuids: tuple[str, ...]) -> None:
        self.folder = folder
        self.gpu_uuids = gpu_uuids
        self.report = RankReport(folder.rank, RankPhase.LAUNCHING)
        self.survivors: tuple[ProcessIdentity, ...] = ()
        self.pidfd: int | None = None
        self.supervisor_gone = False
        self.supervisor_exit: int | None = None
        self.stops: list[StopRequest] = []
        self.stops_delivered = 0
        self.has_lost_stops = False
        self.wake = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the rank runs any more."""
        return self.report.phase in (RankPhase.ENDED, RankPhase.RELEASED)

    @property
    def stop_reason(self) -> StopReason | None:
        """Why it was asked to stop: the supervisor's rule, the first reason unless cancelled."""
        reasons = [request.reason for request in self.stops]
        return StopReason.CANCEL if StopReason.CANCEL in reasons else next(iter(reasons), None)

    def never_started(self) -> ExitFacts:
        """The end of a rank whose command was never executed."""
        reason = self.stop_reason
        if reason is not None:
            return ExitFacts(stop_reason=reason, message="stopped before its command was started")
        if self.supervisor_exit is None:
            message = "the agent ended while it was being launched"
        else:
            message = f"this node cannot run its supervisor: {self._supervisor_exit_word()}"
        return ExitFacts(launch_fault=LaunchFault.NODE, message=message)

    def supervisor_died(self) -> ExitFacts:
        """The end of a rank whose supervisor did not live to see it."""
        how = "" if self.supervisor_exit is None else f" ({self._supervisor_exit_word()})"
        message = f"its supervisor died{how}; what was left of it was killed"
        return ExitFacts(stop_reason=self.stop_reason, message=message)

    def node_rebooted(self) -> ExitFacts:
        """The end of a rank that ran when the node went down."""
        message = "the node was rebooted while it ran"
        return ExitFacts(stop_reason=self.stop_reason, message=message)

    def _supervisor_exit_word(self) -> str:
        code = self.supervisor_exit
        assert code is not None
        if code < 0:
            return f"signal {-code}"
        if code >= ERRNO_EXIT_BASE:
            return os.strerror(code - ERRNO_EXIT_BASE)
        return f"exit code {code}, {self.folder.supervisor_log_end() or 'nothing in its log'}"


def report_from_disk(folder: AttemptDir) -> RankReport:
    """The last report of a rank that was forgotten."""
    status = folder.read_status()
    if status is None:
        lost = ExitFacts(launch_fault=LaunchFault.NODE, message="the record of its end was lost")
        return RankReport(folder.rank, RankPhase.RELEASED, exit=lost)
    return RankReport(folder.rank, RankPhase.RELEASED, status.leader_pid, status.exit, status.usage)
