"""The same assertions on the mock NVML and on a real shared library behind the real pynvml.

Both sides run as they run in production: in the collector's own process. The library is compiled
from `fake_nvml.c`; without gcc those cases are skipped.
"""

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from node_agent.mock_nvml import MockFault, MockFaultKind, write_faults
from node_agent.nvml import Scan
from node_agent.scan import processes_from_json, scan_from_json

SOURCE = Path(__file__).with_name("fake_nvml.c")
NVML_NOT_SUPPORTED, NVML_GPU_IS_LOST, NVML_MISMATCH, NVML_UNKNOWN = 3, 15, 18, 999
NVML_GPU_NOT_FOUND = 28
DEVICES = ["device Tesla_P100-PCIE-16GB 16280 250", "device Tesla_T4 15109 70"]
MIB = 1024**2


class Child:
    """The collector's process, asked over its pipes."""

    def __init__(self, args: list[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "node_agent.collector_child", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
            bufsize=0,
        )
        self.last_id = 0
        assert self._read() == {"id": 0}

    def _read(self) -> dict[str, Any]:
        ready, _, _ = select.select([self.process.stdout], [], [], 30)
        assert ready, "the collector does not answer"
        return json.loads(self.process.stdout.readline())

    def ask(self, **request: Any) -> dict[str, Any]:
        self.last_id += 1
        request["id"] = self.last_id
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        answer = self._read()
        assert answer.pop("id") == self.last_id
        return answer

    def scan(self) -> Scan:
        return scan_from_json(self.ask(op="scan")["scan"])

    def processes(self, *uuids: str) -> dict[str, Any]:
        return processes_from_json(self.ask(op="processes", uuids=list(uuids))["processes"])

    def close(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(timeout=30) == 0
        self.process.stdout.close()


class MockBackend:
    """Two mock cards; faults by the faults file, processes by running them."""

    def __init__(self, folder: Path) -> None:
        self._faults = folder / "faults.json"
        self.start = lambda: Child(
            ["--mock=P100,T4", "--seed=test", f"--faults={self._faults}"], env={}
        )

    def set_faults(self, *faults: MockFault) -> None:
        write_faults(self._faults, faults)

    @contextlib.contextmanager
    def process_on(self, uuid: str, _index: int) -> Iterator[int]:
        process = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid},
        )
        with process:
            process.stdout.readline()
            yield process.pid
            process.communicate(b"\n", timeout=30)


class LibraryBackend:
    """Two cards of the C library; what it answers is in its control file."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._control = folder / "control"
        self._statements: list[str] = []
        self.set_statements()
        env = {"LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML_CONTROL": str(self._control)}
        self.start = lambda: Child([], env)

    def set_statements(self, *statements: str) -> None:
        self._statements = list(statements)
        aside = self._control.with_suffix(".new")
        aside.write_text("\n".join([*DEVICES, *statements]) + "\n")
        aside.replace(self._control)

    def set_faults(self, *faults: MockFault) -> None:
        self.set_statements(*(self._statement(fault) for fault in faults))

    @contextlib.contextmanager
    def process_on(self, _uuid: str, index: int) -> Iterator[int]:
        before = self._statements
        self.set_statements(*before, f"process {index} 4242 {700 * MIB}")
        yield 4242
        self.set_statements(*before)

    @staticmethod
    def _statement(fault: MockFault) -> str:
        match fault.kind:
            case MockFaultKind.LOST:
                return f"fault {fault.gpu} {NVML_GPU_IS_LOST} {fault.after_calls}"
            case MockFaultKind.FALLEN_OFF_BUS:
                return f"hide {fault.gpu}"
            case MockFaultKind.XID:
                return f"xid {fault.gpu} {fault.value}"
            case MockFaultKind.ECC_UNCORRECTED:
                return f"ecc {fault.gpu} {fault.value}"
            case MockFaultKind.DRIVER_MISMATCH:
                return f"node {NVML_MISMATCH}"
            case MockFaultKind.THROTTLE:
                bits = {"hw_thermal_slowdown": 0x40, "sw_power_cap": 0x4}
                return f"throttle {fault.gpu} {bits[str(fault.value)]}"
            case MockFaultKind.NOT_SUPPORTED:
                return f"field {fault.gpu} {fault.value} {NVML_NOT_SUPPORTED}"
            case _:
                raise AssertionError(f"the C library cannot simulate {fault.kind}")


@pytest.fixture(scope="session")
def build_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles the C library, with definitions for drivers of another age."""

    def build(*definitions: str) -> Path:
        if shutil.which("gcc") is None:
            pytest.skip("gcc is not installed: no library with NVML's symbols can be built")
        library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
        flags = [f"-D{name}" for name in definitions]
        subprocess.run(
            ["gcc", "-O1", "-shared", "-fPIC", *flags, "-o", library, SOURCE], check=True
        )
        return library

    return build


