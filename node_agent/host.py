"""The node beside its GPUs: CPU, memory, disk, load, and the identity of processes."""

from __future__ import annotations

import os
import platform
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from protos.messages import HostSample

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What does not change while the machine is up."""

    hostname: str
    os: str
    cpus: int
    """Cores that this process (and so its jobs) may use: the affinity mask, not the machine."""
    memory_bytes: int


def host_facts() -> HostFacts:
    """Reads the facts of this machine."""
    return HostFacts(
        hostname=socket.gethostname(),
        os=platform.platform(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
    )


def boot_id() -> str:
    """The kernel's random id of this boot: another one means that no old process is alive."""
    return BOOT_ID_PATH.read_text(encoding="ascii").strip()


class HostSampler:
    """Reads CPU, memory, load and disk; CPU utilization is over the time since the last call."""

    def __init__(self, state_dir: Path) -> None:
        """Starts the first CPU interval.

        Args:
            state_dir: the agent's state folder, whose disk is measured.
        """
        self._state_dir = state_dir
        psutil.cpu_percent(interval=None)

    def sample(self) -> HostSample:
        """Takes a reading without waiting; the disk is absent when the state folder is gone."""
        memory = psutil.virtual_memory()
        try:
            disk = psutil.disk_usage(str(self._state_dir))
        except OSError:
            disk = None
        return HostSample(
            cpu_utilization_pct=psutil.cpu_percent(interval=None),
            load_1min=os.getloadavg()[0],
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            # All that we may not fill counts as used, root's reserve too.
            disk_used_bytes=None if disk is None else disk.total - disk.free,
            disk_total_bytes=None if disk is None else disk.total,
        )


def process_start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (field 22 of `/proc/PID/stat`).

    Together with the pid and the boot id this names a process for ever, since pids are reused.

    Returns:
        The ticks, or None if there is no such process. A zombie still counts as a process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command in field 2 may hold spaces and parentheses: fields are counted after its end.
    return int(stat[stat.rindex(b")") + 2 :].split()[22 - 3])


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process that can be told from a later one with the same pid."""

    boot_id: str
    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The identity of a live process, or None if there is none with this pid."""
        start_ticks = process_start_ticks(pid)
        return None if start_ticks is None else cls(boot_id(), pid, start_ticks)

    def exists(self) -> bool:
        """Whether this very process is still there (as a zombie, perhaps)."""
        return self == ProcessIdentity.of(self.pid)

    def send_signal(self, signum: signal.Signals) -> bool:
        """Signals this very process, never one that took over its pid.

        Returns:
            Whether it was still there.

        Raises:
            PermissionError: the process belongs to somebody else.
        """
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.exists():  # checked while the pidfd holds the process fast
                return False
            signal.pidfd_send_signal(pidfd, signum)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        return True
