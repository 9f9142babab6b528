"""What a shell offers at Tab. It waits for a controller no longer than a moment, and is silent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import typer

from protos.messages import JobState, OnNodeFail
from testbed.client_errors import RltuneError

if TYPE_CHECKING:
    from testbed.client import Client

T = TypeVar("T")

PATIENCE_S = 1.0
MAX_JOBS = 50
"""The newest; nobody looks through more of them."""


def qos(incomplete: str) -> list[str]:
    """Names of the qualities of service."""
    from protos.codec import QOS_NAMES  # noqa: PLC0415 - loads protobuf

    return _that_begin(incomplete, QOS_NAMES)


def on_node_fail(incomplete: str) -> list[str]:
    """What may become of a job whose node is lost."""
    return _that_begin(incomplete, (word.lower() for word in OnNodeFail))


def states(incomplete: str) -> list[str]:
    """Job states; of several with commas the last."""
    return _states(incomplete, JobState)


def final_states(incomplete: str) -> list[str]:
    """As `states`, those in which a job has ended."""
    return _states(incomplete, [state for state in JobState if state.is_final])


def _states(incomplete: str, known: Iterable[JobState]) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    # A shell takes only what continues the very letters that were typed.
    words = (str(state).lower() if last.islower() else str(state) for state in known)
    return [f"{before}{comma}{word}" for word in _that_begin(last, words)]


def workloads(incomplete: str) -> list[str]:
    """Names of the workloads."""
    from workloads import catalogue  # noqa: PLC0415 - loads argparse

    return _that_begin(incomplete, catalogue.names())


def nodes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of the nodes."""
    return _that_begin(incomplete, _ask(ctx, lambda client: [n.name for n in client.nodes()]))


def jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Numbers of the caller's newest jobs, and the words that stand for jobs."""
    newest = _ask(ctx, lambda client: client.jobs(user=client.user, limit=MAX_JOBS))
    names = dict.fromkeys(f"@{job.spec.name}" for job in newest)
    words = [*(str(job.job_id) for job in newest), "last", "all", *names]
    return _that_begin(incomplete, words)


def _ask(ctx: typer.Context, question: Callable[[Client], list[T]]) -> list[T]:
    """The answer of the controller that the command would ask; nothing if there is none soon."""
    from testbed.cli.options import settings_of  # noqa: PLC0415 - it has options that complete
    from testbed.client import Client  # noqa: PLC0415 - loads gRPC
    from testbed.client_rpc import Rpc  # noqa: PLC0415

    try:
        address = settings_of(ctx.params.get("controller")).controller
        rpc = Rpc(address, patience_s=0.0, call_timeout_s=PATIENCE_S)
        with Client(address, rpc=rpc) as client:
            return question(client)
    except RltuneError:
        return []


def _that_begin(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
