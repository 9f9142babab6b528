"""What training and inference share: ranks, checkpoints, the wish to stop, and the story told."""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from workloads import models, parallel, progress
from workloads.checkpoint import CheckpointError, Folder, State
from workloads.options import Options
from workloads.parallel import World
from workloads.progress import Pace, Reporter, note


class NotFiniteError(ArithmeticError):
    """The loss became infinite or not a number: the run can only get worse."""


class Stopped(Exception):
    """SIGTERM came, and a checkpoint is on the disk."""


class StopWish:
    """Remembers that SIGTERM came between `listen` and `forget`; else it ends the process."""

    def __init__(self) -> None:
        self.is_set = False

    def listen(self) -> None:
        """Take SIGTERM as a wish from now on."""
        signal.signal(signal.SIGTERM, self._hear)

    def forget(self) -> None:
        """All is saved: a wish that came needs no second hearing, a new one ends the process."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN if self.is_set else signal.SIG_DFL)

    def _hear(self, _signum: int, _frame: FrameType | None) -> None:
        self.is_set = True


@dataclass(slots=True)
class Session:
    """One run of one process."""

    options: Options
    world: World
    reporter: Reporter
    folder: Folder | None
    shape: models.Shape
    wish: StopWish
    pace: Pace

    def resume(self) -> State | None:
        """The newest checkpoint that all ranks can read, if there is one.

        Raises:
            CheckpointError: the folder cannot be used, is another run's, or differs by rank.
        """
        if self.folder is None:
            return None
        if self.world.is_first:
            self.folder.prepare()
        damaged: list[Path] = []

        def tell(path: Path, reason: str) -> None:
            damaged.append(path)
            if self.world.is_first:
                note(f"damaged checkpoint {path}: {reason}; trying the one before")
            self.reporter.event("checkpoint_damaged", path=str(path), reason=reason)

        self.world.any(False)  # nobody reads before the folder is tidy
        found = self.folder.load(tell)
        steps = self.world.gather(found[1].step if found else None)
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"the ranks read different checkpoints from {self.folder.path} (steps {steps}): "
                "it must be one folder that all nodes share"
            )
        if self.world.is_first:
            for path in damaged:
                self.folder.set_aside(path)
        return found[0] if found else None

    def save(self, state: State, step: int, reason: str) -> None:
        """Write a checkpoint from the first rank; all ranks wait for it.

        Raises:
            CheckpointError: it could not be written (on all ranks).
        """
        if self.folder is None:
            return
        failed = ""
        if self.world.is_first:
            try:
                path = self.folder.save(state, step, reason)
                self.reporter.event("checkpoint", step=step, path=str(path), reason=reason)
            except CheckpointError as error:
                failed = str(error)
        failed = "".join(self.world.gather(failed))
        if failed:
            raise CheckpointError(failed)

    def begin(self) -> None:
        """Begin: count time, and heed SIGTERM from now on if a checkpoint can be written then."""
        self.pace.take()
        if self.folder is not None:
            self.wish.listen()

    def start_event(self, **fields: progress.Value) -> None:
        """Tell what runs, before the first step."""
        options = self.options
        remark = parallel.remark(self.world)
        if remark and self.world.is_first:
            note(remark)
        self.reporter.event(
            "start",
            model=options.workload.name,
            task=options.task,
            dataset=options.dataset,
            mode=options.mode,
            world_size=self.world.size,
            device=device_name(self.world.device),
            scale=self.shape.scale,
            sample_size=self.shape.size,
            batch_size=options.batch_size,
            note=remark,
            **fields,
        )

    def summary_event(self, **fields: progress.Value) -> None:
        """Tell how it ended, after the last step."""
        device = self.world.device
        gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        self.reporter.event(
            "summary",
            model=self.options.workload.name,
            **fields,
            device=device_name(device),
            world_size=self.world.size,
            wall_s=progress.process_age_s(),
            peak_gpu_memory_bytes=gpu,
            peak_host_memory_bytes=progress.peak_host_memory_bytes(),
        )


def device_name(device: torch.device) -> str:
    """``cpu``, or the GPU's index and name."""
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return device.type


def open_session(options: Options) -> Session:
    """Join the ranks and open what the run writes to.

    Raises:
        UsageError: more ranks than the mode or the machine has room for.
    """
    world = parallel.join(options.mode)
    shape = models.shape(options, world.device)
    run: dict[str, Any] = {
        "model": options.workload.name,
        "task": str(options.task),
        "dataset": options.dataset,
        "scale": shape.scale,
        "sample_size": shape.size,
        "seed": options.seed,
    }
    directory = options.checkpoint_dir
    return Session(
        options,
        world,
        Reporter(options.progress_file, silent=not world.is_first, stream=sys.stdout),
        Folder(directory, run) if directory is not None else None,
        shape,
        StopWish(),
        Pace(options.progress_every_s),
    )
