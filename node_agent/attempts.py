"""The folder of one rank on its node: all its paths, atomic writes, and tolerant reads.

`STATE/attempts/<job>.<attempt>.<rank>/` holds
    order.json       what to run; written by the agent before it starts the supervisor
    stop.json        every wish to stop it, oldest first; written by the agent
    status.json      how far it has come; made exclusively by the supervisor, or by an agent
                     that gave the launch up, so that never both believe it is theirs
    stdout.OFFSET    the output in segments, named by their start in the stream (`logs.py`)
    progress.jsonl   what the job writes to RLTUNE_PROGRESS_FILE
    supervisor.log   the supervisor's own traceback, if it ever dies of a fault of its own
    acknowledged     the controller has recorded the end: the folder only serves logs now

Only the last status is fsynced: what a loss of power takes from the other files does not
matter, because no process survives it either.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protos.messages import (
    ExitFacts,
    LaunchFault,
    LaunchOrder,
    LogStream,
    OomKind,
    RankId,
    RankPhase,
    RankUsage,
    StopReason,
)

MARK = "RLTUNE_ATTEMPT_DIR"
"""The variable in a job's environment by which its processes are found again."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process for all time: a pid alone is used again."""

    boot_id: str
    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat."""


def read_boot_id() -> str:
    """The kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def read_start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def open_process(identity: ProcessIdentity, boot_id: str) -> int | None:
    """A pidfd of exactly this process, or None when it is gone (or of an earlier boot)."""
    if identity.boot_id != boot_id:
        return None
    try:
        pidfd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return None
    if read_start_ticks(identity.pid) != identity.start_ticks:
        os.close(pidfd)
        return None
    return pidfd


@dataclass(frozen=True, slots=True)
class AttemptStatus:
    """What `status.json` says."""

    phase: RankPhase
    boot_id: str
    supervisor: ProcessIdentity | None
    """None when an agent wrote the status, because no supervisor lives."""
    leader_pid: int | None = None
    exit: ExitFacts | None = None
    usage: RankUsage | None = None
    survivors: tuple[ProcessIdentity, ...] = ()
    """Processes that SIGKILL could not end."""

    def to_document(self) -> dict[str, Any]:
        """As it is stored, in the names that the supervisor uses."""
        document: dict[str, Any] = {"phase": self.phase, "boot_id": self.boot_id}
        if self.leader_pid is not None:
            document["pid"] = self.leader_pid
        if self.exit is not None:
            document["exit"] = asdict(self.exit)
        if self.usage is not None:
            document["usage"] = asdict(self.usage)
        document["survivors"] = [[p.pid, p.start_ticks] for p in self.survivors]
        return document

    @staticmethod
    def from_document(document: Mapping[str, Any]) -> AttemptStatus:
        """Reads what `to_document` or the supervisor wrote."""
        boot_id = document["boot_id"]
        supervisor_pid = document.get("supervisor_pid")
        return AttemptStatus(
            phase=RankPhase(document["phase"]),
            boot_id=boot_id,
            supervisor=None
            if supervisor_pid is None
            else ProcessIdentity(boot_id, supervisor_pid, document["supervisor_start_ticks"]),
            leader_pid=document.get("pid"),
            exit=_exit_facts(document["exit"]) if "exit" in document else None,
            usage=RankUsage(**document["usage"]) if "usage" in document else None,
            survivors=tuple(
                ProcessIdentity(boot_id, pid, ticks) for pid, ticks in document.get("survivors", ())
            ),
        )


def _exit_facts(document: Mapping[str, Any]) -> ExitFacts:
    reason = document.get("stop_reason")
    return ExitFacts(
        exit_code=document.get("exit_code"),
        signal=document.get("signal"),
        core_dumped=document.get("core_dumped", False),
        oom=OomKind(document.get("oom", OomKind.NONE)),
        stop_reason=None if reason is None else StopReason(reason),
        launch_fault=LaunchFault(document.get("launch_fault", LaunchFault.NONE)),
        message=document.get("message", ""),
    )


@dataclass(frozen=True, slots=True)
class StopRequest:
    """One wish to stop the rank, as the supervisor reads it."""

    reason: StopReason
    grace_s: float


