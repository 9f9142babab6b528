"""Language models of Hugging Face transformers, with random weights, at full size or shrunk.

Only configurations are used: nothing is downloaded, whatever the environment says.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from workloads.data import BYTE_VOCABULARY
from workloads.families import LANGUAGE_FAMILIES, LanguageSpec, Workload


@contextmanager
def _not_installed(*packages: str) -> Iterator[None]:
    """Let imports take these packages for absent."""
    hidden = [name for name in packages if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


# For the losses of object detection transformers would import these wherever they are installed:
# 0.5 s of each start, a fifth of it.
with _not_installed("PIL", "scipy", "sklearn", "torchvision"):
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        BloomConfig,
        BloomForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        GPTJConfig,
        GPTJForCausalLM,
        OPTConfig,
        OPTForCausalLM,
        PretrainedConfig,
        PreTrainedModel,
    )


class LanguageModel(nn.Module):
    """A transformers model reduced to tokens in, logits out.

    Attributes:
        masked: Fills masks in (BERT) instead of continuing a text.
    """

    def __init__(self, model: PreTrainedModel, *, masked: bool) -> None:
        super().__init__()
        self.model = model
        self.masked = masked

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[N, length]`` to logits ``[N, length, vocabulary]``."""
        logits: Tensor = self.model(input_ids=tokens, **self._no_cache()).logits
        return logits

    def _no_cache(self) -> dict[str, bool]:
        return {} if self.masked else {"use_cache": False}

    def generate(self, prompt: Tensor, tokens: int) -> Tensor:
        """Continue a prompt greedily, one token after the other, with a key-value cache.

        Args:
            prompt: Tokens ``[N, length]``.
            tokens: How many to add; an end-of-text token does not end it sooner.

        Returns:
            The new tokens ``[N, tokens]``.
        """
        made: Tensor = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return made[:, prompt.shape[1] :]


def is_masked(workload: Workload) -> bool:
    """Whether the model is trained to fill masks in, not to continue a text."""
    return workload.family == "bert"


def sequence_length(workload: Workload, scale: float, asked: int | None) -> int:
    """Tokens a sample: as asked, or 512 times the scale in steps of 8, at most what fits."""
    most = LANGUAGE_FAMILIES[workload.family][workload.name].positions
    return min(most, asked or max(16, round(512 * scale / 8) * 8))


def shrunk(spec: LanguageSpec, scale: float) -> LanguageSpec:
    """The specification at a scale: fewer layers and heads of the same width, byte vocabulary.

    The order of sizes in a family is kept; at scale 1 it is the published model unchanged.
    """
    if scale == 1:
        return spec
    heads = max(2, round(spec.heads * scale))
    width = spec.hidden // spec.heads
    hidden = heads * width
    return LanguageSpec(
        layers=max(2, round(spec.layers * scale)),
        hidden=hidden,
        heads=heads,
        feed_forward=hidden * spec.feed_forward // spec.hidden,
        vocabulary=BYTE_VOCABULARY,
        positions=spec.positions,
        projection=hidden // 2 if spec.projection else 0,
    )


def build(workload: Workload, *, scale: float) -> LanguageModel:
    """A model with random weights, on torch's current default device.

    Args:
        workload: One of `families.LANGUAGE_FAMILIES`.
        scale: 1 is the published size; see `shrunk`.
    """
    spec = shrunk(LANGUAGE_FAMILIES[workload.family][workload.name], scale)
    model: PreTrainedModel
    match workload.family:
        case "bert":
            model = BertForMaskedLM(
                BertConfig(
                    vocab_size=spec.vocabulary,
                    hidden_size=spec.hidden,
                    num_hidden_layers=spec.layers,
                    num_attention_heads=spec.heads,
                    intermediate_size=spec.feed_forward,
                    max_position_embeddings=spec.positions,
                )
            )
        case "gpt2":
            model = GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=spec.vocabulary,
                    n_embd=spec.hidden,
                    n_layer=spec.layers,
                    n_head=spec.heads,
                    n_inner=spec.feed_forward,
                    n_positions=spec.positions,
                    **_special_tokens(spec),
                )
            )
        case "gptj":
            model = GPTJForCausalLM(
                GPTJConfig(
                    vocab_size=spec.vocabulary,
                    n_embd=spec.hidden,
                    n_layer=spec.layers,
                    n_head=spec.heads,
                    n_inner=spec.feed_forward,
                    n_positions=spec.positions,
                    rotary_dim=spec.hidden // spec.heads // 4,
                    **_special_tokens(spec),
                )
            )
        case "opt":
            model = OPTForCausalLM(_opt(spec))
        case "bloom":
            model = BloomForCausalLM(
                BloomConfig(
                    vocab_size=spec.vocabulary,
                    hidden_size=spec.hidden,
                    n_layer=spec.layers,
                    n_head=spec.heads,
                )
            )
        case family:
            raise AssertionError(family)
    return LanguageModel(model, masked=is_masked(workload))


def _opt(spec: LanguageSpec) -> PretrainedConfig:
    return OPTConfig(
        vocab_size=spec.vocabulary,
        hidden_size=spec.hidden,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        ffn_dim=spec.feed_forward,
        max_position_embeddings=spec.positions,
        word_embed_proj_dim=spec.projection or spec.hidden,
        # OPT-350m, alone in its family, projects its embedding and normalises after the layer.
        do_layer_norm_before=not spec.projection,
    )


def _special_tokens(spec: LanguageSpec) -> dict[str, int]:
    """The end-of-text token, last of the vocabulary, as GPT-2 has it."""
    return {"bos_token_id": spec.vocabulary - 1, "eos_token_id": spec.vocabulary - 1}
