"""Names of every model that can be trained here, and how people write them.

Pure data and look-up: no torch, so that a command line can check a name in milliseconds.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a model reads."""

    VISION = "vision"
    LANGUAGE = "language"


class UsageError(ValueError):
    """What was asked for cannot be meant; the message says what to write instead."""


class UnknownWorkloadError(UsageError):
    """A name that no workload has. `problem` is the message without where all names stand."""

    def __init__(self, name: str, hint: str) -> None:
        """`hint` names the nearest, or is empty."""
        self.problem = f"unknown workload {name!r}{hint}"
        listed = "" if hint else "; `python -m workloads.train --list` names them"
        super().__init__(self.problem + listed)


@dataclass(frozen=True, slots=True)
class LanguageSpec:
    """Size of a published language model, as its Hugging Face configuration states it."""

    layers: int
    hidden: int
    heads: int
    feed_forward: int
    vocabulary: int
    positions: int
    projection: int = 0
    """Width of the token embedding where it differs from `hidden` (OPT-350m), else 0."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model that `python -m workloads.train NAME` trains."""

    name: str
    family: str
    kind: Kind


VISION_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "alexnet": ("alexnet",),
    "convnext": ("convnext_tiny", "convnext_small", "convnext_base", "convnext_large"),
    "densenet": ("densenet121", "densenet161", "densenet169", "densenet201"),
    "efficientnet": (
        *(f"efficientnet_b{n}" for n in range(8)),
        *(f"efficientnet_v2_{size}" for size in "sml"),
    ),
    "googlenet": ("googlenet",),
    "inception": ("inception_v3",),
    "maxvit": ("maxvit_t",),
    "mnasnet": ("mnasnet0_5", "mnasnet0_75", "mnasnet1_0", "mnasnet1_3"),
    "mobilenet": ("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large"),
    "regnet": (
        *(f"regnet_x_{s}" for s in ("400mf", "800mf", "1_6gf", "3_2gf", "8gf", "16gf", "32gf")),
        *(f"regnet_y_{s}" for s in ("400mf", "800mf", "1_6gf", "3_2gf", "8gf", "16gf", "32gf")),
        "regnet_y_128gf",
    ),
    "resnet": ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    "resnext": ("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
    "shufflenet": tuple(f"shufflenet_v2_x{width}" for width in ("0_5", "1_0", "1_5", "2_0")),
    "squeezenet": ("squeezenet1_0", "squeezenet1_1"),
    "swin": ("swin_t", "swin_s", "swin_b", "swin_v2_t", "swin_v2_s", "swin_v2_b"),
    "vgg": tuple(f"vgg{depth}{bn}" for depth in (11, 13, 16, 19) for bn in ("", "_bn")),
    "vit": ("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14"),
    "wide_resnet": ("wide_resnet50_2", "wide_resnet101_2"),
}

_OPT = 50_272
_BLOOM = 250_880
LANGUAGE_FAMILIES: Mapping[str, Mapping[str, LanguageSpec]] = {
    "bert": {
        "bert-tiny": LanguageSpec(2, 128, 2, 512, 30_522, 512),
        "bert-mini": LanguageSpec(4, 256, 4, 1024, 30_522, 512),
        "bert-small": LanguageSpec(4, 512, 8, 2048, 30_522, 512),
        "bert-medium": LanguageSpec(8, 512, 8, 2048, 30_522, 512),
        "bert-base": LanguageSpec(12, 768, 12, 3072, 30_522, 512),
        "bert-large": LanguageSpec(24, 1024, 16, 4096, 30_522, 512),
    },
    "gpt2": {
        "gpt2": LanguageSpec(12, 768, 12, 3072, 50_257, 1024),
        "gpt2-medium": LanguageSpec(24, 1024, 16, 4096, 50_257, 1024),
        "gpt2-large": LanguageSpec(36, 1280, 20, 5120, 50_257, 1024),
        "gpt2-xl": LanguageSpec(48, 1600, 25, 6400, 50_257, 1024),
    },
    "gptj": {"gpt-j-6b": LanguageSpec(28, 4096, 16, 16_384, 50_400, 2048)},
    "opt": {
        "opt-125m": LanguageSpec(12, 768, 12, 3072, _OPT, 2048),
        "opt-350m": LanguageSpec(24, 1024, 16, 4096, _OPT, 2048, projection=512),
        "opt-1.3b": LanguageSpec(24, 2048, 32, 8192, _OPT, 2048),
        "opt-2.7b": LanguageSpec(32, 2560, 32, 10_240, _OPT, 2048),
        "opt-6.7b": LanguageSpec(32, 4096, 32, 16_384, _OPT, 2048),
        "opt-13b": LanguageSpec(40, 5120, 40, 20_480, _OPT, 2048),
    },
    "bloom": {
        "bloom-560m": LanguageSpec(24, 1024, 16, 4096, _BLOOM, 2048),
        "bloom-1b1": LanguageSpec(24, 1536, 16, 6144, _BLOOM, 2048),
        "bloom-1b7": LanguageSpec(24, 2048, 16, 8192, _BLOOM, 2048),
        "bloom-3b": LanguageSpec(30, 2560, 32, 10_240, _BLOOM, 2048),
        "bloom-7b1": LanguageSpec(30, 4096, 32, 16_384, _BLOOM, 2048),
    },
}

