"""Faults files, and how the figures of a mock card follow its processes."""

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from node_agent.gpu_profiles import parse_mock_gpus
from node_agent.mock_faults import FaultFile, parse_faults
from node_agent.mock_nvml import MockFault, MockFaultKind, MockNvml, write_faults
from node_agent.mock_processes import MockProcessTable
from node_agent.nvml import NvmlCollector


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def make_mock(clock: Clock, gpus: str, faults_path: Path | None = None) -> MockNvml:
    mock = MockNvml(
        parse_mock_gpus(gpus),
        "seed",
        monotonic=clock.monotonic,
        sleep=clock.sleep,
        faults_path=faults_path,
    )
    mock.nvmlInit()
    return mock


ALL_FAULTS = [
    MockFault(MockFaultKind.LOST, 0),
    MockFault(MockFaultKind.FALLEN_OFF_BUS, 1, after_calls=7),
    MockFault(MockFaultKind.XID, 0, 79),
    MockFault(MockFaultKind.ECC_UNCORRECTED, 0, 3),
    MockFault(MockFaultKind.DRIVER_MISMATCH),
    MockFault(MockFaultKind.THROTTLE, 1, "hw_slowdown"),
    MockFault(MockFaultKind.SLOW, 1, 0.5),
    MockFault(MockFaultKind.HANG, 1),
    MockFault(MockFaultKind.NOT_SUPPORTED, None, "power"),
]


