"""The command `rltune`: all commands, and the one place where errors become words and numbers."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from testbed.cli.exit_codes import ExitCode, error_exit_code
from testbed.cli.json_output import print_json_error
from testbed.cli.text import paint, plain, tell, use_color
from testbed.client_errors import InvalidRequest, RltuneError

DEBUG_VARIABLE = "RLTUNE_DEBUG"
MAX_SHOWN_CHARS = 2000
"""Errors quote what was given, which may be a megabyte."""
_ClickException = cast("type[Exception]", typer.BadParameter.__mro__[2])
"""Newer typers bring a click of their own and export only the leaf of its error tree."""


GROUPS = {
    "submit": ("submit", "whatif"),
    "jobs": ("jobs", "ls", "list", "ps", "job", "show", "explain"),
    "logs": ("logs",),
    "actions": ("cancel", "stop", "hold", "release", "requeue", "wait"),
    "watch": ("watch", "events"),
    "nodes": ("nodes", "gpus", "partitions", "drain", "resume"),
    "history": ("history",),
    "workloads": ("workloads",),
    "cluster": ("info", "config", "version", "controller", "agent"),
    "local": ("up", "demo"),
    "simulate": ("simulate", "trace"),
}
"""Which module of this package registers which commands, in the order of `--help`."""


_WRITE_ERRORS = frozenset({errno.ENOSPC, errno.EBADF, errno.EIO, errno.EDQUOT, errno.EFBIG})
"""Of an open descriptor; the commands write to no other than standard output."""


class PipeClosed(Exception):
    """Whoever read our output has left."""


class OutputLost(Exception):
    """Standard output cannot be written: a full disk, a closed descriptor."""


@contextmanager
def _output_told_apart() -> Iterator[None]:
    """What goes wrong with standard output, as errors of its own: typer makes code 1 of some.

    Raises:
        PipeClosed, OutputLost: it went wrong.
    """
    try:
        yield
    except BrokenPipeError:
        raise PipeClosed from None
    except OSError as error:
        if error.filename is None and error.errno in _WRITE_ERRORS:
            raise OutputLost(error.strerror) from None
        raise


class RltuneGroup(TyperGroup):
    """The root group: commands in the order of their registration."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the command line, which prints something for `--help` and `--version`."""
        with _output_told_apart():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _output_told_apart():
            return super().invoke(ctx)


def build_app(words: Sequence[str] = ()) -> typer.Typer:
    """The commands of `rltune`; of a command line's `words` only the group that they name.

    Typer inspects every command that it is given: all of them cost three times what one does.
    """
    app = typer.Typer(
        cls=RltuneGroup,
        name="rltune",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    named = [group for group, commands in GROUPS.items() if words and words[0] in commands]
    for group in named or GROUPS:
        importlib.import_module(f"testbed.cli.{group}").register(app)
    return app


def _show_version(value: bool) -> None:
    if value:
        cluster = importlib.import_module("testbed.cli.cluster")
        cluster.version()
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Run training jobs on a shared cluster of GPU machines."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code (docs/cli.md)."""
    args = list(sys.argv[1:] if argv is None else argv)
    # Before gRPC is loaded: we only ever spawn plain processes, and its own log is not for people.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    _write_any_character()
    as_json = "--json" in (args[: args.index("--")] if "--" in args else args)
    try:
        return _run(args)
    except PipeClosed:
        _discard_output()
        return ExitCode.BROKEN_PIPE
    except OutputLost as error:
        _discard_output()
        tell(f"error: standard output cannot be written: {error}")
        return ExitCode.OUTPUT_LOST
    except RltuneError as error:
        _tell_error(error, as_json=as_json)
        return error_exit_code(error)
    except Exception as error:  # noqa: BLE001 - the last handler: a fault of ours, told as one
        if os.environ.get(DEBUG_VARIABLE) == "1":
            traceback.print_exc()
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        fault = RltuneError(
            f"a fault of rltune itself: {text}", f"{DEBUG_VARIABLE}=1 shows where", code="internal"
        )
        _tell_error(fault, as_json=as_json)
        return ExitCode.FAILED


def _run(args: list[str]) -> int:
    command = typer.main.get_command(build_app(args))
    try:
        code = command.main(args=args, prog_name="rltune", standalone_mode=False)
        with _output_told_apart():
            sys.stdout.flush()
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except typer.Abort:
        tell("stopped")
        return ExitCode.INTERRUPTED
    except _ClickException as error:
        raise _usage_error(error) from None
    return code if isinstance(code, int) else ExitCode.OK


def _usage_error(error: Any) -> RltuneError:
    """A wrong command line, in the words of the parser."""
    ctx = getattr(error, "ctx", None)
    path = "rltune" if ctx is None else ctx.command_path
    return InvalidRequest(error.format_message(), f"see `{path} --help`", code="usage")


def _tell_error(error: RltuneError, *, as_json: bool) -> None:
    try:
        if as_json:
            print_json_error(error)
        else:
            _tell_person(error)
    except OSError:
        _discard_output()
        _tell_person(error)


def _tell_person(error: RltuneError) -> None:
    color = "red" if use_color(sys.stderr) else None
    tell(f"{paint('error:', color)} {_several_lines(error.message)}")
    if error.hint:
        tell(f"hint: {_several_lines(error.hint)}")


def _several_lines(text: str) -> str:
    shown = text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + " ..."
    return "\n".join(plain(line) for line in shown.splitlines())


def _write_any_character() -> None:
    """Never fail for a character that the terminal's encoding lacks, nor for closed streams."""
    if sys.stdout is None:  # started with >&-: writing fails, as on any descriptor that is bad
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w")  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Point standard output nowhere, so that the flush at exit does not fail again."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


if __name__ == "__main__":
    sys.exit(main())
