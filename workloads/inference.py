"""Inference with a language model: continue texts (or fill masks in) and measure how fast."""

import time

import torch
from torch import Tensor, nn

from workloads import data, models, progress
from workloads.language import LanguageModel
from workloads.session import Session, Stopped
from workloads.training import precision

NEW_TOKENS = 50
"""Tokens that are generated for each prompt, as the RLTune testbed did."""


class Inference:
    """A model that answers prompts taken from the test text."""

    def __init__(self, session: Session) -> None:
        options, world = session.options, session.world
        self._session = session
        self._device = world.device
        loaded = models.load(options, session.shape, download=False)
        # Random weights are all there is to load; every rank has the same.
        torch.manual_seed(options.seed)
        built: nn.Module = models.build(options, session.shape, 0, self._device)
        assert isinstance(built, LanguageModel)
        half, _ = precision(self._device, wanted=options.amp)
        self._model = (built.to(half) if half else built).eval()
        own = list(range(world.rank, loaded.test_size, world.size))
        size = min(options.batch_size, len(own))
        self._prompts: list[Tensor] = [
            loaded.test[own[at : at + size]][0] for at in range(0, len(own) - size + 1, size)
        ]
        self.of = options.steps or options.epochs * len(self._prompts)
        self.step = 0

    def run(self) -> None:
        """Answer all prompts, from where a checkpoint stands if there is one.

        Raises:
            Stopped: SIGTERM came; how far it had come is saved.
        """
        session, world = self._session, self._session.world
        state = session.resume()
        if state is not None:
            self.step = state["step"]
        session.start_event(
            steps=self.of,
            resumed_from=self.step if state is not None else None,
            params=sum(parameter.numel() for parameter in self._model.parameters()),
        )
        session.begin()
        begun_s = time.perf_counter()
        started_at = self.step
        startup_s: float | None = None
        tokens = 0
        while self.step < self.of:
            prompt = self._prompts[self.step % len(self._prompts)].to(self._device)
            made = self._answer(prompt)
            self.step += 1
            tokens += made * world.size
            session.pace.count(len(prompt) * world.size)
            due, stopping = world.any(session.pace.is_due(), session.wish.is_set)
            if due or startup_s is None or self.step == self.of:
                first = startup_s is None
                startup_s = startup_s or progress.process_age_s()
                rate = session.pace.take()
                session.reporter.event(
                    "progress",
                    step=self.step,
                    of=self.of,
                    samples_per_s=rate,
                    tokens_per_s=rate * made / len(prompt),
                    startup_s=startup_s if first else None,
                )
            if stopping:
                session.save({"step": self.step}, self.step, "sigterm")
                raise Stopped
        if self.step > started_at:
            session.save({"step": self.step}, self.step, "final")
        session.summary_event(
            steps=self.step,
            tokens=tokens,
            tokens_per_s=tokens / max(time.perf_counter() - begun_s, 1e-9),
            startup_s=startup_s,
            resumed_from=started_at if state is not None else None,
        )

    @torch.no_grad()
    def _answer(self, tokens: Tensor) -> int:
        """Answer one batch; returns how many tokens were made, which the GPU has then finished."""
        if self._model.masked:
            return int((self._model(tokens).argmax(-1)[tokens == data.MASK_TOKEN] >= 0).sum())
        prompt = tokens[:, : max(1, tokens.shape[1] // 2)]
        return int((self._model.generate(prompt, NEW_TOKENS) >= 0).sum())