def test_faults_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    write_faults(path, ALL_FAULTS)
    assert parse_faults(path.read_text(), gpu_count=2) == tuple(ALL_FAULTS)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("[]", "expected"),
        ('{"faults": {}}', "expected"),
        ('{"faults": ["lost"]}', r"faults\[0\]: expected an object"),
        ('{"faults": [{"kind": "broken"}]}', r"faults\[0\].kind: 'broken' is none of lost,"),
        ('{"faults": [{}]}', "kind: None is none of"),
        ('{"faults": [{"kind": "lost", "gpus": 1}]}', r"unknown keys \['gpus'\]"),
        ('{"faults": [{"kind": "lost"}, {"kind": "lost", "gpu": 2}]}', r"faults\[1\].gpu: 2"),
        ('{"faults": [{"kind": "lost", "gpu": -1}]}', "gpu: -1 is no index"),
        ('{"faults": [{"kind": "lost", "gpu": true}]}', "gpu: True is no index"),
        ('{"faults": [{"kind": "lost", "value": 3}]}', "lost takes no value, not 3"),
        ('{"faults": [{"kind": "xid", "gpu": 0}]}', "xid takes a whole number above 0, not None"),
        ('{"faults": [{"kind": "xid", "value": "79"}]}', "not '79'"),
        ('{"faults": [{"kind": "slow", "value": -1}]}', "slow takes seconds, not -1"),
        ('{"faults": [{"kind": "slow", "value": "1s"}]}', "slow takes seconds"),
        ('{"faults": [{"kind": "throttle", "value": "hot"}]}', "takes one of gpu_idle,"),
        ('{"faults": [{"kind": "not_supported", "value": "all"}]}', "takes one of clocks,"),
        ('{"faults": [{"kind": "lost", "after_calls": -3}]}', "after_calls: -3"),
        ("{", "Expecting property name"),
    ],
)
def test_a_bad_faults_file(document: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_faults(document, gpu_count=2)


def test_a_file_that_is_no_text_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_bytes(b"\xff\xfe")
    (problem,) = FaultFile(path, 1).problems()
    assert "mock faults file" in problem
    assert "utf-8" in problem


def test_a_fault_counts_its_calls_from_when_it_was_read(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    faults = FaultFile(path, 2)
    for _ in range(10):
        faults.count_call(0)
    lost = MockFault(MockFaultKind.LOST, 0, after_calls=2)
    write_faults(path, [lost])
    assert faults.of_gpu(0, MockFaultKind.LOST) == []
    faults.count_call(0)
    faults.count_call(1)
    # Another fault in the file does not start the count of this one anew.
    write_faults(path, [lost, MockFault(MockFaultKind.HANG, 1)])
    faults.count_call(0)
    assert faults.of_gpu(0, MockFaultKind.LOST) == [lost]
    assert faults.of_gpu(1, MockFaultKind.LOST) == []
    path.unlink()
    assert faults.of_gpu(0, MockFaultKind.LOST) == []


def test_an_xid_comes_once_for_each_time_that_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    faults = FaultFile(path, 1)
    xid = MockFault(MockFaultKind.XID, 0, 79)
    write_faults(path, [xid])
    assert [faults.take_xid(0), faults.take_xid(0)] == [79, None]
    write_faults(path, [xid, MockFault(MockFaultKind.XID, 0, 31)])
    assert [faults.take_xid(0), faults.take_xid(0)] == [31, None]
    write_faults(path, [])
    assert faults.take_xid(0) is None
    write_faults(path, [xid])
    assert faults.take_xid(0) == 79


def test_slow_and_hang_take_their_time(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "faults.json"
    mock = make_mock(clock, "P100:2", path)
    write_faults(path, [MockFault(MockFaultKind.SLOW, 1, 0.5)])
    first, second = (mock.nvmlDeviceGetHandleByIndex(index) for index in (0, 1))
    assert clock.slept_s == [0.5]
    mock.nvmlDeviceGetName(first)
    assert clock.slept_s == [0.5]
    mock.nvmlDeviceGetName(second)
    assert clock.slept_s == [0.5, 0.5]


def test_a_fault_of_all_cards(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    write_faults(path, [MockFault(MockFaultKind.NOT_SUPPORTED, None, "power")])
    scan = NvmlCollector(make_mock(Clock(), "P100:3", path)).scan()
    assert [sample.power_w for sample in scan.samples] == [None] * 3


def test_json_of_a_fault_is_as_documented(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    write_faults(path, [MockFault(MockFaultKind.XID, 0, 79, after_calls=5)])
    assert json.loads(path.read_text()) == {
        "faults": [{"kind": "xid", "gpu": 0, "value": 79, "after_calls": 5}]
    }


def test_temperature_follows_power_slowly() -> None:
    clock = Clock()
    mock = make_mock(clock, "P100")
    device = mock.nvmlDeviceGetHandleByIndex(0)
    idle_c = mock.nvmlDeviceGetTemperature(device, 0)
    assert 30 <= idle_c <= 40
    device.temperature_c = 70.0  # as after a job
    clock.now_s += 1.0
    soon_c = mock.nvmlDeviceGetTemperature(device, 0)
    assert 65 <= soon_c < 70
    clock.now_s += 200.0
    assert mock.nvmlDeviceGetTemperature(device, 0) == idle_c


def test_memory_v1_and_v2_of_an_idle_card() -> None:
    mock = make_mock(Clock(), "P100")
    device = mock.nvmlDeviceGetHandleByIndex(0)
    v1 = mock.nvmlDeviceGetMemoryInfo(device)
    v2 = mock.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2)
    assert v2.used == 0
    assert v1.used == v2.reserved
    assert v1.total == v2.total == v1.used + v1.free == v2.used + v2.free + v2.reserved


def test_a_table_without_gpus_reads_proc_without_finding_anything() -> None:
    table = MockProcessTable(frozenset({"GPU-nobody"}), monotonic=Clock().monotonic)
    assert table.holders("GPU-nobody") == ()
    assert table.utilization_pct("GPU-nobody") == 0.0


@contextlib.contextmanager
def late_exec(uuid: str) -> Iterator[Callable[[], int]]:
    """A process that gets its GPU by exec, when the function that is given is called."""
    with subprocess.Popen(
        ["sh", "-c", f"read _; CUDA_VISIBLE_DEVICES={uuid} exec sh -c 'echo; read _'"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:

        def take_gpu() -> int:
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"\n"
            return process.pid

        yield take_gpu
        process.communicate(b"\n", timeout=30)


def test_a_young_process_that_calls_exec_is_found_by_the_next_reading() -> None:
    clock = Clock()
    table = MockProcessTable(frozenset({"GPU-1"}), monotonic=clock.monotonic)
    assert table.holders("GPU-1") == ()
    with late_exec("GPU-1") as take_gpu:
        clock.now_s += 1.0
        assert table.holders("GPU-1") == ()
        pid = take_gpu()
        clock.now_s += 1.0
        assert [holder.pid for holder in table.holders("GPU-1")] == [pid]


def test_an_old_process_that_calls_exec_is_found_before_long() -> None:
    clock = Clock()
    table = MockProcessTable(frozenset({"GPU-1"}), monotonic=clock.monotonic)
    with late_exec("GPU-1") as take_gpu:
        assert table.holders("GPU-1") == ()
        pid = take_gpu()
        seen = []
        for _ in range(10):
            clock.now_s += 1.0
            seen = [holder.pid for holder in table.holders("GPU-1")] or seen
        assert seen == [pid]
