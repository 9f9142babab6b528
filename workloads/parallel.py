"""The ranks of a run: their devices, how a model is spread over them, what they agree on."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from workloads.families import UsageError
from workloads.options import Mode, is_rank


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among the ranks of the run, and how it talks to the others."""

    mode: Mode
    rank: int
    local_rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None
    """Ranks agree here on the CPU, whatever carries the gradients; None: there is but one."""

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks and saves for all."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks, the same on all of them."""
        if self.control is None:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(summed, group=self.control)
        return [float(value) for value in summed]

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether some rank raised it."""
        if self.control is None:
            return list(flags)
        return [count > 0 for count in self.sum([float(flag) for flag in flags])]

    def gather(self, value: object) -> list[Any]:
        """What each rank gave, in their order, on all of them."""
        if self.control is None:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.control)
        return gathered


def join(mode: Mode) -> World:
    """Take this process's place; under ddp, wait for the other ranks.

    Raises:
        UsageError: several ranks were started for a mode that has one process.
    """
    has_gpu = torch.cuda.is_available()
    if mode is not Mode.DDP:
        started = int(os.environ["WORLD_SIZE"]) if is_rank(os.environ) else 1
        if started > 1:
            raise UsageError(f"{started} ranks were started: that is --mode ddp, not {mode}")
        return World(mode, 0, 0, 1, torch.device("cuda:0" if has_gpu else "cpu"), None)
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}" if has_gpu else "cpu")
    if has_gpu:
        if local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"rank {local_rank} of this machine has no GPU of its own: "
                f"{torch.cuda.device_count()} are visible"
            )
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    return World(mode, dist.get_rank(), local_rank, dist.get_world_size(), device, control)


def leave(world: World) -> None:
    """Part from the other ranks after a run that ended well."""
    if world.control is not None:
        dist.destroy_process_group()


def spread(model: nn.Module, world: World) -> nn.Module:
    """The model as the mode trains it; the gradients of all ranks or GPUs are averaged.

    DataParallel has no meaning without GPUs: it then is the model itself, on one process.
    """
    if world.mode is Mode.DDP:
        devices = [world.device] if world.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices)
    if world.mode is Mode.DP and world.device.type == "cuda":
        return DataParallel(model)
    return model


def remark(world: World) -> str | None:
    """What a user should know of how the mode and the machine fit, if they do not quite."""
    gpus = torch.cuda.device_count() if world.device.type == "cuda" else 0
    if world.mode is Mode.DP and gpus == 0:
        return "DataParallel needs GPUs: on this CPU it is one process with one copy of the model"
    if world.mode is Mode.SINGLE and gpus > 1:
        return f"{gpus} GPUs are visible, --mode single uses the first (see --mode ddp)"
    return None
