"""GPU models: the short type that jobs ask for, and the makers' figures for mock GPUs.

Memory is what the driver shows as total (with ECC on where that takes a share), power limit,
boost and memory clocks are from NVIDIA's data sheets; idle power and idle clocks are typical
readings of `nvidia-smi` on an idle card, since no data sheet gives them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MIB = 1024**2
GIB = 1024**3


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """What a mock GPU pretends to be."""

    gpu_type: str
    nvml_name: str
    memory_bytes: int
    power_limit_w: float
    idle_power_w: float
    sm_clock_mhz: int
    idle_sm_clock_mhz: int
    memory_clock_mhz: int
    idle_memory_clock_mhz: int
    compute_capability: tuple[int, int]
    has_ecc: bool = True
    has_mig: bool = False
    has_row_remapping: bool = False
    """Since Ampere; older cards with ECC retire pages instead."""


_PROFILES = (
    GpuProfile("K80", "Tesla K80", 11441 * MIB, 149, 26, 875, 324, 2505, 324, (3, 7)),
    GpuProfile("M40", "Tesla M40", 11448 * MIB, 250, 16, 1112, 324, 3004, 405, (5, 2)),
    GpuProfile("P100", "Tesla P100-PCIE-16GB", 16280 * MIB, 250, 26, 1328, 405, 715, 715, (6, 0)),
    GpuProfile(
        "V100-16GB", "Tesla V100-SXM2-16GB", 16160 * MIB, 300, 40, 1530, 135, 877, 877, (7, 0)
    ),
    GpuProfile(
        "V100-32GB", "Tesla V100-SXM2-32GB", 32510 * MIB, 300, 42, 1530, 135, 877, 877, (7, 0)
    ),
    GpuProfile("T4", "Tesla T4", 15109 * MIB, 70, 9, 1590, 300, 5001, 405, (7, 5)),
    GpuProfile(
        "A100-40GB",
        "NVIDIA A100-SXM4-40GB",
        40960 * MIB,
        *(400, 47, 1410, 210, 1215, 1215),
        compute_capability=(8, 0),
        has_mig=True,
        has_row_remapping=True,
    ),
    GpuProfile(
        "A100-80GB",
        "NVIDIA A100-SXM4-80GB",
        81920 * MIB,
        *(400, 60, 1410, 210, 1593, 1593),
        compute_capability=(8, 0),
        has_mig=True,
        has_row_remapping=True,
    ),
    GpuProfile(
        "H100",
        "NVIDIA H100 80GB HBM3",
        81559 * MIB,
        *(700, 70, 1980, 345, 2619, 2619),
        compute_capability=(9, 0),
        has_mig=True,
        has_row_remapping=True,
    ),
    GpuProfile(
        "H200",
        "NVIDIA H200",
        143771 * MIB,
        *(700, 76, 1980, 345, 3201, 3201),
        compute_capability=(9, 0),
        has_mig=True,
        has_row_remapping=True,
    ),
    GpuProfile(
        "RTX3090",
        "NVIDIA GeForce RTX 3090",
        24576 * MIB,
        *(350, 21, 1695, 210, 9751, 405),
        compute_capability=(8, 6),
        has_ecc=False,
    ),
    GpuProfile(
        "RTX4090",
        "NVIDIA GeForce RTX 4090",
        24564 * MIB,
        *(450, 18, 2520, 210, 10501, 405),
        compute_capability=(8, 9),
        has_ecc=False,
    ),
)

GPU_PROFILES = {profile.gpu_type: profile for profile in _PROFILES}

_MAX_MOCK_GPUS = 64
_ONE_TYPE = frozenset({"K80", "M40", "P100", "T4", "H100", "H200"})
_TYPE_BY_SIZE_GB = {"V100": (16, 32), "V100S": (32,), "A100": (40, 80)}
_GEFORCE = re.compile(r"(?:NVIDIA )?GeForce RTX (3090|4090)")


def gpu_type_of(nvml_name: str, memory_bytes: int | None) -> str:
    """The short type that jobs ask for, from NVML's name of a card.

    Args:
        nvml_name: cleaned of control bytes, e.g. `Tesla V100-SXM2-16GB`.
        memory_bytes: total memory, which tells models of one name apart.

    Returns:
        E.g. `V100-16GB`; for a model without a short type NVML's name with `_` for spaces.
        A virtual GPU, a laptop part or a `Ti` is another model, so it keeps its full name.
    """
    geforce = _GEFORCE.fullmatch(nvml_name)
    if geforce:
        return f"RTX{geforce[1]}"
    words = re.split(r"[\s-]+", nvml_name)
    model = words[1] if words[0] in {"Tesla", "NVIDIA"} and len(words) > 1 else words[0]
    if model in _ONE_TYPE:
        return model
    size = _size_gb(words, memory_bytes)
    if size in _TYPE_BY_SIZE_GB.get(model, ()):
        return f"{model.removesuffix('S')}-{size}GB"
    return "_".join(nvml_name.split()) or "unknown"


def _size_gb(words: list[str], memory_bytes: int | None) -> int | None:
    """Size by the name where it says one, otherwise the usual size nearest above."""
    for word in words:
        if re.fullmatch(r"\d+GB", word):
            return int(word[:-2])
    if memory_bytes is None:
        return None
    # Drivers show a few percent less than the label (ECC, reserve), or exactly the label.
    return next((gb for gb in (16, 32, 40, 80) if 0.9 * gb <= memory_bytes / GIB <= gb), None)


def parse_mock_gpus(text: str) -> list[GpuProfile]:
    """Reads `--mock-gpus`, e.g. `P100:4,T4:2`; a type without a number is one GPU.

    Raises:
        ValueError: it cannot be read; the message names what is possible.
    """
    profiles: list[GpuProfile] = []
    for item in text.split(","):
        name, colon, count_text = (part.strip() for part in item.partition(":"))
        profile = _profile_named(name)
        if profile is None:
            raise ValueError(
                f"unknown GPU type {name!r} in {text!r}; known: {', '.join(GPU_PROFILES)} "
                "(write e.g. P100:4,T4:2)"
            )
        if colon and not re.fullmatch(r"[1-9][0-9]{0,3}", count_text):
            raise ValueError(
                f"number of {profile.gpu_type} GPUs must be 1 to {_MAX_MOCK_GPUS}, "
                f"not {count_text!r} in {text!r} (write e.g. P100:4,T4:2)"
            )
        profiles.extend([profile] * (int(count_text) if colon else 1))
    if len(profiles) > _MAX_MOCK_GPUS:
        raise ValueError(
            f"{len(profiles)} mock GPUs in {text!r}; at most {_MAX_MOCK_GPUS} on a node"
        )
    return profiles


def _profile_named(name: str) -> GpuProfile | None:
    wanted = name.casefold()
    return next((p for t, p in GPU_PROFILES.items() if t.casefold() == wanted), None)
