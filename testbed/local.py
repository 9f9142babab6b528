"""A whole cluster of real processes on this machine: one controller and some node agents."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from protos.messages import JobState
from testbed.children import Child, ProcessDied
from testbed.client import Client
from testbed.client_errors import InvalidRequest, RltuneError
from testbed.command_lines import CONTROLLER, WATCHDOG, CommandLines
from testbed.interrupts import Interrupts
from testbed.leftovers import EndedJobs, Leftover, end_jobs
from testbed.watchdog import OWNED

USAGE_CODE = 2
"""How controller and agent end when an option, folder or port cannot be used."""
START_TIMEOUT_S = 60.0
JOBS_END_TIMEOUT_S = 45.0
"""How long cancelled jobs may take: the usual grace of 30 s, SIGKILL, and the report of it."""
LEAST_GRACE_S = 5.0
"""For jobs that lost their controller or agent, however long the stop has taken already."""
PROCESS_END_TIMEOUT_S = 15.0
NOT_FINAL = tuple(state for state in JobState if not state.is_final)


class StartFailed(RltuneError):
    """The cluster was not ready in time."""

    default_code = "start_failed"


class StartRefused(InvalidRequest):
    """What was asked for cannot be started like this."""

    default_code = "start_refused"


class StartInterrupted(RltuneError):
    """Somebody asked to stop before the cluster was ready."""

    default_code = "start_interrupted"


@dataclass(frozen=True, slots=True)
class Stopped:
    """What stopping the cluster took. Everything but `cancelled` is empty when all went well."""

    cancelled: tuple[int, ...]
    """Jobs that had not ended and were cancelled."""
    unfinished: tuple[int, ...]
    """Cancelled jobs whose end the controller did not see."""
    orphaned: tuple[int, ...]
    """Jobs that ran on without controller or agent, and were ended through their supervisors."""
    killed: tuple[str, ...]
    """Controller or agents that had to be killed."""
    leftovers: tuple[Leftover, ...]
    """Processes of jobs that outlasted the grace, and were killed."""


class LocalCluster:
    """A controller and one agent per entry of `gpus`, named node-1, node-2, ...

    An entry is a mock specification such as `P100:4`, or None for this machine's real GPUs.
    As a context manager it is ready inside the block, and stopped with all its jobs at its end.
    If our process dies before `stop`, a watchdog ends the cluster (`testbed.watchdog`).
    """

    state_dir: Path
    """Databases, logs and job folders; set by `start`."""

    def __init__(
        self,
        gpus: Sequence[str | None],
        *,
        policy: str = "multifactor",
        allocator: str = "milp",
        name: str = "local",
        port: int = 0,
        state_dir: Path | None = None,
        mock_faults: Mapping[str, Path] | None = None,
        controller_options: Sequence[str] = (),
        start_timeout_s: float = START_TIMEOUT_S,
        interrupts: Interrupts | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe it; nothing is started yet.

        Args:
            gpus: GPUs of each node.
            policy: Order of the queue.
            allocator: Placement.
            name: Name of the cluster.
            port: Where the controller listens on loopback; 0: any free one.
            state_dir: Databases, logs and job folders; None: a temporary folder that is
                removed at the end.
            mock_faults: Node name to a file of faults that its mock GPUs shall have.
            controller_options: Further ones, as `rltune controller` takes them.
            start_timeout_s: How long all nodes may take to be UP.
            interrupts: Watched while waiting; None: nobody interrupts.
            monotonic: The clock for deadlines.
        """
        self._lines = CommandLines(
            *(tuple(gpus), policy, allocator, name, dict(mock_faults or {})),
            controller_options=tuple(controller_options),
        )
        self._port = port
        self._start_timeout_s = start_timeout_s
        self._interrupts = interrupts or Interrupts()
        self._monotonic = monotonic
        self._given_state_dir = state_dir
        self._scratch: Path | None = None
        self._children: dict[str, Child] = {}
        self._watchdog: Child | None = None
        self._owns_state = False
        self._client: Client | None = None
        self._address = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """Where the controller listens."""
        return self._address

    @property
    def client(self) -> Client:
        """A client of the cluster, for the thread that started it."""
        assert self._client is not None, "the cluster was not started"
        return self._client

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of the nodes in order."""
        return self._lines.node_names

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the controller and the agents by name."""
        return {name: child.pid for name, child in self._children.items()}

    @property
    def parts(self) -> dict[str, Child]:
        """Controller, agents and watchdog by name."""
        assert self._watchdog is not None, "the cluster was not started"
        return self._children | {WATCHDOG: self._watchdog}

    def start(self) -> None:
        """Start all processes and wait until every node is UP.

        Raises:
            StartRefused: a folder cannot be written, or the controller or an agent refused its
                options; the message has the end of its log.
            StartFailed: the nodes were not UP in time.
            ProcessDied: the controller or an agent failed.
            StartInterrupted: somebody asked to stop.
        """
        self.state_dir = self._make_state_dir()
        try:
            started_s = self._monotonic()
            deadline_s = started_s + self._start_timeout_s
            self._watchdog = self._spawn(WATCHDOG, env={}, is_tied=True)
            env = {"TMPDIR": str(self._scratch)}
            self._children[CONTROLLER] = self._spawn(CONTROLLER, env)
            self._wait(self._listens, deadline_s, "the controller listens")
            self._own_state()
            for node in self.node_names:
                self._children[node] = self._spawn(node, env)
            self._wait(lambda: self._nodes_up(started_s), deadline_s, "all nodes are UP")
        except ProcessDied as error:
            self.stop()
            if error.returncode == USAGE_CODE:
                raise StartRefused(error.message) from None
            raise
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raise ProcessDied if the controller or an agent has ended by itself."""
        for child in self._children.values():
            child.check()

    def kill(self, name: str) -> None:
        """End `controller` or a node's agent by SIGKILL, as a crash would."""
        self._children[name].kill()

    def restart(self, name: str) -> None:
        """Start again what was killed, with the same state; ready when this returns."""
        started_s = self._monotonic()
        deadline_s = started_s + self._start_timeout_s
        self.respawn(name)
        if name == CONTROLLER:
            self._wait(self._listens, deadline_s, "the controller listens")
        self._wait(lambda: self._nodes_up(started_s), deadline_s, "all nodes are UP")

    def respawn(self, name: str) -> None:
        """Start a part that has ended again, with the same state, and do not wait for it."""
        self.parts[name].start(self._argv(name))

    def stop(self) -> Stopped:
        """Cancel all jobs, then end agents and controller, each within a deadline.

        Jobs that cannot be cancelled, since their agent or the controller is gone, are ended
        through their supervisors. What does not end in time is killed. A second interrupt skips
        the waiting for jobs, never the killing. Nothing of this cluster runs when it returns.
        """
        deadline_s = self._monotonic() + JOBS_END_TIMEOUT_S
        try:
            cancelled, unfinished = self._cancel_jobs(deadline_s)
        finally:
            killed = self._end_processes()
            orphans = self._end_orphans(deadline_s)
            if self._client is not None:
                self._client.close()
                self._client = None
            self._end_watchdog()
        return Stopped(cancelled, unfinished, orphans.job_ids, killed, orphans.killed)

    # -------------------------------------------------------------- starting

    def _make_state_dir(self) -> Path:
        """The state folder, and a scratch folder where the jobs' own TMPDIRs are made.

        Agents remove a job's TMPDIR, but not when both are killed; so ours lies around them.
        """
        if self._given_state_dir is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="rltune-")).resolve()
            return self._scratch
        folder = self._given_state_dir.expanduser().absolute()
        try:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            (folder / "logs" / "writable").touch()
            (folder / "logs" / "writable").unlink()
        except OSError as error:
            raise StartRefused(
                f"cannot write to the state folder {folder}: {error.strerror}",
                "name another one with --state-dir",
            ) from error
        self._scratch = Path(tempfile.mkdtemp(prefix="rltune-")).resolve()
        return folder.resolve()

    def _spawn(self, name: str, env: Mapping[str, str], *, is_tied: bool = False) -> Child:
        logs = self.state_dir / "logs"
        logs.mkdir(exist_ok=True)
        child = Child(name, logs / f"{name}.log", env, is_tied=is_tied)
        child.start(self._argv(name))
        return child

    def _own_state(self) -> None:
        """Note that the jobs in the state folder are ours: our controller has locked it."""
        assert self._scratch is not None
        (self._scratch / OWNED).symlink_to(self.state_dir)
        self._owns_state = True

    def _argv(self, name: str) -> list[str]:
        if name == WATCHDOG:
            assert self._scratch is not None
            return self._lines.watchdog(self._scratch)
        if name == CONTROLLER:
            port = self._address.rpartition(":")[2] or self._port
            return self._lines.controller(int(port), self.state_dir)
        return self._lines.agent(name, self._address, self.state_dir)

    def _listens(self) -> bool:
        path = self.state_dir / CONTROLLER / "controller.json"
        # The file of an earlier run may still lie there: only the pid tells that it is ours.
        if not path.exists():
            return False
        ready = json.loads(path.read_text())
        if ready["pid"] != self._children[CONTROLLER].pid:
            return False
        if self._client is None:
            self._address = ready["address"]
            self._client = Client(self._address)
        return True

    def _nodes_up(self, since_s: float) -> bool:
        """Whether every node is connected and was heard since `since_s` (monotonic).

        The second half matters after a crash: a node counts as UP until its lease is over.
        """
        asked_s = self._monotonic()
        up = {
            node.name
            for node in self.client.nodes()
            if not node.state.startswith("DOWN")
            and node.last_seen_s_ago is not None
            and node.last_seen_s_ago < asked_s - since_s
        }
        return up >= set(self.node_names)

    def _wait(self, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
        while not condition():
            self.check()
            if self._interrupts.stop:
                raise StartInterrupted("interrupted before the cluster was ready")
            if self._monotonic() > deadline_s:
                raise StartFailed(
                    f"waited {self._start_timeout_s:.0f} s in vain until {what}; logs:\n"
                    + "\n".join(f"{c.name}:\n{c.log_tail()}" for c in self._children.values())
                )
            self._interrupts.pause(0.03)

    # -------------------------------------------------------------- stopping

    def _cancel_jobs(self, deadline_s: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Cancel jobs that have not ended and wait for their end: (cancelled, unfinished)."""
        cancelled: tuple[int, ...] = ()
        unfinished: tuple[int, ...] = ()
        if self._client is None or not self._children[CONTROLLER].runs():
            return cancelled, unfinished
        try:
            unfinished, _ = self._open_jobs()
            if unfinished:
                self._client.cancel(unfinished, reason="the cluster is stopped")
                cancelled = unfinished
            awaited = True
            while awaited and not self._interrupts.hurry and self._monotonic() < deadline_s:
                unfinished, awaited = self._open_jobs()
                awaited = awaited or self._holders()
                self._interrupts.pause()
        except RltuneError:
            # The controller went away meanwhile. Its jobs are ended without it, see stop, and
            # stay in `unfinished`.
            return cancelled, unfinished
        return cancelled, unfinished

    def _open_jobs(self) -> tuple[tuple[int, ...], bool]:
        """Jobs that have not ended, and whether agents that run can still end one of them."""
        jobs = self.client.jobs(states=NOT_FINAL)
        gone = self._gone_nodes()
        can_end = any(
            not job.attempts or gone.isdisjoint(rank.node for rank in job.attempts[-1].ranks)
            for job in jobs
        )
        return tuple(sorted(job.job_id for job in jobs)), can_end

    def _gone_nodes(self) -> set[str]:
        return {name for name, child in self._children.items() if not child.runs()}

    def _holders(self) -> bool:
        """Whether a connected node still clears up after a job: frees GPUs, removes its TMPDIR."""
        gone = self._gone_nodes()
        return any(
            node.jobs or any(gpu.job_id for gpu in node.gpus)
            for node in self.client.nodes()
            if not node.state.startswith("DOWN") and node.name not in gone
        )

    def _end_processes(self) -> tuple[str, ...]:
        """End agents, then the controller; names of those that had to be killed."""
        agents = [child for name, child in self._children.items() if name != CONTROLLER]
        controller = [child for name, child in self._children.items() if name == CONTROLLER]
        killed: list[str] = []
        for group in (agents, controller):
            for child in group:
                child.terminate()
            killed += [child.name for child in group if not child.end(PROCESS_END_TIMEOUT_S)]
        return tuple(killed)

    def _end_orphans(self, deadline_s: float) -> EndedJobs:
        """End jobs that are still there after controller and agents."""
        if not self._owns_state:
            return EndedJobs((), ())
        return end_jobs(
            self.state_dir,
            grace_s=max(deadline_s - self._monotonic(), LEAST_GRACE_S),
            monotonic=self._monotonic,
            pause=self._interrupts.pause,
            hurry=lambda: self._interrupts.hurry,
        )

    def _end_watchdog(self) -> None:
        """Dismiss it. The scratch folder goes first: so it has no state folder to look after."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        if self._watchdog is not None:
            self._watchdog.untie()
            self._watchdog.end(PROCESS_END_TIMEOUT_S)
