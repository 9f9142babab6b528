"""A state folder without room takes the node out of service, and spoils nothing for later."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from node_agent import supervisor
from node_agent.collector import CollectorClient
from node_agent.config import parse_args
from node_agent.inventory import Inventory
from node_agent.ports import PortPool
from node_agent.scan import Scan
from node_agent.spawning import Spawner
from node_agent.telemetry import AgentTelemetry, state_folder_health
from protos.messages import GpuFacts, HostSample

MIB = 1 << 20


@pytest.mark.parametrize(
    ("free_mib", "total_mib", "is_healthy"),
    [(100, 100_000, True), (63, 100_000, False), (1, 8, True), (0, 8, False), (64, 2_000, True)],
)
def test_room_for_new_jobs(free_mib: int, total_mib: int, is_healthy: bool) -> None:
    host = HostSample(
        disk_used_bytes=(total_mib - free_mib) * MIB, disk_total_bytes=total_mib * MIB
    )
    reasons = state_folder_health(host, is_writable=True, free_files=None)
    assert (reasons == ()) is is_healthy
    assert all(f"{free_mib}.0 MiB free" in reason for reason in reasons)


def test_a_folder_that_cannot_be_used() -> None:
    def reason(host: HostSample, *, is_writable: bool, free_files: int | None) -> str:
        (text,) = state_folder_health(host, is_writable=is_writable, free_files=free_files)
        return text

    there = HostSample(disk_used_bytes=0, disk_total_bytes=MIB)
    assert "gone" in reason(HostSample(), is_writable=True, free_files=None)
    assert "written" in reason(there, is_writable=False, free_files=None)
    assert "999 more files" in reason(there, is_writable=True, free_files=999)
    assert state_folder_health(there, is_writable=True, free_files=1000) == ()


def test_the_reason_comes_and_goes_with_the_folder(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    config = parse_args(["--name", "n", "--state-dir", str(state_dir)])
    telemetry = AgentTelemetry(
        config, CollectorClient(), Inventory(state_dir, "b"), version="1", sleep=asyncio.sleep
    )
    assert telemetry.sample().node_health == ("the agent's state folder is gone",)
    state_dir.mkdir()
    assert telemetry.sample().node_health == ()


async def test_an_agent_without_nvml_offers_what_was_there_in_this_boot(tmp_path: Path) -> None:
    config = parse_args(["--name", "n", "--state-dir", str(tmp_path)])
    gpus = (GpuFacts("GPU-a", 0, "Tesla P100", "P100", "0000:01:00.0", memory_bytes=1),)
    Inventory(tmp_path, "this boot").write(gpus)
    for boot_id, expected in (("this boot", gpus), ("another boot", ())):
        telemetry = AgentTelemetry(
            config,
            CollectorClient(),
            Inventory(tmp_path, boot_id),
            version="1",
            sleep=asyncio.sleep,
        )
        await telemetry.scan_once()
        assert telemetry.facts().gpus == expected
        assert telemetry.sample().node_health == ("NVML does not answer",)


async def test_gpus_that_are_gone_are_not_offered_any_more(tmp_path: Path) -> None:
    class Healthy(CollectorClient):
        async def scan(self) -> Scan | None:
            return Scan(note="NVML reports no GPU")

    config = parse_args(["--name", "n", "--state-dir", str(tmp_path)])
    inventory = Inventory(tmp_path, "b")
    inventory.write((GpuFacts("GPU-a", 0, "Tesla P100", "P100", "0000:01:00.0"),))
    telemetry = AgentTelemetry(config, Healthy(), inventory, version="1", sleep=asyncio.sleep)
    await telemetry.scan_once()
    assert telemetry.facts().gpus == ()


@pytest.mark.parametrize("content", ["", "[]", '{"gpus": [{"new": 1}]}', '{"gpus": []}'])
def test_an_inventory_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "gpus.json").write_text(content)
    assert Inventory(tmp_path, "b").read() == ()


def spawner(state_dir: Path) -> Spawner:
    return Spawner(
        state_dir,
        boot_id="b",
        log_limit_bytes=1 << 20,
        base_env=os.environ,
        ports=PortPool("n", time.monotonic),
        now=time.time,
    )


def test_the_compiled_supervisor_is_made_anew_only_when_it_is_not_whole(tmp_path: Path) -> None:
    spawner(tmp_path).prepare()
    (compiled,) = tmp_path.glob("supervisor-*.pyc")
    whole = compiled.read_bytes()
    made = compiled.stat().st_ino
    spawner(tmp_path).prepare()
    assert compiled.stat().st_ino == made
    compiled.write_bytes(whole[: len(whole) // 2])
    spawner(tmp_path).prepare()
    assert compiled.read_bytes() == whole


def test_the_source_is_run_where_nothing_can_be_compiled(tmp_path: Path) -> None:
    spawner(tmp_path).prepare()
    (compiled,) = tmp_path.glob("supervisor-*.pyc")
    compiled.unlink()
    compiled.with_suffix(".new").symlink_to("/dev/full")  # py_compile writes no such target
    prepared = spawner(tmp_path)
    prepared.prepare()
    assert prepared._program == Path(supervisor.__file__)
    assert not compiled.exists()