@pytest.fixture(scope="session")
def modern_library(build_library: Callable[..., Path]) -> Path:
    return build_library()


@pytest.fixture(params=["mock", "library"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> MockBackend | LibraryBackend:
    if request.param == "mock":
        return MockBackend(tmp_path)
    return LibraryBackend(tmp_path, request.getfixturevalue("modern_library"))


@pytest.fixture
def child(backend: MockBackend | LibraryBackend) -> Iterator[Child]:
    with contextlib.closing(backend.start()) as child:
        yield child


def test_healthy_cards(child: Child) -> None:
    scan = child.scan()
    assert (scan.driver_version, scan.cuda_version) == ("550.54.15", "12.4")
    assert scan.node_health == ()
    assert [(f.index, f.name, f.gpu_type, f.power_limit_w) for f in scan.facts] == [
        (0, "Tesla P100-PCIE-16GB", "P100", 250.0),
        (1, "Tesla T4", "T4", 70.0),
    ]
    assert [f.memory_bytes for f in scan.facts] == [16280 * MIB, 15109 * MIB]
    assert [f.pci_bus_id for f in scan.facts] == ["00000000:01:00.0", "00000000:02:00.0"]
    assert [s.uuid for s in scan.samples] == [f.uuid for f in scan.facts]
    for sample in scan.samples:
        assert not sample.lost
        assert (sample.health, sample.warnings, sample.processes) == ((), (), ())
        assert sample.memory_used_bytes == 0, "the driver's reserve is not used memory"
        assert sample.gpu_utilization_pct == 0
        assert sample.throttle_reasons == ("gpu_idle",)
        assert (sample.ecc_corrected, sample.ecc_uncorrected) == (0, 0)
        for value in (sample.temperature_c, sample.power_w, sample.sm_clock_mhz):
            assert value is not None
            assert value > 0


def test_a_process_shows_with_its_memory(backend: Any, child: Child) -> None:
    uuid = child.scan().facts[1].uuid
    with backend.process_on(uuid, 1) as pid:
        free, busy = child.scan().samples
        assert free.processes == ()
        (process,) = busy.processes
        assert process.pid == pid
        assert process.memory_bytes > 0
        assert busy.memory_used_bytes == process.memory_bytes
        assert "gpu_idle" not in busy.throttle_reasons
        assert child.processes(uuid) == {uuid: (process,)}
    assert child.scan().samples[1].processes == ()


@pytest.mark.parametrize(
    ("field", "attributes"),
    [
        ("power", ["power_w", "power_limit_w"]),
        ("ecc", ["ecc_corrected", "ecc_uncorrected"]),
        ("memory", ["memory_used_bytes", "memory_total_bytes"]),
        ("utilization", ["gpu_utilization_pct", "memory_utilization_pct"]),
        ("temperature", ["temperature_c"]),
        ("clocks", ["sm_clock_mhz", "memory_clock_mhz"]),
        ("throttle", ["throttle_reasons"]),
        ("processes", ["processes"]),
        ("events", []),
    ],
)
def test_a_field_that_is_not_supported_is_absent(
    backend: Any, child: Child, field: str, attributes: list[str]
) -> None:
    backend.set_faults(MockFault(MockFaultKind.NOT_SUPPORTED, 0, field))
    for scan in (child.scan(), child.scan()):
        without, other = scan.samples
        assert [getattr(without, name) for name in attributes] == [None] * len(attributes)
        assert None not in [getattr(other, name) for name in attributes]
        assert (without.lost, without.health, without.warnings) == (False, (), ())


@pytest.mark.parametrize("after_calls", [0, 1, 4, 12])
def test_a_card_lost_at_any_point_of_a_scan(backend: Any, child: Child, after_calls: int) -> None:
    facts = child.scan().facts
    backend.set_faults(MockFault(MockFaultKind.LOST, 0, after_calls=after_calls))
    scan = child.scan()
    lost, other = scan.samples
    assert scan.facts == facts
    assert lost.uuid == facts[0].uuid
    assert lost.lost
    assert [lost.power_w, lost.memory_used_bytes, lost.processes] == [None, None, None]
    assert lost.health == ("GPU is lost",)
    assert not other.lost
    assert other.power_w is not None
    assert child.scan().samples[0] == lost
    assert child.processes(*(f.uuid for f in facts)) == {facts[0].uuid: None, facts[1].uuid: ()}
    backend.set_faults()
    assert [s.health for s in child.scan().samples] == [(), ()]
    assert child.processes(facts[0].uuid) == {facts[0].uuid: ()}


def test_a_card_lost_from_the_start_is_a_row_too(backend: Any, child: Child) -> None:
    backend.set_faults(MockFault(MockFaultKind.LOST, 0))
    scan = child.scan()
    assert [s.lost for s in scan.samples] == [True, False]
    assert [f.gpu_type for f in scan.facts] == ["unknown", "T4"]
    backend.set_faults()
    scan = child.scan()
    assert [f.gpu_type for f in scan.facts] == ["P100", "T4"]
    assert not any(s.lost for s in scan.samples)


def test_a_card_that_disappears_is_missed(backend: Any, child: Child) -> None:
    before = child.scan()
    backend.set_faults(MockFault(MockFaultKind.FALLEN_OFF_BUS, 0))
    scan = child.scan()
    by_uuid = {sample.uuid: sample for sample in scan.samples}
    missing, other = (by_uuid[facts.uuid] for facts in before.facts)
    assert (missing.lost, missing.health) == (True, ("gpu missing",))
    assert (other.lost, other.health) == (False, ())
    assert scan.node_health == ()


@pytest.mark.parametrize("is_late", [False, True])
def test_driver_and_library_differ(backend: Any, child: Child, is_late: bool) -> None:
    facts = child.scan().facts if is_late else ()
    backend.set_faults(MockFault(MockFaultKind.DRIVER_MISMATCH))
    scan = child.scan()
    assert scan.samples == ()
    assert scan.facts == facts
    (reason,) = scan.node_health
    assert "versions differ" in reason
    assert "reboot" in reason
    backend.set_faults()
    scan = child.scan()
    assert (len(scan.samples), scan.node_health) == (2, ())


def test_xids_come_once_and_critical_ones_take_the_card_out(backend: Any, child: Child) -> None:
    facts = child.scan().facts
    backend.set_faults(
        MockFault(MockFaultKind.XID, 0, 79),
        MockFault(MockFaultKind.XID, 1, 13),
        MockFault(MockFaultKind.XID, 1, 31),
    )
    scan = child.scan()
    assert sorted((e.uuid, e.xid) for e in scan.xids) == sorted(
        [(facts[0].uuid, 79), (facts[1].uuid, 13), (facts[1].uuid, 31)]
    )
    broken, warned = scan.samples
    assert broken.health == ("Xid 79: GPU has fallen off the bus",)
    assert warned.health == ()
    assert [text.split(":")[0] for text in warned.warnings] == ["Xid 13", "Xid 31"]
    scan = child.scan()
    assert scan.xids == ()
    assert [s.health for s in scan.samples] == [broken.health, ()]
    assert scan.samples[1].warnings == ()


def test_ecc_errors_take_the_card_out(backend: Any, child: Child) -> None:
    backend.set_faults(MockFault(MockFaultKind.ECC_UNCORRECTED, 1, 2))
    good, bad = child.scan().samples
    assert (good.ecc_uncorrected, bad.ecc_uncorrected) == (0, 2)
    assert good.health == ()
    assert bad.health == ("2 uncorrected ECC errors since the driver loaded",)


@pytest.mark.parametrize(
    ("reason", "warnings"),
    [
        ("hw_thermal_slowdown", ("clocks are throttled: hw_thermal_slowdown",)),
        ("sw_power_cap", ()),
    ],
)
def test_thermal_throttling_is_a_warning(
    backend: Any, child: Child, reason: str, warnings: tuple[str, ...]
) -> None:
    backend.set_faults(MockFault(MockFaultKind.THROTTLE, 0, reason))
    sample = child.scan().samples[0]
    assert reason in sample.throttle_reasons
    assert (sample.health, sample.warnings) == ((), warnings)


# What only a real library behind the real pynvml can show.


@pytest.fixture
def library(tmp_path: Path, modern_library: Path) -> LibraryBackend:
    return LibraryBackend(tmp_path, modern_library)


@pytest.mark.parametrize("definitions", [["OLD_DRIVER"], ["OLD_DRIVER", "ANCIENT_DRIVER"]])
def test_old_drivers(
    tmp_path: Path, build_library: Callable[..., Path], definitions: list[str]
) -> None:
    library = LibraryBackend(tmp_path, build_library(*definitions))
    library.set_statements(
        f"process 0 77 {5 * MIB}", f"process 0 78 {2 * MIB}", "grow 0 2", "throttle 1 64"
    )
    with contextlib.closing(library.start()) as child:
        for scan in (child.scan(), child.scan()):
            busy, hot = scan.samples
            assert [(p.pid, p.memory_bytes) for p in busy.processes] == [
                (77, 5 * MIB),
                (78, 2 * MIB),
            ]
            assert busy.memory_used_bytes == 7 * MIB + 300 * MIB, "memory v1 holds the reserve"
            assert hot.throttle_reasons == ("gpu_idle", "hw_thermal_slowdown")
            assert [f.mig_enabled for f in scan.facts] == [None, None]
            assert [(s.health, s.lost) for s in scan.samples] == [((), False)] * 2


def test_the_process_list_grows_between_two_calls(library: LibraryBackend) -> None:
    library.set_statements(f"process 0 77 {MIB}", "grow 0 2")
    with contextlib.closing(library.start()) as child:
        assert [p.pid for p in child.scan().samples[0].processes] == [77]
    library.set_statements(f"process 0 77 {MIB}", "grow 0 1000")
    with contextlib.closing(library.start()) as child:
        sample = child.scan().samples[0]
        assert sample.processes is None
        assert sample.warnings == ("cannot read processes: Insufficient Size",)


def test_strings_that_are_no_clean_text(library: LibraryBackend) -> None:
    name = b"Tesla \xff\xfe P100\x07".hex()
    uuid = b"GPU-\xc3-1\x01".hex()
    library.set_statements(f"name 0 {name}", f"uuid 0 {uuid}", f"uuid 1 {'00' * 8}")
    with contextlib.closing(library.start()) as child:
        scan = child.scan()
        assert scan.facts[0].name == "Tesla \ufffd\ufffd P100"
        assert scan.facts[0].uuid == "GPU-\ufffd-1"
        assert scan.samples[0].health == ()
        assert scan.samples[1].health == ("GPU has no readable UUID",)


def test_a_uuid_ends_at_its_nul(library: LibraryBackend) -> None:
    library.set_statements(f"uuid 0 {b'GPU-a'.hex()}00{b'junk'.hex()}")
    with contextlib.closing(library.start()) as child:
        assert child.scan().facts[0].uuid == "GPU-a"


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("mig 1", "MIG is enabled; not supported yet"),
        ("remap 1 1 0", "row remap pending: reset the GPU (nvidia-smi -r)"),
        ("remap 1 0 1", "row remap failed: the GPU's memory is worn out, replace the GPU"),
        ("recovery 1 2", "GPU asks for recovery: reboot the node"),
        ("recovery 1 99", "GPU asks for recovery: unknown action 99"),
        ("field 1 power 16", "GPU needs a reset (nvidia-smi -r)"),
        ("field 1 events 999", "Xid events cannot be watched: Unknown Error"),
    ],
)
def test_lasting_facts_take_the_card_out(
    library: LibraryBackend, statement: str, reason: str
) -> None:
    library.set_statements(statement)
    with contextlib.closing(library.start()) as child:
        for scan in (child.scan(), child.scan()):
            assert [s.health for s in scan.samples] == [(), (reason,)]


