"""From options to a model and its data. Each kind of model loads only the library it comes from."""

from dataclasses import dataclass

import torch
from torch import nn

from workloads import data
from workloads.families import Kind
from workloads.options import Options

CPU_SCALE = 1 / 8
"""Scale where there is no GPU: a step of any model takes well under a second on one core."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How big a run's model and samples are."""

    scale: float
    size: int
    """Pixels a side of an image, or tokens of a text."""


def shape(options: Options, device: torch.device) -> Shape:
    """Resolve ``--scale auto`` for the device, and the size of a sample that follows from it."""
    scale = options.scale
    if scale is None:
        scale = 1.0 if device.type == "cuda" else CPU_SCALE
    workload = options.workload
    if workload.kind is Kind.LANGUAGE:
        from workloads import language  # noqa: PLC0415 - transformers costs seconds

        return Shape(scale, language.sequence_length(workload, scale, options.seq_len))
    from workloads import vision  # noqa: PLC0415 - torchvision costs a second

    return Shape(scale, vision.image_side(workload.name, scale, options.batch_size))


def load(options: Options, shaped: Shape, *, download: bool) -> data.Data:
    """The dataset of a run.

    Args:
        options: What was asked for.
        shaped: Size of its samples.
        download: Whether this process is the one that may fetch missing files.

    Raises:
        data.DataError: it is not there.
    """
    if options.workload.kind is Kind.LANGUAGE:
        from workloads import language  # noqa: PLC0415 - transformers costs seconds

        return data.load_text(
            options.dataset,
            length=shaped.size,
            seed=options.seed,
            masked=language.is_masked(options.workload),
        )
    return data.load_images(
        options.dataset,
        side=shaped.size,
        seed=options.seed,
        data_dir=options.data_dir,
        download=download,
    )


def build(options: Options, shaped: Shape, classes: int, device: torch.device) -> nn.Module:
    """The model with random weights on a device; `torch`'s default generator decides them."""
    with device:
        if options.workload.kind is Kind.LANGUAGE:
            from workloads import language  # noqa: PLC0415 - transformers costs seconds

            return language.build(options.workload, scale=shaped.scale)
        from workloads import vision  # noqa: PLC0415 - torchvision costs a second

        return vision.build(
            options.workload.name, classes=classes, scale=shaped.scale, side=shaped.size
        )


def input_of(options: Options, shaped: Shape) -> nn.Module:
    """What turns a batch as it was loaded into what the model reads, on the device."""
    vision = options.workload.kind is Kind.VISION
    return data.ImageInput(shaped.size) if vision else nn.Identity()
