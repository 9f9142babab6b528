"""A submission before it is complete: what flags, a job file or a program asked for.

The parts that were left open are filled in here and nowhere else, so that the command line,
job files and the Python client agree on the defaults.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from protos.messages import JobSpec, OnNodeFail
from testbed.client_errors import InvalidRequest

SAFE_PATH_ENV = "PYTHONSAFEPATH"
"""Keeps a folder `workloads/` where a job starts from hiding ours, in torchrun's children too.
Only for named workloads: a user's `train.py` must find the `helper.py` beside it."""
MAX_COUNT = 100_000
"""Equal jobs in one submission."""
_SAME_IN_SPEC = (
    *("time_estimate_s", "grace_s", "priority", "qos", "hold", "on_node_fail"),
    *("partition", "min_gpu_memory_bytes", "mix_gpu_types"),
)
"""Fields whose default is the one of `JobSpec`."""


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job as asked for; None means "not said". Either `workload` or `argv` must be set."""

    argv: tuple[str, ...] | None = None
    """Any command, as it is."""
    workload: str | None = None
    """A workload by name, e.g. `resnet50`; `argv` is None then."""
    workload_options: tuple[str, ...] = ()
    name: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: int | None = None
    """All GPUs of the job together."""
    gpu_types: tuple[str, ...] | None = None
    nodes: int | None = None
    """0: as few as possible, at most one more; shares need not be equal."""
    cpus: int | None = None
    """On each node."""
    memory_bytes: int | None = None
    """On each node."""
    time_limit_s: float | None = None
    """Infinity for "explicitly unlimited", which is also the default."""
    time_estimate_s: float | None = None
    grace_s: float | None = None
    priority: int | None = None
    qos: str | None = None
    hold: bool | None = None
    on_node_fail: OnNodeFail | None = None
    partition: str | None = None
    min_gpu_memory_bytes: int | None = None
    mix_gpu_types: bool | None = None

    def overridden_by(self, other: JobRequest) -> JobRequest:
        """What `other` says, and this where it says nothing. Environments are joined."""
        if other.argv is not None or other.workload is not None:
            program = (other.argv, other.workload, other.workload_options)
        else:
            program = (self.argv, self.workload, self.workload_options)
        said = {
            f.name: value
            for f in dataclasses.fields(other)
            if (value := getattr(other, f.name)) is not None
        }
        argv, workload, options = program
        return dataclasses.replace(
            self,
            **{
                **said,
                "argv": argv,
                "workload": workload,
                "workload_options": options,
                "env": {**self.env, **other.env},
            },
        )

    def to_spec(self, *, user: str) -> JobSpec:
        """The complete job.

        Raises:
            InvalidRequest: there is no program, or the workload or its options are wrong.
        """
        argv, env = self._program()
        nodes = 1 if self.nodes is None else self.nodes
        gpus = 0 if self.gpus is None else self.gpus
        open_fields = {
            name: value for name in _SAME_IN_SPEC if (value := getattr(self, name)) is not None
        }
        return JobSpec(
            name=self._default_name() if self.name is None else self.name,
            user=user,
            argv=argv,
            cwd=current_folder() if self.cwd is None else self.cwd,
            env=env,
            gpus=gpus,
            gpu_types=self.gpu_types or (),
            nodes=nodes,
            cpus=max(1, gpus // max(1, nodes)) if self.cpus is None else self.cpus,
            memory_bytes=self.memory_bytes or 0,
            time_limit_s=None if self.time_limit_s == math.inf else self.time_limit_s,
            **open_fields,
        )

    def _program(self) -> tuple[tuple[str, ...], Mapping[str, str]]:
        if self.workload is None:
            if not self.argv:
                raise InvalidRequest(
                    "there is nothing to run", "name a workload, or give a command after --"
                )
            return self.argv, self.env
        from workloads import catalogue  # noqa: PLC0415 - loads argparse, for named ones only

        try:
            argv = catalogue.command(self.workload, self.workload_options)
        except catalogue.UnknownWorkloadError as error:
            raise InvalidRequest(
                error.problem,
                "`rltune workloads` lists all; another program goes after --: "
                "rltune submit -- PROGRAM ...",
            ) from None
        except catalogue.UsageError as error:
            raise InvalidRequest(
                str(error), "`python -m workloads.train --help` explains the options"
            ) from None
        return argv, {SAFE_PATH_ENV: "1", **self.env}

    def _default_name(self) -> str:
        if self.workload is not None:
            from workloads import catalogue  # noqa: PLC0415

            return catalogue.find(self.workload).name
        assert self.argv
        base = PurePath(self.argv[0]).name
        return "".join(c if c.isprintable() else "?" for c in base)[:60] or "job"


def os_user() -> str:
    """The user as the system knows them, whatever the environment says."""
    uid = os.getuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid{uid}"


def current_folder() -> str:
    """The current folder.

    Raises:
        InvalidRequest: it was deleted.
    """
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        raise InvalidRequest(
            "the current folder no longer exists", "go to another one, or give --cwd"
        ) from None
