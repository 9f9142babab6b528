"""Models: complete, at their published size at scale 1, small and still the same at less."""

from collections.abc import Iterator

import pytest
import torch
import torchvision.models as zoo
from torch import nn

from workloads import families, language, vision
from workloads.models import CPU_SCALE

IMAGE_MODELS = [name for names in families.VISION_FAMILIES.values() for name in names]
TEXT_MODELS = [w for w in families.WORKLOADS.values() if w.kind is families.Kind.LANGUAGE]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.state_dict().items()}


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_classification_model_of_torchvision_is_there() -> None:
    assert sorted(IMAGE_MODELS) == sorted(zoo.list_models(module=zoo))


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_shrunk_image_model_maps_images_to_classes(name: str) -> None:
    side = vision.image_side(name, CPU_SCALE, batch_size=2)
    model = vision.build(name, classes=7, scale=CPU_SCALE, side=side)
    answers = model(torch.rand(2, 3, side, side))
    assert answers.shape == (2, 7)
    assert bool(answers.isfinite().all())
    assert side <= 96
    assert _count(model) < 11e6


@pytest.mark.parametrize(
    "name",
    [
        "convnext_tiny", "convnext_large", "efficientnet_v2_s", "googlenet", "maxvit_t", "resnet50",
        "shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0",
        "swin_t", "swin_b", "swin_v2_s", "vit_b_16", "vit_b_32", "vit_l_16", "vit_h_14",
    ],
)  # fmt: skip
def test_image_model_at_scale_one_is_the_published_one(name: str) -> None:
    side = vision.image_side(name, 1, batch_size=32)
    with torch.device("meta"):
        ours = vision.build(name, classes=1000, scale=1, side=side)
        extra = {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
        published = zoo.get_model(name, weights=None, **extra)
    assert _shapes(ours) == _shapes(published)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("regnet_x_400mf", 5.496), ("regnet_y_400mf", 4.344), ("regnet_x_3_2gf", 15.296)],
)
def test_regnet_at_scale_one_has_its_published_size(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = vision.build(name, classes=1000, scale=1, side=224)
    assert _count(model) / 1e6 == pytest.approx(millions, abs=1e-3)


def test_shrinking_divides_the_width_and_keeps_the_depth() -> None:
    full = zoo.resnet34(num_classes=10)
    small = vision.build("resnet34", classes=10, scale=1 / 8, side=32)
    assert _shapes(small).keys() == _shapes(full).keys()
    assert small.get_parameter("layer4.0.conv1.weight").shape == (64, 32, 3, 3)
    assert small.get_parameter("fc.weight").shape == (10, 64)


@pytest.mark.parametrize("scale", [0.05, 0.5, 0.75])
@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "maxvit_t", "inception_v3", "swin_v2_t"])
def test_any_scale_gives_a_model_that_fits_its_images(name: str, scale: float) -> None:
    side = vision.image_side(name, scale, batch_size=2)
    with torch.device("meta"):
        model = vision.build(name, classes=3, scale=scale, side=side)
        assert model.train()(torch.empty(2, 3, side, side)).shape == (2, 3)


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "inception_v3", "mobilenet_v2"])
def test_a_batch_of_one_image_can_be_learnt_from(name: str) -> None:
    side = vision.image_side(name, CPU_SCALE, batch_size=1)
    model = vision.build(name, classes=3, scale=CPU_SCALE, side=side).train()
    assert bool(model(torch.rand(1, 3, side, side)).isfinite().all())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("bert-base", 109_514_298),
        ("gpt2", 124_439_808),
        ("opt-125m", 125_239_296),
        ("opt-350m", 331_196_416),
        ("opt-1.3b", 1_315_758_080),
        ("opt-2.7b", 2_651_596_800),
        ("bloom-560m", 559_214_592),
        ("bloom-3b", 3_002_557_440),
    ],
)
def test_language_model_at_scale_one_has_its_published_size(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = language.build(families.find(name), scale=1)
    assert _count(model) == parameters


@pytest.mark.parametrize("workload", TEXT_MODELS, ids=lambda workload: workload.name)
def test_shrunk_language_model_maps_tokens_to_logits(workload: families.Workload) -> None:
    model = language.build(workload, scale=CPU_SCALE).eval()
    tokens = torch.randint(0, 256, (2, 16))
    logits = model(tokens)
    assert logits.shape == (2, 16, 264)
    changed = tokens.clone()
    changed[:, -1] += 1
    before_the_change = torch.allclose(model(changed)[:, :-1], logits[:, :-1], atol=1e-5)
    assert before_the_change is not model.masked  # only BERT looks ahead


def test_shrinking_keeps_the_order_of_sizes() -> None:
    with torch.device("meta"):
        counts = [
            _count(language.build(families.find(name), scale=CPU_SCALE))
            for name in ("opt-125m", "opt-350m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b")
        ]
    assert counts == sorted(set(counts))


@pytest.mark.parametrize("name", ["gpt2", "opt-125m", "bloom-560m", "gpt-j-6b"])
def test_generation_is_greedy_and_as_long_as_asked(name: str) -> None:
    model = language.build(families.find(name), scale=CPU_SCALE).eval()
    prompt = torch.randint(0, 256, (3, 8))
    with torch.no_grad():
        made = model.generate(prompt, 5)
        assert made.shape == (3, 5)
        step_by_step = prompt
        for _ in range(5):
            # The end-of-text token may not come, so that every answer has the same length.
            logits = model(step_by_step)[:, -1:]
            end = model.model.generation_config.eos_token_id
            if end is not None:
                logits[..., end] = -torch.inf
            step_by_step = torch.cat([step_by_step, logits.argmax(-1)], dim=1)
    assert torch.equal(made, step_by_step[:, 8:])


@pytest.mark.parametrize(
    ("name", "scale", "asked", "length"),
    [("opt-125m", 1, None, 512), ("opt-125m", 0.125, None, 64), ("bert-base", 1, 4096, 512),
     ("gpt2", 0.001, None, 16), ("gpt2", 1, 33, 33)],
)  # fmt: skip
def test_sequence_length(name: str, scale: float, asked: int | None, length: int) -> None:
    assert language.sequence_length(families.find(name), scale, asked) == length
