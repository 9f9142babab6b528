"""`rltune` as a process: signals, pipes, imports, and what it becomes."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import typer

from protos.messages import ExitFacts, JobState
from testbed.cli.main import GROUPS, build_app

RLTUNE = [sys.executable, "-P", "-m", "testbed.cli.main"]
HEAVY = {"torch", "torchvision", "transformers", "pyomo", "platformdirs", "numpy", "yaml",
         "rich", "pynvml", "sklearn"}  # fmt: skip
"""Not pydantic, alas: typer itself reads options with it from version 0.27 on."""


@pytest.fixture
def environ(controller, tmp_path):
    return {
        "RLTUNE_CONTROLLER": controller.address,
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
    }


def run(args: list[str], environ: dict[str, str], **kwargs) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*RLTUNE, *args], env=environ, capture_output=True, timeout=60, check=False, **kwargs
    )


def loaded_by(args: list[str], environ: dict[str, str]) -> set[str]:
    code = (
        "import sys; from testbed.cli.main import main; code = main(sys.argv[1:]); "
        "sys.stderr.write('\\n'.join(sys.modules)); sys.exit(code)"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, *args],
        env=environ, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0
    return set(ran.stderr.decode().split())


@pytest.mark.parametrize(
    "args", [["jobs"], ["job", "1"], ["nodes"], ["submit", "--", "true"], ["submit", "resnet50"],
             ["cancel", "1"], ["wait", "2"], ["logs", "1"], ["config", "show"]],
)  # fmt: skip
def test_nothing_heavy_is_loaded(controller, environ, args):
    controller.add(JobState.RUNNING)
    controller.end(controller.add(), JobState.COMPLETED, ExitFacts(exit_code=0))
    assert loaded_by(args, environ) & HEAVY == set()


def test_help_does_not_even_load_grpc(environ):
    loaded = loaded_by(["config", "show"], environ)
    assert "grpc" not in loaded
    assert run(["--help"], environ).returncode == 0
    assert b"Usage" in run(["submit", "--help"], environ).stdout


def test_a_command_is_found_in_the_group_that_is_said_to_have_it():
    everything = typer.main.get_command(build_app()).commands
    assert set(everything) == {name for names in GROUPS.values() for name in names}
    for name, command in everything.items():
        alone = typer.main.get_command(build_app([name])).commands[name]
        assert alone.help == command.help


def test_every_option_and_command_is_documented():
    docs = Path(__file__).parents[3] / "docs"
    text = (docs / "cli.md").read_text("utf-8") + (docs / "demo.md").read_text("utf-8")
    commands = typer.main.get_command(build_app()).commands
    words = {
        word
        for name, command in commands.items()
        for word in [name, *(o for p in command.params for o in (*p.opts, *p.secondary_opts))]
        if word == name or word.startswith("--")
    }
    missing = {word for word in words if not re.search(rf"`[^`]*{word}\b", text)}
    assert missing == set()


def test_a_reader_that_leaves_is_no_error(controller, environ):
    for _ in range(3000):
        controller.add()
    head, tail = os.pipe()
    process = subprocess.Popen(
        [*RLTUNE, "jobs", "--limit", "5000"], env=environ, stdout=tail, stderr=subprocess.PIPE
    )
    os.close(tail)
    os.read(head, 10)
    os.close(head)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 141
    assert stderr == b""


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["wait", "1"], 130),
        (["logs", "-f", "1"], 130),
        (["events", "-f"], 130),
        (["submit", "--wait", "--", "true"], 130),
        (["watch", "--json"], 0),
    ],
)
def test_ctrl_c_ends_at_once_and_the_job_goes_on(controller, environ, args, code, wait_until):
    controller.add(JobState.RUNNING)
    process = subprocess.Popen(
        [*RLTUNE, *args], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    streams = {"WatchEventsRequest", "StreamLogsRequest"}
    wait_until(lambda: any(kind in streams for kind, _ in controller.requests))
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == code
    assert b"Traceback" not in stderr
    assert controller.jobs[1].state is JobState.RUNNING


def test_the_live_screen_shows_the_cluster_and_ends_cleanly(controller, environ, wait_until):
    controller.add(JobState.RUNNING, name="[red]\x1b[31mevil")
    main_fd, terminal_fd = pty.openpty()
    environ |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [*RLTUNE, "watch", "--interval", "0.1s"],
        env=environ, stdin=terminal_fd, stdout=terminal_fd, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(terminal_fd)
    os.set_blocking(main_fd, False)
    shown = bytearray()

    def has_shown(*parts: bytes) -> bool:
        with suppress(BlockingIOError):
            shown.extend(os.read(main_fd, 65536))
        return all(part in shown for part in parts)

    wait_until(
        lambda: has_shown(b"gpu-node-2", b"REASON/NODELIST", "█".encode(), b"[red]\\x1b[31mevil"),
        describe=lambda: bytes(shown),
    )
    controller.stop()
    wait_until(lambda: has_shown(b"trying again"), timeout_s=40, describe=lambda: bytes(shown))
    controller.start()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    os.close(main_fd)
    assert process.returncode == 0
    assert stderr == b""


def test_watch_without_a_terminal_names_the_other_ways(environ):
    ran = run(["watch"], environ)
    assert ran.returncode == 2
    assert b"watch --json" in ran.stderr


def test_controller_and_agent_are_not_taken_from_the_current_folder(environ, tmp_path):
    for module in ("controller", "node_agent"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__main__.py").write_text("raise SystemExit(77)")
    for command in ("controller", "agent"):
        ran = run([command, "--no-such-option"], environ, cwd=tmp_path)
        assert ran.returncode == 2
        assert b"--no-such-option" in ran.stderr


def test_an_encoding_that_lacks_a_letter_is_no_error(controller, environ):
    controller.add(name="名前")
    environ |= {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    ran = run(["jobs"], environ)
    assert ran.returncode == 0
    assert b"\\u540d" in ran.stdout


def test_the_current_folder_may_be_gone(controller, environ, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"cd {gone} && rmdir {gone} && exec {' '.join(RLTUNE)} submit -- true"
    ran = subprocess.run(
        ["sh", "-c", script], env=environ, capture_output=True, timeout=60, check=False
    )
    assert ran.returncode == 2
    assert b"no longer exists" in ran.stderr


def test_submit_works_from_any_folder(controller, environ, hostile_dir):
    ran = run(["submit", "--", "true"], environ, cwd=hostile_dir)
    assert ran.returncode == 0
    assert Path(controller.jobs[1].spec.cwd) == hostile_dir
