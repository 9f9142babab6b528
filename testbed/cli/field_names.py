"""Errors about fields of a job, in the words of the options that set them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from testbed.client_errors import InvalidRequest

OPTIONS = {
    "name": "--name",
    "user": "your user name",
    "argv": "the command",
    "cwd": "--cwd",
    "env": "--env",
    "gpus": "--gpus",
    "gpu_types": "--gpu-type",
    "nodes": "--nodes",
    "cpus": "--cpus",
    "memory_bytes": "--mem",
    "time_limit_s": "--time",
    "time_estimate_s": "--estimate",
    "grace_s": "--grace",
    "priority": "--priority",
    "qos": "--qos",
    "hold": "--hold",
    "on_node_fail": "--on-node-fail",
    "partition": "--partition",
    "min_gpu_memory_bytes": "--gpu-mem",
    "mix_gpu_types": "--mix-gpu-types",
}
"""The option of each field of `JobSpec`."""
_FIELD = re.compile(r"(?:jobs\[\d+\]\.)?spec\.(\w+)")


@contextmanager
def in_words_of_options() -> Iterator[None]:
    """Let `spec.gpu_types[0]: ...` be `--gpu-type: ...`; `field` stays, for programs.

    Raises:
        InvalidRequest: that of the body, reworded.
    """
    try:
        yield
    except InvalidRequest as error:
        field = _FIELD.match(error.field)
        if field is None or not error.message.startswith(error.field):
            raise
        message = OPTIONS[field[1]] + error.message.removeprefix(error.field)
        raise type(error)(message, error.hint, code=error.code, field=error.field) from None