def test_an_unknown_error_costs_one_field_and_only_for_now(library: LibraryBackend) -> None:
    with contextlib.closing(library.start()) as child:
        child.scan()
        library.set_statements(f"field 0 power {NVML_UNKNOWN}")
        sample = child.scan().samples[0]
        assert sample.power_w is None
        assert sample.temperature_c is not None
        assert sample.health == ()
        assert "cannot read power: Unknown Error" in sample.warnings
        library.set_statements()
        assert child.scan().samples[0].power_w == 31.5


def test_a_card_of_which_nothing_can_be_read_is_not_healthy(library: LibraryBackend) -> None:
    with contextlib.closing(library.start()) as child:
        child.scan()
        library.set_statements(f"fault 0 {NVML_UNKNOWN} 0")
        broken, other = child.scan().samples
        assert broken.health == ("NVML cannot read this GPU: Unknown Error",)
        assert other.health == ()


def test_a_card_that_nvml_does_not_find_any_more_is_lost(library: LibraryBackend) -> None:
    with contextlib.closing(library.start()) as child:
        child.scan()
        library.set_statements(f"fault 0 {NVML_GPU_NOT_FOUND} 3")
        lost, other = child.scan().samples
        assert (lost.lost, lost.power_w) == (True, None)
        assert not other.lost


def test_the_xid_of_a_card_that_does_not_answer_any_more(library: LibraryBackend) -> None:
    with contextlib.closing(library.start()) as child:
        uuid = child.scan().facts[0].uuid
        library.set_statements("xid 0 79", f"fault 0 {NVML_GPU_IS_LOST} 0")
        scan = child.scan()
        assert [(event.uuid, event.xid) for event in scan.xids] == [(uuid, 79)]
        assert scan.samples[0].health == ("GPU is lost", "Xid 79: GPU has fallen off the bus")


def test_a_machine_without_nvidia_is_no_sick_node() -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has an NVIDIA driver")
    with contextlib.closing(Child([], env={})) as child:
        scan = child.scan()
        assert (scan.facts, scan.node_health) == ((), ())
        assert scan.note == "no NVIDIA driver on this machine"


def test_topology_is_told_and_may_be_unknown(child: Child, backend: Any) -> None:
    """Two cards behind one switch: they share their whole path."""
    first, second = child.scan().facts
    assert first.near == second.near == (0,)
    backend.set_faults(MockFault(MockFaultKind.NOT_SUPPORTED, 0, "topology"))
    with contextlib.closing(backend.start()) as other:
        assert [facts.near for facts in other.scan().facts] == [(), ()]
