"""Readings of the host, and the identity of processes."""

import os
import signal
import subprocess
import uuid
from pathlib import Path

import psutil
import pytest

from node_agent.host import (
    HostSampler,
    ProcessIdentity,
    boot_id,
    host_facts,
    process_start_ticks,
)


def test_facts() -> None:
    facts = host_facts()
    assert facts.cpus == len(os.sched_getaffinity(0))
    assert facts.memory_bytes == psutil.virtual_memory().total
    assert facts.hostname
    assert "Linux" in facts.os


def test_cpus_are_those_of_the_affinity_mask() -> None:
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mask)})
        assert host_facts().cpus == 1
    finally:
        os.sched_setaffinity(0, mask)


def test_sample(tmp_path: Path) -> None:
    sample = HostSampler(tmp_path).sample()
    assert 0.0 <= sample.cpu_utilization_pct <= 100.0
    assert 0 < sample.memory_used_bytes < sample.memory_total_bytes
    assert 0 < sample.disk_used_bytes <= sample.disk_total_bytes
    assert sample.load_1min >= 0.0


def test_a_state_folder_that_is_gone(tmp_path: Path) -> None:
    sample = HostSampler(tmp_path / "gone").sample()
    assert (sample.disk_used_bytes, sample.disk_total_bytes) == (None, None)


def test_boot_id_is_a_uuid() -> None:
    assert str(uuid.UUID(boot_id())) == boot_id()


@pytest.mark.parametrize("name", ["sleep", "a) S 1 2 (b", "\u00fc ) R 3"])
def test_start_ticks_whatever_the_command_is_called(tmp_path: Path, name: str) -> None:
    program = tmp_path / name
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as process:
        expected_s = psutil.Process(process.pid).create_time() - psutil.boot_time()
        ticks = process_start_ticks(process.pid)
        process.kill()
    assert ticks is not None
    assert ticks / os.sysconf("SC_CLK_TCK") == pytest.approx(expected_s, abs=1.5)


def test_start_ticks_of_nobody() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    assert process_start_ticks(process.pid) is None


def test_an_identity_is_that_of_one_process_only() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        identity = ProcessIdentity.of(process.pid)
        assert identity is not None
        assert identity.exists()
        earlier = ProcessIdentity(identity.boot_id, identity.pid, identity.start_ticks - 1)
        other_boot = ProcessIdentity("x", identity.pid, identity.start_ticks)
        for stranger in (earlier, other_boot):
            assert not stranger.exists()
            assert not stranger.send_signal(signal.SIGKILL)
        assert process.poll() is None, "a process that only took over the pid is never signalled"
        assert identity.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == -signal.SIGTERM
    assert not identity.exists()
    assert not identity.send_signal(signal.SIGKILL)
    assert ProcessIdentity.of(process.pid) is None
