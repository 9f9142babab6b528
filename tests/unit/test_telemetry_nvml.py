"""The collector's rules on fakes of old or odd pynvml modules; no process, no hardware."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest

from node_agent.gpu_profiles import GPU_PROFILES, MIB, gpu_type_of, parse_mock_gpus
from node_agent.mock_nvml import MockNvml, mock_uuids
from node_agent.nvml import NvmlCollector
from node_agent.nvml_api import FaultKind, NvmlApi, NvmlFault, clean_text, why_not_nvidia_ml_py
from node_agent.scan import scan_from_json, scan_to_json


def make_mock(gpus: str = "P100,T4", seed: str = "node") -> MockNvml:
    return MockNvml(parse_mock_gpus(gpus), seed, monotonic=time.monotonic, sleep=lambda _: None)


def raising(code: int) -> Callable[..., Any]:
    def function(*_args: Any, **_kwargs: Any) -> Any:
        raise pynvml.NVMLError(code)

    return function


@pytest.mark.parametrize(
    ("name", "memory_mib", "expected"),
    [
        ("Tesla K80", 11441, "K80"),
        ("Tesla M40", 11448, "M40"),
        ("Tesla M40 24GB", 22939, "M40"),
        ("Tesla P100-PCIE-16GB", 16280, "P100"),
        ("Tesla P100-SXM2-16GB", 16280, "P100"),
        ("Tesla P100-PCIE-12GB", 12198, "P100"),
        ("Tesla V100-SXM2-16GB", 16160, "V100-16GB"),
        ("Tesla V100-PCIE-32GB", 32510, "V100-32GB"),
        ("Tesla V100S-PCIE-32GB", 32510, "V100-32GB"),
        ("Tesla V100-FHHL", 16160, "V100-16GB"),
        ("Tesla T4", 15109, "T4"),
        ("NVIDIA T4", 15360, "T4"),
        ("A100-PCIE-40GB", 40536, "A100-40GB"),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 81920, "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", 81920, "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100"),
        ("NVIDIA H100 PCIe", 81559, "H100"),
        ("NVIDIA H200", 143771, "H200"),
        ("GeForce RTX 3090", 24268, "RTX3090"),
        ("NVIDIA GeForce RTX 3090", 24576, "RTX3090"),
        ("NVIDIA GeForce RTX 4090", 24564, "RTX4090"),
        # Other models whose names begin alike keep their names.
        ("NVIDIA GeForce RTX 3090 Ti", 24564, "NVIDIA_GeForce_RTX_3090_Ti"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, "NVIDIA_GeForce_RTX_4090_Laptop_GPU"),
        ("NVIDIA GH200 480GB", 97871, "NVIDIA_GH200_480GB"),
        ("NVIDIA A100-SXM-64GB", 65536, "NVIDIA_A100-SXM-64GB"),
        ("GRID V100-8C", 8192, "GRID_V100-8C"),
        ("NVIDIA L40S", 46068, "NVIDIA_L40S"),
        ("NVIDIA", None, "NVIDIA"),
        ("", None, "unknown"),
    ],
)
def test_gpu_type_of(name: str, memory_mib: int | None, expected: str) -> None:
    memory_bytes = None if memory_mib is None else memory_mib * MIB
    assert gpu_type_of(name, memory_bytes) == expected


def test_the_size_in_the_name_is_enough() -> None:
    assert gpu_type_of("Tesla V100-SXM2-16GB", None) == "V100-16GB"
    assert gpu_type_of("Tesla V100-FHHL", None) == "Tesla_V100-FHHL"


def test_every_profile_has_the_type_that_its_name_gives() -> None:
    for gpu_type, profile in GPU_PROFILES.items():
        assert gpu_type_of(profile.nvml_name, profile.memory_bytes) == gpu_type


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("P100", ["P100"]),
        ("P100:4", ["P100"] * 4),
        (" p100 : 1 , t4:2 ", ["P100", "T4", "T4"]),
        ("V100-32GB:2,RTX4090", ["V100-32GB", "V100-32GB", "RTX4090"]),
        ("T4:1,P100:1,T4:1", ["T4", "P100", "T4"]),
        ("A100-80GB:64", ["A100-80GB"] * 64),
    ],
)
def test_parse_mock_gpus(text: str, expected: list[str]) -> None:
    assert [profile.gpu_type for profile in parse_mock_gpus(text)] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown GPU type ''"),
        ("P100,", "unknown GPU type ''"),
        (":4", "unknown GPU type ''"),
        ("V100:2", "unknown GPU type 'V100'"),
        ("GTX1080:2", "known: K80, M40, P100, V100-16GB, V100-32GB, T4"),
        ("P100:0", "must be 1 to 64, not '0'"),
        ("P100:", "must be 1 to 64, not ''"),
        ("P100:-1", "must be 1 to 64"),
        ("P100:two", "must be 1 to 64, not 'two'"),
        ("P100:4:2", "must be 1 to 64, not '4:2'"),
        ("P100:1.5", "must be 1 to 64"),
        ("P100:\u0664", "must be 1 to 64"),
        ("P100:999", "at most 64"),
        ("P100:99999", "must be 1 to 64"),
        ("P100;T4", "unknown GPU type 'P100;T4'"),
    ],
)
def test_parse_mock_gpus_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_mock_gpus(text)


def test_mock_uuids_are_stable_and_an_agents_own() -> None:
    profiles = parse_mock_gpus("P100:2")
    assert mock_uuids(profiles, "a") == mock_uuids(profiles, "a")
    assert len({*mock_uuids(profiles, "a"), *mock_uuids(profiles, "b")}) == 4
    assert all(uuid.startswith("GPU-") for uuid in mock_uuids(profiles, "a"))


def test_the_mock_gives_constants_and_errors_but_no_real_function() -> None:
    mock = make_mock()
    assert mock.NVML_ERROR_GPU_IS_LOST == pynvml.NVML_ERROR_GPU_IS_LOST
    assert mock.NVMLError is pynvml.NVMLError
    with pytest.raises(AttributeError, match="nvmlDeviceSetPowerManagementLimit"):
        _ = mock.nvmlDeviceSetPowerManagementLimit


@pytest.mark.parametrize("gpu_type", GPU_PROFILES)
def test_each_profile_as_the_collector_sees_it(gpu_type: str) -> None:
    profile = GPU_PROFILES[gpu_type]
    scan = NvmlCollector(make_mock(gpu_type), mock=True).scan()
    (facts,), (sample,) = scan.facts, scan.samples
    assert (facts.gpu_type, facts.name) == (gpu_type, profile.nvml_name)
    assert facts.memory_bytes == sample.memory_total_bytes == profile.memory_bytes
    assert facts.power_limit_w == sample.power_limit_w == profile.power_limit_w
    assert facts.mig_enabled == (False if profile.has_mig else None)
    assert sample.ecc_uncorrected == (0 if profile.has_ecc else None)
    assert sample.power_w == profile.idle_power_w
    assert sample.sm_clock_mhz == profile.idle_sm_clock_mhz
    assert facts.mock
    assert (sample.health, sample.warnings) == ((), ())


def test_a_scan_survives_json() -> None:
    scan = NvmlCollector(make_mock("P100:2,RTX4090")).scan()
    assert scan_from_json(scan_to_json(scan)) == scan


def test_not_supported_is_remembered_until_nvml_is_opened_again() -> None:
    mock = make_mock("P100")
    calls: list[str] = []

    def not_supported(*_args: Any) -> int:
        calls.append("power")
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    mock.nvmlDeviceGetPowerUsage = not_supported
    collector = NvmlCollector(mock)
    collector.scan()
    collector.scan()
    assert calls == ["power"]
    collector.close()
    collector.scan()
    assert calls == ["power", "power"]


def test_an_ancient_pynvml_lacks_names_and_nothing_crashes() -> None:
    """Only what the first nvidia-ml-py had; no `_v3`, no memory v2, no MIG, no constants."""
    mock = make_mock("P100")
    mock.nvmlInit()
    old = SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=mock.nvmlDeviceGetCount,
        nvmlDeviceGetHandleByIndex=mock.nvmlDeviceGetHandleByIndex,
        nvmlDeviceGetUUID=mock.nvmlDeviceGetUUID,
        nvmlDeviceGetName=mock.nvmlDeviceGetName,
        nvmlDeviceGetMemoryInfo=mock.nvmlDeviceGetMemoryInfo,
        nvmlDeviceGetPowerUsage=mock.nvmlDeviceGetPowerUsage,
    )
    collector = NvmlCollector(old)
    for scan in (collector.scan(), collector.scan()):
        (facts,), (sample,) = scan.facts, scan.samples
        assert facts.gpu_type == "P100"
        assert sample.power_w == 26.0
        assert (sample.memory_used_bytes or 0) > 0, "memory v1 holds the reserve"
        assert (sample.temperature_c, sample.processes, sample.ecc_corrected) == (None, None, None)
        assert (sample.lost, sample.health, sample.warnings) == (False, (), ())
        assert (scan.driver_version, scan.cuda_version, scan.node_health) == (None, None, ())


def test_a_library_mismatch_error_is_no_nvml_error_and_is_caught() -> None:
    def mismatch(_handle: Any) -> Any:
        raise pynvml.NVMLLibraryMismatchError("use a versioned function")

    mock = make_mock("P100")
    mock.nvmlDeviceGetMigMode = mismatch
    (sample,) = NvmlCollector(mock).scan().samples
    assert (sample.lost, sample.warnings) == (False, ())


@pytest.mark.parametrize(
    ("code", "has_driver", "health", "note"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, False, [], "no NVIDIA driver on this machine"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, True, ["libnvidia-ml.so.1 is not found"], ""),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, False, ["kernel module is not loaded"], ""),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, True, ["reboot the node"], ""),
        (pynvml.NVML_ERROR_UNKNOWN, True, ["Unknown Error; inside a container"], ""),
    ],
)
def test_nvml_that_does_not_open(
    tmp_path: Path, code: int, has_driver: bool, health: list[str], note: str
) -> None:
    path = tmp_path / "version"
    if has_driver:
        path.write_text("550.54.15")
    mock = make_mock()
    mock.nvmlInit = raising(code)
    scan = NvmlCollector(mock, driver_version_path=path).scan()
    assert (scan.facts, scan.samples, scan.note) == ((), (), note)
    assert len(scan.node_health) == len(health)
    for text, part in zip(scan.node_health, health, strict=True):
        assert part in text


def test_nvml_that_was_shut_down_meanwhile_is_opened_again() -> None:
    mock = make_mock()
    collector = NvmlCollector(mock)
    assert collector.scan().node_health == ()
    mock.nvmlShutdown()
    assert "Uninitialized" in collector.scan().node_health[0]
    assert collector.scan().node_health == ()


def with_xids(mock: MockNvml, *xids: int) -> None:
    """Lets the mock have these events of its first card, each once, then none."""
    waiting = list(xids)

    def wait(_event_set: Any, _timeout_ms: int) -> Any:
        if not waiting:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(
            device=mock.nvmlDeviceGetHandleByIndex(0),
            eventType=pynvml.nvmlEventTypeXidCriticalError,
            eventData=waiting.pop(0),
        )

    mock.nvmlEventSetWait = wait


def test_xids_of_a_scan_that_fails_are_told_and_critical_ones_stay() -> None:
    mock = make_mock()
    collector = NvmlCollector(mock)
    collector.scan()
    with_xids(mock, 31, 79)
    works = mock.nvmlDeviceGetMemoryInfo
    mock.nvmlDeviceGetMemoryInfo = raising(pynvml.NVML_ERROR_UNINITIALIZED)
    failed = collector.scan()
    assert failed.samples == ()
    assert [event.xid for event in failed.xids] == [31, 79]
    mock.nvmlDeviceGetMemoryInfo = works
    again = collector.scan()
    assert again.xids == ()
    assert again.samples[0].health == ("Xid 79: GPU has fallen off the bus",)


def test_xids_that_wait_while_nvml_goes_are_told_by_the_next_scan() -> None:
    mock = make_mock()
    collector = NvmlCollector(mock)
    uuid = collector.scan().facts[0].uuid
    with_xids(mock, 48)
    works = mock.nvmlDeviceGetCount
    mock.nvmlDeviceGetCount = raising(pynvml.NVML_ERROR_UNKNOWN)
    assert collector.processes([uuid]) == {uuid: None}
    mock.nvmlDeviceGetCount = works
    assert [event.xid for event in collector.scan().xids] == [48]


def test_no_gpu_is_noted() -> None:
    mock = make_mock()
    mock.nvmlDeviceGetCount = lambda: 0
    assert NvmlCollector(mock).scan().note == "NVML reports no GPU"


def test_processes_without_a_working_nvml_are_unknown() -> None:
    mock = make_mock()
    mock.nvmlInit = raising(pynvml.NVML_ERROR_UNKNOWN)
    assert NvmlCollector(mock).processes(["GPU-a"]) == {"GPU-a": None}


def test_a_process_of_both_kinds_is_listed_once() -> None:
    def processes(**by_pid: int | None) -> Callable[[Any], list[SimpleNamespace]]:
        return lambda _handle: [
            SimpleNamespace(pid=int(pid[1:]), usedGpuMemory=memory)
            for pid, memory in by_pid.items()
        ]

    api = NvmlApi(
        SimpleNamespace(
            nvmlDeviceGetComputeRunningProcesses_v3=processes(p7=100, p8=None),
            nvmlDeviceGetGraphicsRunningProcesses_v3=processes(p7=None, p8=5, p3=1),
        )
    )
    assert [(p.pid, p.memory_bytes) for p in api.processes(None)] == [(3, 1), (7, 100), (8, 5)]


def test_a_field_value_carries_its_own_error() -> None:
    def answer(code: int) -> NvmlApi:
        value = SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=4))
        fake = SimpleNamespace(
            **{name: getattr(pynvml, name) for name in dir(pynvml) if name.startswith("NVML")},
            nvmlDeviceGetFieldValues=lambda _handle, _ids: [value],
        )
        return NvmlApi(fake)

    assert answer(0).field(None, 230) == 4
    for code, kind in [
        (pynvml.NVML_ERROR_INVALID_ARGUMENT, FaultKind.NOT_SUPPORTED),
        (pynvml.NVML_ERROR_NOT_SUPPORTED, FaultKind.NOT_SUPPORTED),
        (pynvml.NVML_ERROR_GPU_IS_LOST, FaultKind.LOST),
        (pynvml.NVML_ERROR_UNKNOWN, FaultKind.OTHER),
    ]:
        with pytest.raises(NvmlFault) as caught:
            answer(code).field(None, 230)
        assert caught.value.kind is kind


def test_clean_text() -> None:
    assert clean_text("\x00 Tesla\x07 P100\x7f\u0085 \n") == "Tesla P100"


def test_whose_pynvml_it_is() -> None:
    assert why_not_nvidia_ml_py(pynvml) is None
    other = ModuleType("pynvml")
    other.__file__ = "/site-packages/pynvml/__init__.py"
    assert "is not nvidia-ml-py's" in str(why_not_nvidia_ml_py(other))
    assert "pip uninstall pynvml" in str(why_not_nvidia_ml_py(other))


def test_a_scan_of_eight_cards_is_cheap() -> None:
    collector = NvmlCollector(make_mock("A100-80GB:8"))
    collector.scan()
    cpu_s = min(_cpu_s(collector.scan) for _ in range(20))
    assert cpu_s < 0.005, f"{cpu_s * 1000:.1f} ms"


def _cpu_s(call: Callable[[], object]) -> float:
    start_s = time.process_time()
    call()
    return time.process_time() - start_s


def test_the_collectors_process_imports_no_heavy_module() -> None:
    # Its start is part of the agent's, and it is replaced while jobs run.
    code = (
        "import sys, node_agent.collector_child\n"
        "print([m for m in ('torch', 'grpc', 'asyncio', 'pyomo', 'psutil') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert output.stdout.strip() == b"[]"
