"""Runs one rank's command, outlives the agent, and leaves the facts of its end on disk.

Started by the launcher as `python -I -S supervisor.py ATTEMPT_DIR`; docs/launcher.md has the
files, the stop rules and their reasons. Standard library only, in one file. `json`, `signal`
and `typing` would take more time than all else before the job's first instruction, so the C
modules beneath the first two are used.
"""

# pathlib and contextlib would have to be imported, see above.
# ruff: noqa: PTH104, PTH106, PTH108, PTH110, PTH112, PTH113, PTH119, PTH208, SIM105

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed lacks it
import ctypes
import errno
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGCHLD, SIGCONT, SIGSTOP = 1, 2, 9, 15, 17, 18, 19
ERRNO_EXIT_BASE = 64
PR_SET_CHILD_SUBREAPER = 36
CHUNK_BYTES = 1 << 20
TAIL_BYTES = 64 << 10
SEGMENTS = 8
SEGMENT_FILES_MAX = 64
STATUS_BYTES = 4096
"""Room kept on disk for each later status, so that a full disk cannot lose the exit facts."""
MESSAGE_CHARS = 1000
SWEEP_S = 0.1
SWEEP_MIN_S = 0.01
KILL_PATIENCE_S = 10.0
"""What is left after so long under SIGKILL (state D) is named in the status and left behind."""
SAMPLE_S = 0.1
SAMPLE_UNLIMITED_S = 1.0
SAMPLE_DUTY = 50.0
"""Sampling may take 1/50 of a core: where there are many processes it is done less often."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CUDA_OOM_MARKS = (
    b"CUDA out of memory",
    b"CUDA error: out of memory",
    b"HIP out of memory",
    b"torch.OutOfMemoryError",
    b"cuda.OutOfMemoryError",
)
NODE_ERRNOS = {
    errno.ENOSPC: "its disk is full: free space under the agent's state folder",
    errno.EDQUOT: "a disk quota is used up: free space or raise the quota",
    errno.EAGAIN: "no more processes are allowed: end some, or raise `ulimit -u` or pids.max",
    errno.ENOMEM: "it has no memory left: end some of its processes",
    errno.EIO: "its disk answers with I/O errors: see `dmesg`",
    errno.ESTALE: "a network file system was lost: mount it again",
    errno.EMFILE: "too many files are open: raise `ulimit -n` of the agent",
    errno.ENFILE: "too many files are open on it: raise the sysctl fs.file-max",
}


class _ScannerContext:
    strict = True
    object_hook = object_pairs_hook = parse_constant = None
    parse_float = float
    parse_int = int


try:
    from _json import encode_basestring_ascii as quote
    from _json import make_scanner

    _scan = make_scanner(_ScannerContext())  # type: ignore[arg-type]

    def parse_json(text: str) -> Any:
        """What `json.loads` returns, for a text that starts with its value."""
        return _scan(text, 0)[0]
except (ImportError, AttributeError):  # an interpreter with other insides: pay for the import
    import json

    quote = json.dumps

    def parse_json(text: str) -> Any:
        """What `json.loads` returns."""
        return json.loads(text)


def to_json(value: Any) -> str:
    """JSON text of nested dicts, lists, strings, finite numbers, booleans and None."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quote(k)}: {to_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(to_json, value)) + "]"
    if isinstance(value, str):
        return quote(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def boot_clock_s() -> float:
    """Seconds since boot with suspended time: a time limit is wall time to its user."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read_file(path: str) -> bytes:
    """All bytes of a small file or of one in /proc."""
    fd = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(fd, CHUNK_BYTES):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


class Process:
    """One line of /proc/PID/stat, as far as it is needed."""

    __slots__ = ("pgid", "pid", "ppid", "rss_bytes", "start_ticks", "state")

    def __init__(self, stat: bytes) -> None:
        fields = stat[stat.rindex(b")") + 2 :].split(None, 22)
        self.pid = int(stat[: stat.index(b" ")])
        self.state = fields[0].decode()
        self.ppid = int(fields[1])
        self.pgid = int(fields[2])
        self.start_ticks = int(fields[19])
        self.rss_bytes = int(fields[21]) * PAGE_BYTES


def descendants(root: int) -> list[Process]:
    """Every process below `root`, found by one pass over /proc; parents before children."""
    children: dict[int, list[Process]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                process = Process(read_file(f"/proc/{name}/stat"))
            except (OSError, ValueError):  # it ended while we looked
                continue
            children.setdefault(process.ppid, []).append(process)
    found = children.get(root, [])
    for process in found:  # the list grows while we walk it
        found += children.get(process.pid, ())
    return found


def send_signal(pid: int, number: int) -> None:
    """Signals a process that may be gone or may have become another user's."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def kill_all(processes: list[Process]) -> None:
    """SIGKILLs the groups of these processes: unlike pid by pid, no fork slips through."""
    own_group = os.getpgrp()
    for pgid in {process.pgid for process in processes if process.pgid not in (0, own_group)}:
        send_signal(-pgid, SIGKILL)
    for process in processes:
        if process.pgid in (0, own_group):  # 0: a group outside our pid namespace
            send_signal(process.pid, SIGKILL)


def unshared_bytes(process: Process) -> int:
    """Anonymous and shared memory of a process, shared pages split among their users.

    Mapped files are left out (the kernel drops them when memory is short).
    """
    wanted, total, pss = (b"Pss_Anon:", b"Pss_Shmem:"), 0, None
    try:
        for line in read_file(f"/proc/{process.pid}/smaps_rollup").splitlines():
            if line.startswith(wanted):
                total += int(line.split()[1]) << 10
                pss = 0
            elif line.startswith(b"Pss:"):
                pss = int(line.split()[1]) << 10
    except OSError as error:
        return 0 if error.errno in (errno.ENOENT, errno.ESRCH) else process.rss_bytes
    return total or pss or 0


def oom_kills() -> int:
    """How often the kernel's OOM killer has struck on this machine since boot."""
    for line in read_file("/proc/vmstat").splitlines():
        if line.startswith(b"oom_kill "):
            return int(line.split()[1])
    return 0


class LaunchError(Exception):
    """The command could not be started; `fault` says by whose fault."""

    def __init__(self, fault: str, message: str) -> None:
        super().__init__(message)
        self.fault = fault


def fail_job(message: str) -> NoReturn:
    """Refuses the launch by the job's own fault."""
    raise LaunchError("JOB", message)


def fail_by_errno(what: str, error: OSError) -> NoReturn:
    """Refuses the launch; resource and disk errors are the node's fault, others the job's."""
    advice = NODE_ERRNOS.get(error.errno or 0)
    if advice:
        raise LaunchError("NODE", f"{what}: {error.strerror}; this node is at fault, {advice}")
    raise LaunchError("JOB", f"{what}: {error.strerror}")


def remove_tree(path: str) -> None:
    """Removes a folder with all that is in it; what cannot be removed stays."""
    for folder, names, files in os.walk(path, topdown=False):
        for name in (*names, *files):
            remove_one(f"{folder}/{name}")
    remove_one(path)


def remove_one(path: str) -> None:
    """Removes a file, a link or an empty folder, if it is there and that is allowed."""
    try:
        try:
            os.unlink(path)
        except IsADirectoryError:
            os.rmdir(path)
    except OSError:
        pass


def enter_folder(cwd: str) -> None:
    """Makes `cwd` the working directory that the command inherits."""
    try:
        os.chdir(cwd.encode("utf-8", "surrogateescape"))
    except FileNotFoundError:
        fail_job(
            f"working directory {cwd!r} does not exist on this node: create it, or give another"
        )
    except NotADirectoryError:
        fail_job(f"working directory {cwd!r} is not a directory: give the folder that holds it")
    except OSError as error:
        fail_by_errno(f"working directory {cwd!r} cannot be entered", error)


def find_program(name: str, path: str) -> bytes:
    """The file that `name` means in the job's PATH, or `name` itself if it has a slash."""
    if not name:
        fail_job("the command is empty: give a program after `--`")
    encoded = name.encode("utf-8", "surrogateescape")
    if "/" in name:
        return encoded
    denied = b""
    for folder in path.encode("utf-8", "surrogateescape").split(b":"):
        candidate = (folder or b".") + b"/" + encoded
        if os.path.isfile(candidate):
            if os.access(candidate, os.X_OK):
                return candidate
            denied = denied or candidate
    if denied:
        return denied
    fail_job(f"command {name!r} was not found in PATH={path}: give its full path, or set PATH")


def exec_failure(program: bytes, order: dict[str, Any], error: OSError) -> NoReturn:
    """Says exactly why execve refused `program`."""
    shown = repr(program.decode("utf-8", "backslashreplace"))
    if error.errno == errno.E2BIG:
        sizes = {f"argument {i}": len(a) for i, a in enumerate(order["argv"])}
        sizes |= {f"variable {k}": len(k) + len(v) + 1 for k, v in order["env"].items()}
        largest = max(sizes, key=lambda key: sizes[key])
        fail_job(
            f"arguments and environment take {sum(sizes.values())} characters, more than the "
            f"kernel passes on (131,071 bytes in one string, about 2 MiB in all); the largest is "
            f"{largest} with {sizes[largest]}: put it in a file"
        )
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and os.path.exists(program):
        line = first_line(program)
        if line.startswith(b"#!"):
            text = line[2:].decode("utf-8", "backslashreplace").strip(" ")
            hint = " (the line ends with a carriage return: convert the file with dos2unix)"
            fail_job(
                f"{shown} asks for the interpreter {text!r}, which does not exist on this node"
                + (hint if text.endswith("\r") else "")
            )
        fail_job(f"the loader that {shown} was linked for does not exist on this node")
    if error.errno == errno.ENOENT:
        fail_job(f"command {shown} does not exist on this node")
    if error.errno == errno.EACCES and os.path.isfile(program) and not os.access(program, os.X_OK):
        fail_job(f"{shown} is not executable: run `chmod +x` on it, or call its interpreter")
    if error.errno == errno.EACCES and os.path.isdir(program):
        fail_job(f"{shown} is a directory, not a program")
    if error.errno == errno.ENOEXEC:
        fail_job(
            f"{shown} is not a program for this machine and has no `#!` line: add one, "
            "or call its interpreter"
        )
    fail_by_errno(f"{shown} could not be started", error)


def first_line(path: bytes) -> bytes:
    """The first line of a file, as the kernel reads it; empty when it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(fd, 256).split(b"\n", 1)[0]
    finally:
        os.close(fd)


def spawn(order: dict[str, Any], stdout: int, stderr: int) -> int:
    """Starts the command in a session of its own; returns its pid or raises LaunchError."""
    env = {
        key.encode("utf-8", "surrogateescape"): value.encode("utf-8", "surrogateescape")
        for key, value in order["env"].items()
    }
    argv = [argument.encode("utf-8", "surrogateescape") for argument in order["argv"]]
    enter_folder(order["cwd"])
    program = find_program(order["argv"][0] if argv else "", order["env"].get("PATH", os.defpath))
    try:
        return os.posix_spawn(
            program,
            argv,
            env,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, stdout, 1),
                (os.POSIX_SPAWN_DUP2, stderr, 2),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=_signal.valid_signals() - {SIGKILL, SIGSTOP},
        )
    except OSError as error:
        exec_failure(program, order, error)
    except ValueError as error:  # a NUL byte, or a variable's name with "="
        fail_job(f"the command or its environment cannot be passed on: {error}")
    finally:
        os.chdir("/")


class LogStream:
    """Pumps one output of the job into segment files named by their offset in the stream."""

    def __init__(self, folder: str, name: str, limit_bytes: int) -> None:
        self.source, self.sink = os.pipe()
        os.set_blocking(self.source, False)
        self.offset = 0
        self.dropped = 0
        self.tail = bytearray()
        self._prefix = f"{folder}/{name}."
        self._limit = limit_bytes
        self._segment_bytes = max(1, limit_bytes // SEGMENTS)
        self._sizes: dict[int, int] = {}
        self._start = 0
        self._fd = -1

    def pump(self) -> int:
        """Moves one chunk; returns its size, 0 at the end of the stream, -1 if none is there."""
        try:
            data = os.read(self.source, CHUNK_BYTES)
        except BlockingIOError:
            return -1
        self.tail += data[-TAIL_BYTES:]
        if len(self.tail) > 2 * TAIL_BYTES:
            del self.tail[:-TAIL_BYTES]
        self._write(memoryview(data))
        return len(data)

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                if self._fd < 0 or self._sizes[self._start] >= self._segment_bytes:
                    self._open_segment()
                room = self._segment_bytes - self._sizes[self._start]
                written = os.write(self._fd, data[:room])
            except OSError:  # full or broken disk: the job must not block, so bytes are lost
                self.dropped += len(data)
                self.offset += len(data)
                self._close_segment()
                return
            self._sizes[self._start] += written
            self.offset += written
            data = data[written:]

    def _open_segment(self) -> None:
        self._close_segment()
        kept = list(self._sizes)
        while len(kept) > 1 and (
            sum(self._sizes.values()) + self._segment_bytes > self._limit
            or len(kept) >= SEGMENT_FILES_MAX
        ):
            oldest = kept.pop(1)  # the first, the head, stays
            os.unlink(f"{self._prefix}{oldest:020d}")
            self.dropped += self._sizes.pop(oldest)
        path = f"{self._prefix}{self.offset:020d}"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
        self._start = self.offset
        self._sizes[self._start] = 0

    def _close_segment(self) -> None:
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        if self._sizes[self._start] == 0:
            del self._sizes[self._start]
            os.unlink(f"{self._prefix}{self._start:020d}")

    def saw_cuda_oom(self) -> bool:
        """Whether the last output says that GPU memory ran out."""
        return any(mark in self.tail for mark in CUDA_OOM_MARKS)


class StatusFile:
    """`status.json`: made exclusively, then replaced from files with room kept for it."""

    def __init__(self, folder: str, order: dict[str, Any]) -> None:
        self._folder = folder
        self._notify_path = order["notify_path"]
        own = Process(read_file("/proc/self/stat"))
        self._facts: dict[str, Any] = {
            "phase": "LAUNCHING",
            "boot_id": order["boot_id"],
            "supervisor_pid": own.pid,
            "supervisor_start_ticks": own.start_ticks,
        }
        self._reserves = [self._reserve("running"), self._reserve("ended")]
        claim = f"{folder}/status.claim"
        os.close(self._write(claim))
        os.link(claim, f"{folder}/status.json")  # fails if the agent gave this launch up
        os.unlink(claim)

    def _write(self, path: str) -> int:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
        content = to_json(self._facts).encode().ljust(STATUS_BYTES)
        if os.write(fd, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return fd

    def _reserve(self, name: str) -> tuple[str, int]:
        path = f"{self._folder}/status.{name}"
        return path, self._write(path)

    def advance(self, phase: str, *, durable: bool, **facts: Any) -> None:
        """Replaces the status by one of a later phase and tells the agent, if one listens."""
        self._facts |= {"phase": phase, **facts}
        path, fd = self._reserves.pop(-1 if durable else 0)
        os.pwrite(fd, to_json(self._facts).encode().ljust(STATUS_BYTES), 0)
        if durable:
            os.fsync(fd)
        os.close(fd)
        os.rename(path, f"{self._folder}/status.json")
        if durable:
            for unused, _ in self._reserves:
                os.unlink(unused)
        self._notify()

    def _notify(self) -> None:
        try:
            fd = os.open(self._notify_path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # no agent: the next one reads the status
            return
        try:
            os.write(fd, os.path.basename(self._folder).encode() + b"\n")
        except OSError:  # the agent is behind: its rescan reads the status
            pass
        finally:
            os.close(fd)


class Stopper:
    """When and how the tree is ended. The first reason stays, except that CANCEL replaces it."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.kill_at_s: float | None = None
        self.killing_since_s: float | None = None
        self.next_sweep_s = 0.0
        self._terminated: set[int] = set()

    def request(self, reason: str, grace_s: float, now_s: float) -> None:
        """Begins to stop the tree, or shortens the grace of a stop that goes on."""
        if self.reason is None or reason == "CANCEL":
            self.reason = reason
        deadline_s = now_s + grace_s
        self.kill_at_s = deadline_s if self.kill_at_s is None else min(self.kill_at_s, deadline_s)
        self.next_sweep_s = now_s

    def kill_now(self, now_s: float) -> None:
        """Ends the tree without grace."""
        if self.killing_since_s is None:
            self.kill_at_s = self.next_sweep_s = now_s

    def child_changed(self, now_s: float) -> None:
        """A child ended, so its own children may have become ours: look soon."""
        if self.kill_at_s is not None and self.killing_since_s is None:
            self.next_sweep_s = min(self.next_sweep_s, now_s + SWEEP_MIN_S)

    def reaped(self, pid: int) -> None:
        """The pid is free and may come again as another process."""
        self._terminated.discard(pid)

    def step(self, now_s: float) -> None:
        """Signals whoever is to be signalled by now."""
        if self.kill_at_s is None or now_s < self.next_sweep_s:
            return
        tree = descendants(os.getpid())
        if now_s >= self.kill_at_s:
            if self.killing_since_s is None:
                self.killing_since_s = now_s
                raise_priority()
            kill_all(tree)
            self.next_sweep_s = now_s + min(SWEEP_S, max(SWEEP_MIN_S, now_s - self.killing_since_s))
            return
        # Only direct children: the leader, and orphans that came to us as subreaper. A launcher
        # such as torchrun passes SIGTERM on, and a DataLoader's workers must live while it saves.
        for child in tree:
            if child.ppid == os.getpid() and child.pid not in self._terminated:
                self._terminated.add(child.pid)
                send_signal(child.pid, SIGTERM)
                send_signal(child.pid, SIGCONT)
        self.next_sweep_s = min(now_s + SWEEP_S, self.kill_at_s)


def raise_priority() -> None:
    """Lets the sweep keep up with a fork bomb, where the agent's rights allow it."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    except PermissionError:
        pass


class MemoryWatch:
    """Samples the memory of the tree; knows its peak and whether it is over the limit."""

    def __init__(self, limit_bytes: int) -> None:
        self.peak_bytes = 0
        self.next_s = 0.0
        self._limit = limit_bytes
        self._rss_measured = 0

    def sample(self, now_s: float) -> str:
        """Measures if it is time; returns a sentence when the limit is exceeded.

        The sum of RSS counts shared pages many times, but is cheap and never too low. So the
        exact figure is read only when that sum passes the limit or grows.
        """
        if now_s < self.next_s:
            return ""
        tree = descendants(os.getpid())
        rss = sum(process.rss_bytes for process in tree)
        over = ""
        if rss > self._rss_measured * 1.02 or 0 < self._limit < rss:
            self._rss_measured = max(rss, self._rss_measured)
            used = sum(map(unshared_bytes, tree))
            self.peak_bytes = max(self.peak_bytes, used)
            if 0 < self._limit < used:
                over = (
                    f"{used >> 20} MiB of host memory used, {self._limit >> 20} MiB were asked "
                    f"for: ask for more, or use less"
                )
        interval_s = SAMPLE_S if self._limit else SAMPLE_UNLIMITED_S
        self.next_s = now_s + max(interval_s, SAMPLE_DUTY * (boot_clock_s() - now_s))
        return over


class Supervisor:
    """The life of one rank: spawn, watch, stop, account."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._order = parse_json(read_file(f"{folder}/order.json").decode())
        self._status = StatusFile(folder, self._order)
        limit = self._order["log_limit_bytes"]
        self._streams = [LogStream(folder, name, limit) for name in ("stdout", "stderr")]
        self._stopper = Stopper()
        self._memory = MemoryWatch(self._order["memory_bytes"])
        self._requests_seen = 0
        self._leader = 0
        self._wait_status: int | None = None
        self._cpu_s = 0.0
        self._started_s = boot_clock_s()
        self._oom_kills = 0
        self._messages: list[str] = []
        self._survivors: list[Process] = []
        self._over_memory = False

    def run(self, wake_fd: int) -> None:
        """Starts the command, and returns when nothing of it is left and the status says so."""
        self._read_stop_requests(boot_clock_s())
        if self._stopper.reason:
            self._finish({"message": "stopped before its command was started"})
            return
        try:
            self._leader = spawn(self._order, self._streams[0].sink, self._streams[1].sink)
        except LaunchError as error:
            self._finish({"launch_fault": error.fault, "message": str(error)[:MESSAGE_CHARS]})
            return
        self._started_s = boot_clock_s()
        for stream in self._streams:
            os.close(stream.sink)
        self._status.advance("RUNNING", durable=False, pid=self._leader)
        self._oom_kills = oom_kills()
        self._watch(wake_fd)
        self._finish(self._exit_facts())

    def _watch(self, wake_fd: int) -> None:
        poller = select.poll()
        poller.register(wake_fd, select.POLLIN)
        by_fd = {stream.source: stream for stream in self._streams}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        limit_s = self._order["time_limit_s"]
        deadline_s = None if limit_s is None else self._started_s + limit_s
        self._memory.next_s = self._started_s + SAMPLE_S
        while not self._is_gone():
            now_s = boot_clock_s()
            if deadline_s is not None and now_s >= deadline_s:
                deadline_s = None
                if self._wait_status is None:
                    self._stopper.request("TIME_LIMIT", self._order["grace_s"], now_s)
            self._check_memory(now_s)
            self._stopper.step(now_s)
            waits = [self._memory.next_s]
            if deadline_s is not None:
                waits.append(deadline_s)
            if self._stopper.kill_at_s is not None:
                waits.append(self._stopper.next_sweep_s)
            timeout_ms = max(0.0, min(waits) - boot_clock_s()) * 1000 + 1
            for fd, _ in poller.poll(timeout_ms):
                if fd == wake_fd:
                    self._signals_came(os.read(wake_fd, 4096))
                elif by_fd[fd].pump() == 0:
                    poller.unregister(fd)
        for stream in self._streams:  # what the pipes still hold
            while stream.pump() > 0:
                pass

    def _signals_came(self, numbers: bytes) -> None:
        now_s = boot_clock_s()
        if SIGCHLD in numbers:
            self._stopper.child_changed(now_s)
        if SIGTERM in numbers and not self._read_stop_requests(now_s):
            self._messages.append("SIGTERM came to the supervisor from outside")
            self._stopper.request("DRAIN", self._order["grace_s"], now_s)

    def _read_stop_requests(self, now_s: float) -> bool:
        """Takes over the agent's new requests; False when the agent made none at all."""
        try:
            requests = parse_json(read_file(f"{self._folder}/stop.json").decode())["requests"]
        except FileNotFoundError:
            return False
        if self._wait_status is None:
            for reason, grace_s in requests[self._requests_seen :]:
                self._stopper.request(reason, grace_s, now_s)
        self._requests_seen = len(requests)
        return True

    def _check_memory(self, now_s: float) -> None:
        message = self._memory.sample(now_s)
        if message and not self._over_memory and self._wait_status is None:
            self._over_memory = True
            self._messages.append(message)
            self._stopper.request("MEMORY_LIMIT", 0.0, now_s)

    def _is_gone(self) -> bool:
        """Reaps what ended. As subreaper we inherit all orphans: no child left, nothing left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                break
            self._stopper.reaped(pid)
            self._cpu_s += usage.ru_utime + usage.ru_stime
            self._memory.peak_bytes = max(self._memory.peak_bytes, usage.ru_maxrss << 10)
            if pid == self._leader:
                self._wait_status = status
                if self._stopper.reason is None:
                    self._stopper.kill_now(boot_clock_s())
        since_s = self._stopper.killing_since_s
        if since_s is None or boot_clock_s() - since_s < KILL_PATIENCE_S:
            return False
        self._survivors = descendants(os.getpid())
        names = ", ".join(f"{p.pid} (state {p.state})" for p in self._survivors[:8])
        self._messages.append(f"{len(self._survivors)} processes survive SIGKILL: {names}")
        return True

    def _exit_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        status = self._wait_status
        if status is not None and os.WIFSIGNALED(status):
            facts = {"signal": os.WTERMSIG(status), "core_dumped": os.WCOREDUMP(status)}
        elif status is not None:
            facts = {"exit_code": os.WEXITSTATUS(status)}
        failed = status is None or status != 0
        kills = oom_kills() - self._oom_kills
        if self._over_memory:
            facts["oom"] = "HOST"
        elif failed and self._stopper.reason is None:
            if kills and facts.get("signal") == SIGKILL:
                facts["oom"] = "HOST"
                self._messages.append(
                    "memory suspected: it got a SIGKILL that we did not send, and the kernel's "
                    f"OOM killer struck {kills} times on this node meanwhile"
                )
            elif any(stream.saw_cuda_oom() for stream in self._streams):
                facts["oom"] = "CUDA"
            elif kills:
                self._messages.append(
                    f"the kernel's OOM killer struck {kills} times on this node meanwhile"
                )
        return facts | {"message": "; ".join(self._messages)[:MESSAGE_CHARS]}

    def remove_tmp_dir(self) -> None:
        """Removes the job's TMPDIR, after its end is told: the agent may be gone by then."""
        tmp_dir = self._order.get("tmp_dir")
        if tmp_dir:
            remove_tree(tmp_dir)

    def _finish(self, exit_facts: dict[str, Any]) -> None:
        stdout, stderr = self._streams
        self._status.advance(
            "ENDED",
            durable=True,
            exit={"stop_reason": self._stopper.reason, **exit_facts},
            usage={
                "elapsed_s": round(boot_clock_s() - self._started_s, 6) if self._leader else 0.0,
                "cpu_s": round(self._cpu_s, 6) if self._leader else None,
                "peak_memory_bytes": self._memory.peak_bytes or None,
                "log_bytes_dropped": stdout.dropped + stderr.dropped,
            },
            survivors=[[process.pid, process.start_ticks] for process in self._survivors[:50]],
        )


def catch_signals() -> int:
    """Turns SIGTERM and SIGCHLD into bytes of the returned fd; others must not end us."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    _signal.set_wakeup_fd(write_fd)
    for number in (SIGTERM, SIGCHLD):
        _signal.signal(number, lambda *_: None)
    for number in (SIGHUP, SIGINT):
        _signal.signal(number, _signal.SIG_IGN)
    return read_fd


def main() -> int:
    """Supervises the attempt whose folder is the only argument.

    Returns 0, or ERRNO_EXIT_BASE plus the errno of what it could not do, which Python's own 1
    and 2 (a traceback, a program that cannot be read) are not mistaken for.
    """
    wake_fd = catch_signals()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        supervisor = Supervisor(sys.argv[1])
    except FileExistsError:  # the agent gave this launch up before we came
        return 0
    except OSError as error:
        return ERRNO_EXIT_BASE + (error.errno or 0)
    try:
        supervisor.run(wake_fd)
        supervisor.remove_tmp_dir()
    except BaseException:  # our own fault: the traceback goes to supervisor.log, the job ends
        kill_all(descendants(os.getpid()))
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
