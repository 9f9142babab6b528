"""The training loop: real loss, real gradients, one model at a time."""

import itertools
import math
import time
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler

from workloads import data, models, parallel, progress
from workloads.checkpoint import State
from workloads.families import Kind, uses_sgd
from workloads.options import Options
from workloads.session import NotFiniteError, Session, Stopped

_MOMENTUM = 0.9
_SGD_DECAY = 1e-4
_ADAMW_DECAY = 0.01
_LARGEST_GRADIENT = 1.0
"""Norm to which gradients of language models are cut, as their papers do."""
_SETTLING_BATCHES = 20
"""As many as torch's running averages look back on: 2 / momentum - 1 with its default, 0.1."""


class Trainer:
    """A model, its optimizer, its data, and how far they have come."""

    def __init__(self, session: Session) -> None:
        options, world = session.options, session.world
        self._session = session
        self._device = world.device
        # Alone on its machine each first local rank fetches; the others find the files there.
        download = options.download and world.local_rank == 0
        if download:
            self._data = models.load(options, session.shape, download=True)
        world.any(False)
        if not download:
            self._data = models.load(options, session.shape, download=False)

        # Initialisation and dropout draw from torch's global generators, which have no argument.
        torch.manual_seed(options.seed)
        self.model = models.build(options, session.shape, self._data.classes, self._device)
        torch.manual_seed(options.seed + 1 + world.rank)  # dropout differs by rank
        self._spread = parallel.spread(self.model, world)
        self._input = models.input_of(options, session.shape)
        self._optimizer = _optimizer(options, self.model)
        half, self._autocast = precision(self._device, wanted=options.amp)
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=half is torch.float16)

        sampler: DistributedSampler[int] = DistributedSampler(
            self._data.train, world.size, world.rank, seed=options.seed
        )
        self._sampler = sampler
        self._batches = data.Batches(sampler, options.batch_size)
        self.of = options.steps or options.epochs * len(self._batches)
        self.step = 0
        self._epoch = 0
        self._batch = 0
        self._loss = torch.zeros((), device=self._device)
        self._loss_total = torch.zeros((), device=self._device)
        self._loss_count = 0
        self._startup_s: float | None = None

    def run(self) -> None:
        """Train to the end, from the newest checkpoint if there is one, then test.

        Raises:
            NotFiniteError: the loss became infinite or not a number.
            Stopped: SIGTERM came; a checkpoint is saved.
        """
        session = self._session
        state = session.resume()
        if state is not None:
            self._restore(state)
        session.start_event(
            steps=self.of,
            resumed_from=self.step if state is not None else None,
            params=sum(parameter.numel() for parameter in self.model.parameters()),
            train_samples=self._data.train_size,
        )
        session.begin()
        begun_s = time.perf_counter()
        started_at = self.step
        while self.step < self.of:
            self._run_epoch()
        train_s = time.perf_counter() - begun_s
        if self.step > started_at:
            session.save(self._state(), self.step, "final")
        test_loss, accuracy = self._test()
        session.summary_event(
            steps=self.step,
            epochs=self._epoch,
            loss=self._last_loss(),
            test_loss=test_loss,
            accuracy=accuracy,
            train_s=train_s,
            startup_s=self._startup_s,
            resumed_from=started_at if state is not None else None,
        )

    def _run_epoch(self) -> None:
        """Go on with the epoch from the batch where it stands."""
        self._sampler.set_epoch(self._epoch)
        self._batches.start = self._batch
        options = self._session.options
        reader = data.read(
            self._data.train,
            self._batches,
            workers=options.workers,
            seed=options.seed + self._epoch,
            pin=self._device.type == "cuda",
        )
        self._spread.train()
        for inputs, targets in reader:
            self._learn(inputs, targets)
            self.step += 1
            self._batch += 1
            self._after_step(len(targets))
            if self.step == self.of:
                break
        if self._batch == len(self._batches):
            self._epoch += 1
            self._batch = 0

    def _learn(self, inputs: Tensor, targets: Tensor) -> None:
        """One step of gradient descent."""
        inputs = self._input(inputs.to(self._device, non_blocking=True))
        targets = targets.to(self._device, non_blocking=True)
        self._optimizer.zero_grad()
        with self._autocast:
            loss = loss_of(self._spread(inputs), targets)
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self._session.options.workload.kind is Kind.LANGUAGE:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), _LARGEST_GRADIENT)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._loss = loss.detach()
        self._loss_total += self._loss
        self._loss_count += 1

    def _after_step(self, samples: int) -> None:
        """Report, save, stop: whatever is due, on all ranks at the same step."""
        session, world = self._session, self._session.world
        session.pace.count(samples * world.size)
        every = session.options.checkpoint_every
        is_first_here = self._startup_s is None
        ending = is_first_here or self.step == self.of
        reporting, stopping = world.any(session.pace.is_due(), session.wish.is_set)
        saving = bool(every) and self.step % every == 0 and self.step < self.of
        if reporting or ending:
            self._report()
        elif saving or stopping or self._device.type == "cpu":
            self._mean_loss()  # a ruined model must not be saved; without a GPU asking is free
        if stopping:
            session.save(self._state(), self.step, "sigterm")
            raise Stopped
        if saving:
            session.save(self._state(), self.step, "interval")

    def _report(self) -> None:
        loss = self._mean_loss()
        self._loss_total.zero_()
        self._loss_count = 0
        first = self._startup_s is None
        if self._startup_s is None:
            self._startup_s = progress.process_age_s()
        self._session.reporter.event(
            "progress",
            step=self.step,
            of=self.of,
            epoch=self._epoch,
            loss=loss,
            samples_per_s=self._session.pace.take(),
            startup_s=self._startup_s if first else None,
        )

    def _mean_loss(self) -> float:
        """Loss over the steps since the last report and over the ranks."""
        total, count = self._session.world.sum([float(self._loss_total), self._loss_count])
        if not math.isfinite(total):
            raise NotFiniteError(
                f"loss is {total} at step {self.step} of {self.of} "
                f"(learning rate {self._session.options.lr:g}); no checkpoint was made of it"
            )
        return total / count

    def _last_loss(self) -> float | None:
        if self._startup_s is None:
            return None  # it was finished when it was resumed
        world = self._session.world
        return world.sum([float(self._loss)])[0] / world.size

    @torch.no_grad()
    def _test(self) -> tuple[float, float]:
        """Mean loss, and share of right answers, on samples that were not trained on."""
        session, world = self._session, self._session.world
        self._settle()
        for buffer in self.model.buffers():  # each rank's batch statistics differ a little
            if world.control is not None:
                torch.distributed.broadcast(buffer, 0)
        self.model.eval()
        own = list(range(world.rank, self._data.test_size, world.size))
        size = session.options.batch_size
        batches = [own[at : at + size] for at in range(0, len(own), size)]
        most = math.ceil(math.ceil(self._data.test_size / world.size) / size)
        reader = data.read(
            self._data.test,
            cast("torch.utils.data.Sampler[list[int]]", batches),
            workers=session.options.workers,
            seed=0,
            pin=self._device.type == "cuda",
        )
        loss, right, counted = 0.0, 0.0, 0.0
        for _ in range(most):
            batch = next(reader, None)
            if batch is not None:
                targets = batch[1].to(self._device)
                with self._autocast:
                    answers = self.model(self._input(batch[0].to(self._device)))
                counts = (targets != data.IGNORED).sum()
                loss += float(loss_of(answers, targets) * counts)
                right += float((answers.argmax(-1) == targets).sum())
                counted += float(counts)
            self._stop_if_wished()
        loss, right, counted = world.sum([loss, right, counted])
        return loss / counted, right / counted

    def _settle(self) -> None:
        """Take batch normalisation's averages anew, with the weights as they are now.

        After a few steps the running ones still describe weights that are long gone, and a deep
        net multiplies the error: ResNet-50 tested at a loss of 559,816 where it trained at 2.4.
        "Precise BN" of Wu and Johnson, Rethinking "Batch" in BatchNorm (2021), section 3.
        """
        norms = [m for m in self.model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
        if not norms:
            return
        self.model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain mean over what follows
            norm.train()
        self._sampler.set_epoch(self._epoch)
        self._batches.start = 0
        batches = list(itertools.islice(self._batches, _SETTLING_BATCHES))
        for inputs, _ in data.read(
            self._data.train,
            cast("torch.utils.data.Sampler[list[int]]", batches),
            workers=self._session.options.workers,
            seed=0,
            pin=self._device.type == "cuda",
        ):
            with self._autocast:
                self.model(self._input(inputs.to(self._device)))
            self._stop_if_wished()

    def _stop_if_wished(self) -> None:
        """Between two batches of a test, on all ranks at the same one."""
        session = self._session
        if session.world.any(session.wish.is_set)[0]:
            session.save(self._state(), self.step, "sigterm")
            raise Stopped

    def _state(self) -> State:
        """All that the next step depends on, in types that load without running code."""
        options, world = self._session.options, self._session.world
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return {
            "step": self.step,
            "epoch": self._epoch,
            "batch": self._batch,
            "batch_size": options.batch_size,
            "world_size": world.size,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "rng": world.gather({"cpu": torch.get_rng_state(), "cuda": cuda}),
        }

    def _restore(self, state: State) -> None:
        options, world = self._session.options, self._session.world
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:
            group["lr"] = options.lr
        self._scaler.load_state_dict(state["scaler"])
        self._epoch, self._batch, self.step = state["epoch"], state["batch"], state["step"]
        seen = state["batch_size"] * state["world_size"]
        now = options.batch_size * world.size
        if seen != now:
            # Other batches or another number of ranks: go on at the same sample of the epoch.
            self._batch = min(self._batch * seen // now, len(self._batches))
            if options.steps is None:
                self.step = min(self._epoch * len(self._batches) + self._batch, self.of)
        if state["world_size"] == world.size:
            own = state["rng"][world.rank]
            torch.set_rng_state(own["cpu"])
            if own["cuda"] is not None and self._device.type == "cuda":
                torch.cuda.set_rng_state(own["cuda"], self._device)


def loss_of(answers: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of ``[N, classes]`` or ``[N, length, vocabulary]`` answers."""
    return cross_entropy(
        answers.flatten(0, -2).float(), targets.flatten(), ignore_index=data.IGNORED
    )


def precision(device: torch.device, *, wanted: bool) -> tuple[torch.dtype | None, torch.autocast]:
    """What ``--amp`` means on a device: bfloat16, or float16 on a GPU that is older than that."""
    half = None
    if wanted:
        old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
        half = torch.float16 if old else torch.bfloat16
    return half, torch.autocast(device.type, dtype=half or torch.bfloat16, enabled=wanted)


def _optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    if uses_sgd(options.workload):
        return torch.optim.SGD(model.parameters(), options.lr, _MOMENTUM, weight_decay=_SGD_DECAY)
    return torch.optim.AdamW(model.parameters(), options.lr, weight_decay=_ADAMW_DECAY)