class AttemptDir:
    """One rank's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def rank(self) -> RankId:
        """The rank that the folder's name says."""
        job_id, attempt, node_rank = self.path.name.split(".")
        return RankId(int(job_id), int(attempt), int(node_rank))

    @property
    def progress_path(self) -> Path:
        """Where the job may tell its progress."""
        return self.path / "progress.jsonl"

    @property
    def supervisor_log_path(self) -> Path:
        """Where the supervisor's own stderr goes."""
        return self.path / "supervisor.log"

    def supervisor_log_end(self) -> str:
        """The last line that the supervisor wrote, such as the error of a traceback."""
        try:
            lines = self.supervisor_log_path.read_text(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line[:300] for line in reversed(lines) if line.strip()), "")

    @property
    def is_acknowledged(self) -> bool:
        """Whether the controller has recorded the end."""
        return self._acknowledged_path.exists()

    @property
    def acknowledged_at_s(self) -> float:
        """When the controller recorded the end, in UTC seconds since the epoch."""
        return self._acknowledged_path.stat().st_mtime

    @property
    def _acknowledged_path(self) -> Path:
        return self.path / "acknowledged"

    @property
    def _status_path(self) -> Path:
        return self.path / "status.json"

    def acknowledge(self) -> None:
        """Marks that the controller has recorded the end."""
        self._acknowledged_path.touch()

    def write_order(self, order: LaunchOrder, document: Mapping[str, Any]) -> None:
        """Makes the folder with its order; raises FileExistsError if it was launched before."""
        self.path.mkdir(parents=True, mode=0o700)
        about = {"rank": str(order.rank), "name": order.name, "user": order.user}
        self._write("order.json", {**about, "gpu_uuids": order.gpu_uuids, **document})

    def read_order(self) -> dict[str, Any]:
        """The order as stored; empty when the agent died before it was complete."""
        return _read_json(self.path / "order.json") or {}

    def write_stop_requests(self, requests: Sequence[StopRequest]) -> None:
        """Stores all requests so far; the supervisor counts how many of them it has seen."""
        self._write("stop.json", {"requests": [[r.reason, r.grace_s] for r in requests]})

    def read_stop_requests(self) -> tuple[StopRequest, ...]:
        """All requests so far, oldest first."""
        document = _read_json(self.path / "stop.json") or {"requests": ()}
        return tuple(StopRequest(StopReason(r), grace_s) for r, grace_s in document["requests"])

    def read_status(self) -> AttemptStatus | None:
        """The newest status; None when there is none yet or it is torn."""
        document = _read_json(self._status_path)
        return None if document is None else AttemptStatus.from_document(document)

    def write_status(self, status: AttemptStatus) -> None:
        """Replaces the status; only for ranks whose supervisor is known to be dead."""
        self._write("status.json", status.to_document(), durable=True)

    def claim(self, status: AttemptStatus) -> bool:
        """Gives the launch up with this status, unless a supervisor has begun; says whether."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self.path / "status.given-up"
        _write_file(temporary, status.to_document(), durable=True)
        try:
            os.link(temporary, self._status_path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def log_segments(self, stream: LogStream) -> list[tuple[int, Path]]:
        """The kept segments of a stream, by their start offset."""
        found = self.path.glob(f"{stream}.*")
        return sorted((int(path.name.rpartition(".")[2]), path) for path in found)

    def size_bytes(self) -> int:
        """What the folder's files take."""
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())

    def _write(self, name: str, document: Mapping[str, Any], *, durable: bool = False) -> None:
        temporary = self.path / f"{name}.new"
        _write_file(temporary, document, durable=durable)
        temporary.replace(self.path / name)


def attempt_dirs(attempts_dir: Path) -> list[AttemptDir]:
    """Every rank's folder below `STATE/attempts`, oldest job first."""
    folders = [AttemptDir(path) for path in attempts_dir.glob("[0-9]*.[0-9]*.[0-9]*")]
    return sorted(folders, key=lambda folder: folder.rank)


def _write_file(path: Path, document: Mapping[str, Any], *, durable: bool) -> None:
    with path.open("w", encoding="ascii") as file:
        path.chmod(0o600)
        json.dump(document, file)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text(encoding="ascii"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    assert isinstance(document, dict)
    return document