DATASETS: Mapping[Kind, tuple[str, ...]] = {
    Kind.VISION: ("digits", "mnist", "cifar10", "cifar100", "imagenet", "synthetic"),
    Kind.LANGUAGE: ("stdlib-text", "synthetic"),
}
"""Datasets by what they feed; the first of each is the default and needs no download."""

_ORGANISATIONS = frozenset(
    {"facebook", "bigscience", "openai-community", "google-bert", "prajjwal1", "eleutherai"}
)
_OTHER_NAMES = {
    "bert-base-uncased": "bert-base",
    "bert-base-cased": "bert-base",
    "bert-large-uncased": "bert-large",
    "bert-large-cased": "bert-large",
    "bloom-1.1b": "bloom-1b1",
    "bloom-1.7b": "bloom-1b7",
    "bloom-7.1b": "bloom-7b1",
    "gpt2-small": "gpt2",
}

WORKLOADS: Mapping[str, Workload] = {
    **{
        name: Workload(name, family, Kind.VISION)
        for family, names in VISION_FAMILIES.items()
        for name in names
    },
    **{
        name: Workload(name, family, Kind.LANGUAGE)
        for family, specs in LANGUAGE_FAMILIES.items()
        for name in specs
    },
}


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def _squeezed(name: str) -> str:
    return _plain(name).replace("-", "").replace(" ", "")


def _spellings() -> dict[str, str]:
    exact = {_plain(name): name for name in WORKLOADS}
    exact.update(_OTHER_NAMES)
    loose: dict[str, set[str]] = {}
    for spelling, name in exact.items():
        loose.setdefault(_squeezed(spelling), set()).add(name)
    # regnet_y_1_6gf and regnet_y_16gf look alike without separators: such names must be exact.
    return {key: min(names) for key, names in loose.items() if len(names) == 1} | exact


_SPELLINGS = _spellings()


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint such as ``: did you mean 'cifar10'?``, or nothing when no known word is near."""
    found = difflib.get_close_matches(word.lower(), [str(name) for name in known], 1, 0.5)
    return f": did you mean {found[0]!r}?" if found else ""


def find(name: str) -> Workload:
    """The workload of this name.

    Case, ``-`` and ``_`` do not matter, and the Hugging Face owner may stand in front:
    ``facebook/opt1.3b``, ``bigscience/bloom-3b`` and ``ResNet-50`` are all understood.

    Raises:
        UsageError: no workload is called so; the message names the nearest.
    """
    owner, _, model = name.strip().rpartition("/")
    if not owner or owner.lower() in _ORGANISATIONS:
        plain = _plain(model)
        canonical = _SPELLINGS.get(plain) or _SPELLINGS.get(_squeezed(model))
        if canonical is not None:
            return WORKLOADS[canonical]
    raise UnknownWorkloadError(name, nearest(model, WORKLOADS))


def default_learning_rate(workload: Workload) -> float:
    """Step size when none is given."""
    if not uses_sgd(workload):
        return 1e-3
    # Nets without batch normalisation diverge at the rate that the others learn best with.
    unnormalised = workload.family == "alexnet" or (
        workload.family == "vgg" and not workload.name.endswith("_bn")
    )
    return 0.01 if unnormalised else 0.05


def uses_sgd(workload: Workload) -> bool:
    """Whether the model is trained with momentum SGD (most convolutional nets) or with AdamW."""
    return workload.kind is Kind.VISION and workload.family not in {
        "convnext",
        "maxvit",
        "squeezenet",
        "swin",
        "vit",
    }
