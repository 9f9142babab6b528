# Processes and files are small and local here; what must not block is the client under test:
# ruff: noqa: ASYNC220, ASYNC222, ASYNC240
"""The collector's process and its client: what happens when NVML hangs, dies or is slow."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from node_agent.collector import CollectorClient, CollectorStartError
from node_agent.host import process_start_ticks
from node_agent.mock_nvml import CONTEXT_BYTES, MockFault, MockFaultKind, write_faults
from node_agent.nvml import Scan

MIB = 1024**2
DEADLINE_S = 0.4


async def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, f"waited {limit_s} s for: {what}"
        await asyncio.sleep(0.02)


async def scan_until(
    client: CollectorClient, condition: Callable[[Scan | None], bool], what: str
) -> Scan | None:
    end_s = time.monotonic() + 30.0
    while True:
        scan = await client.scan()
        if condition(scan):
            return scan
        assert time.monotonic() < end_s, f"waited for: {what}; last: {scan}, {client.node_health}"
        await asyncio.sleep(0.05)


@pytest.fixture
def faults_path(tmp_path: Path) -> Path:
    return tmp_path / "faults.json"


@pytest.fixture
async def client(faults_path: Path) -> AsyncIterator[CollectorClient]:
    client = CollectorClient(
        mock_gpus="P100:4", seed="node", faults_path=faults_path, deadline_s=DEADLINE_S
    )
    await client.start()
    yield client
    write_faults(faults_path, [])
    await client.close()


def hang(gpu: int = 0) -> MockFault:
    return MockFault(MockFaultKind.HANG, gpu)


async def test_a_hang_stops_nobody(faults_path: Path) -> None:
    deadline_s = 2.0
    client = CollectorClient(mock_gpus="P100", faults_path=faults_path, deadline_s=deadline_s)
    await client.start()
    good = await client.scan()
    write_faults(faults_path, [hang()])
    beats_s: list[float] = []

    async def heartbeat() -> None:
        while True:
            beats_s.append(time.monotonic())
            await asyncio.sleep(0.02)

    beating = asyncio.create_task(heartbeat())
    start_s = time.monotonic()
    assert await client.scan() is None
    assert time.monotonic() - start_s >= deadline_s
    for _ in range(3):
        start_s = time.monotonic()
        assert await client.processes([good.facts[0].uuid]) is None
        assert time.monotonic() - start_s < deadline_s / 2, "after a missed request none waits"
    beating.cancel()
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(beats_s)]
    assert max(gaps_s) < deadline_s / 2
    assert client.latest == good
    assert client.age_s >= deadline_s
    write_faults(faults_path, [])
    await client.close()


async def test_a_request_during_a_hang_gives_up_before_its_own_deadline(
    faults_path: Path,
) -> None:
    client = CollectorClient(mock_gpus="P100", faults_path=faults_path, deadline_s=5.0)
    await client.start()
    write_faults(faults_path, [hang()])
    scanning = asyncio.create_task(client.scan())
    await asyncio.sleep(0)
    start_s = time.monotonic()
    assert await client.processes(["GPU-x"]) is None
    assert time.monotonic() - start_s < 3.0
    write_faults(faults_path, [])
    assert await scanning is not None
    await client.close()


async def test_after_three_misses_the_node_is_unhealthy_until_nvml_answers(
    client: CollectorClient, faults_path: Path
) -> None:
    assert await client.scan() is not None
    first_pid = client.pid
    write_faults(faults_path, [hang()])
    for _ in range(3):
        assert client.node_health == ()
        assert await client.scan() is None
    assert client.node_health == ("NVML does not answer",)
    write_faults(faults_path, [])
    scan = await scan_until(client, lambda scan: scan is not None, "NVML answers again")
    assert client.node_health == ()
    assert len(scan.samples) == 4
    assert client.pid == first_pid, "it came back by itself, so there was no need to end it"


async def test_a_process_that_hangs_for_long_is_replaced(
    client: CollectorClient, faults_path: Path
) -> None:
    first_pid = client.pid
    write_faults(faults_path, [hang()])
    await scan_until(client, lambda _: client.pid != first_pid, "the hanging process is ended")
    assert process_start_ticks(first_pid) is None, "it is ended and reaped before a second starts"
    write_faults(faults_path, [])
    await scan_until(client, lambda scan: scan is not None, "its successor answers")
    assert client.node_health == ()


async def test_there_is_never_a_second_process_beside_one_that_hangs(
    client: CollectorClient,
) -> None:
    """A stopped process takes no SIGTERM, as one in the driver; only SIGKILL ends it."""
    first_pid = client.pid
    os.kill(first_pid, signal.SIGSTOP)

    def is_replaced(_: Scan | None) -> bool:
        if client.pid == first_pid:
            return False
        assert process_start_ticks(first_pid) is None
        return client.pid is not None

    await scan_until(client, is_replaced, "the stopped process is killed and replaced")


async def test_a_slow_nvml_is_still_heard(client: CollectorClient, faults_path: Path) -> None:
    uuid = (await client.scan()).facts[0].uuid
    write_faults(
        faults_path,
        [MockFault(MockFaultKind.SLOW, 0, 0.05), MockFault(MockFaultKind.XID, 0, 79)],
    )
    seen: list[int] = []

    def is_heard(scan: Scan | None) -> bool:
        seen.extend(event.xid for event in scan.xids if event.uuid == uuid) if scan else None
        return scan is not None

    for _ in range(3):
        await scan_until(client, is_heard, "a late scan is taken as an answer")
    assert seen == [79], "an event in a late answer is neither lost nor told twice"
    assert client.node_health == ()


async def test_xids_of_a_scan_that_was_given_up_reach_the_next_one(
    client: CollectorClient, faults_path: Path
) -> None:
    scan = await client.scan()
    write_faults(faults_path, [hang(3), MockFault(MockFaultKind.XID, 0, 31)])
    assert await client.scan() is None
    write_faults(faults_path, [MockFault(MockFaultKind.XID, 0, 31)])
    uuid = scan.facts[0].uuid
    end_s = time.monotonic() + 30
    while await client.processes([uuid]) is None:  # this takes the late scan off the pipe
        assert time.monotonic() < end_s
    assert [event.xid for event in (await client.scan()).xids] == [31]
    assert (await client.scan()).xids == ()


async def test_xids_that_a_process_told_before_it_died_are_not_lost(
    client: CollectorClient, faults_path: Path
) -> None:
    await client.scan()
    write_faults(faults_path, [hang(3), MockFault(MockFaultKind.XID, 0, 31)])
    assert await client.scan() is None
    write_faults(faults_path, [])
    process = client._process
    await wait_until(lambda: bool(process.stdout._buffer), "the late answer")
    process.kill()
    await process.wait()
    scan = await scan_until(client, lambda scan: scan is not None, "a new process answers")
    assert client.pid != process.pid
    assert [event.xid for event in scan.xids] == [31]


async def test_a_killed_process_is_replaced(client: CollectorClient) -> None:
    before = await client.scan()
    first_pid = client.pid
    os.kill(first_pid, signal.SIGKILL)
    after = await scan_until(
        client, lambda scan: scan is not None and client.pid != first_pid, "a new process answers"
    )
    assert after.facts == before.facts, "the mock UUIDs are the same after a restart"


async def test_a_process_that_cannot_start_says_so() -> None:
    client = CollectorClient(mock_gpus="P100:none")
    with pytest.raises(CollectorStartError, match="ended with 2"):
        await client.start()
    assert await client.scan() is None
    await client.close()


async def test_a_process_that_cannot_be_spawned_is_tried_again() -> None:
    client = CollectorClient(mock_gpus="P100")
    argv, client._argv = client._argv, ["/no/such/program"]
    with pytest.raises(CollectorStartError, match="No such file"):
        await client.start()
    assert await client.scan() is None
    assert client.node_health == ("NVML does not answer",)
    client._argv = argv
    await scan_until(client, lambda scan: scan is not None, "the process is there at last")
    assert client.node_health == ()
    await client.close()


async def test_after_close_nothing_holds_nvml(client: CollectorClient) -> None:
    pid = client.pid
    await client.close()
    assert process_start_ticks(pid) is None
    assert await client.scan() is None
    assert client.pid is None
    await client.start()
    assert await client.scan() is not None


async def test_another_driver_gets_a_fresh_process_image(tmp_path: Path, faults_path: Path) -> None:
    """A process keeps the library that it has loaded, so the collector starts itself anew."""
    driver = tmp_path / "version"
    driver.write_text("550")
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from node_agent import collector_child\n"
        f"collector_child.DRIVER_VERSION_PATH = Path({str(driver)!r})\n"
        "sys.exit(collector_child.main())\n"
    )
    client = CollectorClient()
    client._argv = [sys.executable, "-c", code, "--mock=P100", f"--faults={faults_path}"]
    await client.start()
    pid = client.pid
    write_faults(faults_path, [MockFault(MockFaultKind.XID, 0, 79)])
    assert (await client.scan()).samples[0].health != ()
    write_faults(faults_path, [])
    assert (await client.scan()).samples[0].health != ()
    driver.write_text("560")
    assert (await client.scan()).samples[0].health == (), "what the old image knew is gone"
    assert client.pid == pid
    await client.close()


async def test_a_bad_faults_file_is_a_reason_and_no_crash(
    client: CollectorClient, faults_path: Path
) -> None:
    faults_path.write_text('{"faults": [{"kind": "lost", "gpu": 9}]}')
    scan = await client.scan()
    (reason,) = scan.node_health
    assert str(faults_path) in reason
    assert "faults[0].gpu: 9 is no index below 4" in reason
    assert client.node_health == (reason,)
    assert [s.health for s in scan.samples] == [()] * 4
    faults_path.unlink()
    assert (await client.scan()).node_health == ()


@pytest.mark.parametrize("is_hanging", [False, True])
async def test_the_process_ends_with_its_parent(tmp_path: Path, is_hanging: bool) -> None:
    faults_path = tmp_path / "faults.json"
    write_faults(faults_path, [hang()] if is_hanging else [])
    code = (
        "import asyncio, sys, os, signal\n"
        "from pathlib import Path\n"
        "from node_agent.collector import CollectorClient\n"
        "async def main():\n"
        "    client = CollectorClient(mock_gpus='P100', faults_path=Path(sys.argv[1]), "
        "deadline_s=0.3)\n"
        "    await client.start()\n"
        "    await client.scan()\n"
        "    print(client.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, str(faults_path)), stdout=asyncio.subprocess.PIPE
    )
    pid = int(await parent.stdout.readline())
    await parent.wait()
    await wait_until(lambda: not is_running(pid), "the orphan ends")


def is_running(pid: int) -> bool:
    """Whether a process that is not ours is alive; nobody may reap it in a container."""
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


BUSY = (
    "import sys, time\n"
    "held = bytearray(64 * 1024 * 1024)\n"
    "print(flush=True)\n"
    "end = time.monotonic() + float(sys.argv[1])\n"
    "while time.monotonic() < end: pass\n"
    "input()\n"
)


async def test_a_real_process_on_a_mock_gpu_shows_memory_and_utilization(
    client: CollectorClient,
) -> None:
    idle = await client.scan()
    uuids = [facts.uuid for facts in idle.facts]
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY, "60"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": f"{uuids[1]},{uuids[2]}"},
    )
    try:
        process.stdout.readline()
        scan = await scan_until(
            client,
            lambda scan: scan is not None and (scan.samples[1].gpu_utilization_pct or 0) > 5,
            "utilization of the busy process",
        )
        for sample in scan.samples[1:3]:
            (holder,) = sample.processes
            assert holder.pid == process.pid
            # Half of at least 64 MiB each, and the context.
            assert 32 * MIB <= holder.memory_bytes - CONTEXT_BYTES < 64 * MIB
            assert sample.memory_used_bytes == holder.memory_bytes
            assert sample.gpu_utilization_pct <= 60, "one core on two GPUs is 50 % of each"
            assert sample.power_w > idle.samples[1].power_w
            assert sample.sm_clock_mhz > idle.samples[1].sm_clock_mhz
            assert sample.throttle_reasons == ()
        for sample in (scan.samples[0], scan.samples[3]):
            assert sample.processes == ()
            assert (sample.memory_used_bytes, sample.gpu_utilization_pct) == (0, 0)
    finally:
        process.kill()
        process.communicate()
    assert await client.processes(uuids) == dict.fromkeys(uuids, ())


async def test_a_zombie_holds_no_gpu(client: CollectorClient) -> None:
    uuid = (await client.scan()).facts[0].uuid
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid})
    try:
        await scan_until(client, lambda scan: scan.samples[0].processes != (), "sleep is seen")
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert await client.processes([uuid]) == {uuid: ()}
    finally:
        process.kill()
        process.wait()


async def test_a_process_that_changes_its_program_leaves_the_gpu(client: CollectorClient) -> None:
    uuid = (await client.scan()).facts[0].uuid
    process = subprocess.Popen(
        ["sh", "-c", "read _; exec env -u CUDA_VISIBLE_DEVICES sleep 60"],
        stdin=subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid},
    )
    try:
        await scan_until(client, lambda scan: scan.samples[0].processes != (), "the shell is seen")
        process.stdin.write(b"\n")
        process.stdin.flush()
        await scan_until(client, lambda scan: scan.samples[0].processes == (), "it left the GPU")
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


async def test_two_agents_of_one_machine_have_different_gpus() -> None:
    uuids: set[str] = set()
    for seed in ("a", "b"):
        client = CollectorClient(mock_gpus="P100:2,T4", seed=seed)
        await client.start()
        scan = await client.scan()
        await client.close()
        assert [facts.gpu_type for facts in scan.facts] == ["P100", "P100", "T4"]
        uuids.update(facts.uuid for facts in scan.facts)
    assert len(uuids) == 6
