"""Options that several commands share, and what their texts mean."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from protos.messages import JobState, JobView
from testbed.cli import complete
from testbed.cli.text import plain
from testbed.client_errors import InvalidRequest, NotFound
from testbed.settings import Settings, load_settings
from testbed.values import InvalidValue, Selector, SelectorKind, parse_selector

if TYPE_CHECKING:
    from testbed.client import Client

T = TypeVar("T")

_SHORT_STATES = {
    "PD": JobState.PENDING,
    "HD": JobState.HELD,
    "ST": JobState.STARTING,
    "R": JobState.RUNNING,
    "CD": JobState.COMPLETED,
    "F": JobState.FAILED,
    "OOM": JobState.OUT_OF_MEMORY,
    "TO": JobState.TIMEOUT,
    "CA": JobState.CANCELLED,
    "NF": JobState.NODE_FAIL,
}
UNFINISHED = tuple(state for state in JobState if not state.is_final)


def settings_of(controller: str | None) -> Settings:
    """The settings of this call; `controller` is the flag's value."""
    flags = {} if controller is None else {"client.controller": controller}
    return load_settings(os.environ, flags)


def connect(controller: str | None, *, patience_s: float | None = None) -> Client:
    """A client for the controller that the settings name; `controller` is the flag's value."""
    from testbed.client import Client  # noqa: PLC0415 - loads gRPC, --help does without

    return Client(settings_of(controller).controller, patience_s=patience_s)


INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


MAX_TEXT_CHARS = 1000
"""Of names to look for and of reasons: they travel with every view."""


def some_text(value: str | None) -> str | None:
    """Callback of options that name something: an unset shell variable must not widen a filter.

    Raises:
        typer.BadParameter: the option was given with nothing in it, or with what is no text.
    """
    if value is None:
        return None
    if not value.strip():
        raise typer.BadParameter("is empty: leave it out, or say which")
    if len(value) > MAX_TEXT_CHARS:
        raise typer.BadParameter(f"is longer than {MAX_TEXT_CHARS:,} characters")
    try:
        return utf8(value)
    except UnicodeError:
        raise typer.BadParameter(f"{plain(value)} is not UTF-8") from None


def utf8(word: str) -> str:
    """A word of the command line as the UTF-8 that it is, whatever the locale took it for.

    Raises:
        UnicodeError: it is something else.
    """
    try:
        word.encode()
    except UnicodeEncodeError:
        return os.fsencode(word).decode()
    return word


JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
ControllerFlag = Annotated[
    str | None,
    typer.Option(
        "--controller",
        metavar="HOST:PORT",
        help="Address of the controller (else RLTUNE_CONTROLLER, else the settings).",
    ),
]
JobsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="JOBS...",
        autocompletion=complete.jobs,
        help="12, 1,3,5-8, last, all or @name.",
    ),
]
JobArgument = Annotated[
    str,
    typer.Argument(metavar="JOB", autocompletion=complete.jobs, help="12, last or @name."),
]
UserFlag = Annotated[
    str | None,
    typer.Option(
        "--user", "-u", callback=some_text, help="Whose jobs `last`, `all` and @name mean."
    ),
]


def read(option: str, parse: Callable[[str], T], text: str) -> T:
    """What an option's text means.

    Raises:
        InvalidRequest: `parse` refuses it; the message names the option.
    """
    try:
        return parse(text)
    except InvalidValue as error:
        raise InvalidRequest(f"{option}: {error.problem}", error.hint, field=option) from None


def read_states(texts: Sequence[str]) -> tuple[JobState, ...]:
    """Job states from `--state`: words or Slurm's short ones, with commas.

    Raises:
        InvalidRequest: there is no such state.
    """
    states = []
    for word in ",".join(texts).upper().split(","):
        state = _SHORT_STATES.get(word) or JobState.__members__.get(word.strip())
        if state is None:
            known = ", ".join(JobState)
            raise InvalidRequest(f"--state: there is no state {word!r}", f"known are {known}")
        states.append(state)
    return tuple(states)


def read_selector(what: str, text: str) -> Selector:
    """What a word that names jobs means.

    Raises:
        InvalidRequest: it names none, or is not UTF-8.
    """
    try:
        return read(what, parse_selector, utf8(text))
    except UnicodeError:
        raise InvalidRequest(
            f"{what}: {text!r} is not UTF-8", "name the jobs by their numbers"
        ) from None


def select_jobs(
    client: Client,
    texts: Iterable[str],
    *,
    user: str | None = None,
    states: Sequence[JobState] = UNFINISHED,
    or_newest: bool = False,
    numbers_are_anybodys: bool = False,
) -> list[int]:
    """The numbers of the jobs that selectors name, each once.

    `all` and `@name` mean the jobs of `user` (by default: who calls) in one of `states`; with
    `or_newest`, a name without such jobs means the newest of that name. A number together with
    `user` is refused, since it might be another's job, unless `numbers_are_anybodys`.

    Raises:
        InvalidRequest: a selector cannot be meant.
        NotFound: `last` or `@name` names none.
    """
    found: dict[int, None] = {}
    whose = user or client.user
    for text in texts:
        selector = read_selector("JOBS", text)
        if selector.kind is SelectorKind.IDS and user is not None and not numbers_are_anybodys:
            raise InvalidRequest(
                f"--user says whose `last`, `all` or @name is meant, but {text} names jobs by "
                "their numbers",
                "leave --user out, or name them by @name or all",
                field="--user",
            )
        if or_newest and selector.kind is SelectorKind.NAME:
            found.update(dict.fromkeys(_unfinished_or_newest(client, selector, whose)))
        else:
            found.update(dict.fromkeys(_select(client, selector, whose, states)))
    return list(found)


def _unfinished_or_newest(client: Client, selector: Selector, user: str) -> list[int]:
    """A job that ended a moment before somebody waits for it is still the one that is meant."""
    jobs = client.jobs(user=user, name=selector.name, states=UNFINISHED)
    return _ids(jobs) if jobs else _select(client, selector, user, ())[-1:]


def _select(client: Client, selector: Selector, user: str, states: Sequence[JobState]) -> list[int]:
    match selector.kind:
        case SelectorKind.IDS:
            return list(selector.ids)
        case SelectorKind.ALL:
            return _ids(client.jobs(user=user, states=states))
        case SelectorKind.LAST:
            jobs = client.jobs(user=user, limit=1)
            what = f"user {user} has no jobs"
        case SelectorKind.NAME:
            jobs = client.jobs(user=user, name=selector.name, states=states)
            what = f"user {user} has no such job named {selector.name!r}"
    if not jobs:
        raise NotFound(what, "`rltune jobs --all` lists those there are")
    return _ids(jobs)


def _ids(jobs: Iterable[JobView]) -> list[int]:
    return sorted(job.job_id for job in jobs)


def select_job(client: Client, text: str) -> int:
    """The number of the one job that a selector names; the newest of a name.

    Raises:
        InvalidRequest: the selector names several, or cannot be meant.
        NotFound: it names none.
    """
    selector = read_selector("JOB", text)
    if selector.kind is SelectorKind.ALL or len(selector.ids) > 1:
        raise InvalidRequest(f"{text!r} names several jobs", "name one: 12, last or @name")
    return _select(client, selector, client.user, ())[-1]
