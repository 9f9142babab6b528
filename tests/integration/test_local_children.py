"""Processes of a local cluster, with small real programs in the place of controller and agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from testbed.children import Child, ProcessDied
from testbed.interrupts import Interrupts
from testbed.leftovers import kill_tree, leftovers

SLEEPER = "import time; time.sleep(300)"
DEAF = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('deaf', flush=True); time.sleep(300)"
)


def python(code):
    return [sys.executable, "-I", "-S", "-c", code]


def wait_until(condition, timeout_s=20.0, describe=lambda: ""):
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, describe()
        pause.wait(0.02)
    return value


@pytest.fixture
def child(tmp_path):
    made = Child("agent", tmp_path / "agent.log", {})
    yield made
    made.kill()


@pytest.fixture
def marked():
    """Starts processes that carry a job's mark; ends those that a test leaves."""
    started = []

    def start(attempt_dir, code=SLEEPER):
        env = {"RLTUNE_ATTEMPT_DIR": str(attempt_dir), "OTHER": "x"}
        process = subprocess.Popen(python(code), env=env, start_new_session=True)
        started.append(process)
        # The environment is that of the parent until exec has happened.
        wait_until(lambda: b"time.sleep" in _cmdline(process.pid))
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(10)


def _cmdline(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_child_runs_in_its_own_session_and_ends_on_request(child):
    child.start(python(SLEEPER))
    assert child.runs()
    assert os.getsid(child.pid) == child.pid
    child.check()
    child.terminate()
    assert child.end(patience_s=10)
    assert child.ended() == -signal.SIGTERM


def test_a_deaf_child_is_killed_after_its_patience(child):
    child.start(python(DEAF))
    wait_until(lambda: "deaf" in child.log_tail())
    child.terminate()
    assert not child.end(patience_s=0.2)
    assert child.ended() == -signal.SIGKILL


def test_a_died_child_is_told_with_the_end_of_its_log(child):
    code = (
        "import sys; print(*range(100), sep='\\n', flush=True); "
        "sys.stdout.buffer.write(b'\\xff\\n'); sys.exit(2)"
    )
    child.start(python(code))
    wait_until(lambda: child.ended() is not None)
    with pytest.raises(ProcessDied) as caught:
        child.check()
    assert "agent ended with code 2" in str(caught.value)
    assert str(caught.value).endswith("  98\n  99\n  \\xff")
    assert "  50\n" not in str(caught.value)


def test_a_killed_child_is_told_by_its_signal_and_starts_again(child):
    child.start(python(SLEEPER))
    child.kill()
    with pytest.raises(ProcessDied, match="by signal SIGKILL.*\n.*\\(empty\\)"):
        child.check()
    child.start(python(SLEEPER))
    assert child.runs()


def test_leftovers_are_processes_with_an_attempt_folder_below_ours(tmp_path, marked):
    ours = tmp_path / "state"
    inside = marked(ours / "node-1" / "attempts" / "1.1.0")
    marked(tmp_path / "state-of-another" / "1.1.0")
    [found] = leftovers(ours)
    assert found.pid == inside.pid
    assert found.attempt_dir == str(ours / "node-1" / "attempts" / "1.1.0")
    inside.kill()
    wait_until(lambda: leftovers(ours) == ())


def test_a_supervisor_is_found_by_its_argument(tmp_path):
    script = tmp_path / "code" / "supervisor.py"
    script.parent.mkdir()
    script.write_text(SLEEPER)
    state = tmp_path / "state"
    argv = [sys.executable, "-I", "-S", str(script), str(state / "attempts" / "1.1.0")]
    with subprocess.Popen(argv, env={}) as process:
        [found] = wait_until(lambda: leftovers(state))
        assert found.pid == process.pid
        process.kill()


def test_kill_tree_ends_descendants_that_dropped_the_mark(tmp_path, marked):
    code = (
        "import subprocess, sys, time; "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], env={}); "
        "time.sleep(300)"
    )
    parent = marked(tmp_path / "state" / "1.1.0", code)
    [grandchild] = wait_until(lambda: psutil.Process(parent.pid).children())
    tree = psutil.Process(parent.pid)
    kill_tree(tree)
    psutil.wait_procs([grandchild], timeout=10)
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
    kill_tree(tree)
    parent.wait(10)
    kill_tree(tree)


def test_interrupts_count_and_give_the_handlers_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        assert not interrupts.stop
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: interrupts.stop)
        assert not interrupts.hurry
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: interrupts.hurry)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_closed_terminal_is_an_interrupt_unless_nohup_asked_otherwise():
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGHUP)
        wait_until(lambda: interrupts.stop)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_pause_ends_early_on_a_signal():
    with Interrupts() as interrupts:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        started = time.monotonic()
        interrupts.pause(30)
        assert time.monotonic() - started < 10
        timer.join()
    assert interrupts.stop
