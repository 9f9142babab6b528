"""Image models of torchvision, at their published size or shrunk.

torchvision has no width option for most of its models. A shrunk convolutional net is therefore
the published one with every channel count divided by the same number: same depth, same
connections, same kernels. Models built of attention or with channel counts of their own rules are
made by their constructors from divided widths.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torchvision.models as zoo
from torch import nn
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.regnet import BlockParams
from torchvision.models.swin_transformer import (
    PatchMerging,
    PatchMergingV2,
    SwinTransformerBlock,
    SwinTransformerBlockV2,
)

_MOST_NARROWING = 8
"""Every channel count that torchvision concatenates is a multiple of this."""

_PUBLISHED_SIDE: Mapping[str, int] = {
    "inception_v3": 299,
    "efficientnet_b1": 240,
    "efficientnet_b2": 288,
    "efficientnet_b3": 300,
    "efficientnet_b4": 380,
    "efficientnet_b5": 456,
    "efficientnet_b6": 528,
    "efficientnet_b7": 600,
    "efficientnet_v2_s": 384,
    "efficientnet_v2_m": 480,
    "efficientnet_v2_l": 480,
    "swin_v2_t": 256,
    "swin_v2_s": 256,
    "swin_v2_b": 256,
}
_LEAST_SIDE: Mapping[str, int] = {"alexnet": 64, "inception_v3": 96, "vit_h_14": 28}
"""Below it some layer has nothing left to look at (torchvision's `min_size`, rounded up)."""


@dataclass(frozen=True, slots=True)
class _Attention:
    patch: int
    layers: int
    heads: int
    hidden: int


@dataclass(frozen=True, slots=True)
class _Windowed:
    embed: int
    third_depth: int
    window: int
    drop: float
    second_version: bool


_VIT: Mapping[str, _Attention] = {
    "vit_b_16": _Attention(16, 12, 12, 768),
    "vit_b_32": _Attention(32, 12, 12, 768),
    "vit_l_16": _Attention(16, 24, 16, 1024),
    "vit_l_32": _Attention(32, 24, 16, 1024),
    "vit_h_14": _Attention(14, 32, 16, 1280),
}
_SWIN: Mapping[str, _Windowed] = {
    "swin_t": _Windowed(96, 6, 7, 0.2, second_version=False),
    "swin_s": _Windowed(96, 18, 7, 0.3, second_version=False),
    "swin_b": _Windowed(128, 18, 7, 0.5, second_version=False),
    "swin_v2_t": _Windowed(96, 6, 8, 0.2, second_version=True),
    "swin_v2_s": _Windowed(96, 18, 8, 0.3, second_version=True),
    "swin_v2_b": _Windowed(128, 18, 8, 0.5, second_version=True),
}
_CONVNEXT: Mapping[str, tuple[int, int, float]] = {
    # first width, blocks of the third stage, stochastic depth
    "convnext_tiny": (96, 9, 0.1),
    "convnext_small": (96, 27, 0.4),
    "convnext_base": (128, 27, 0.5),
    "convnext_large": (192, 27, 0.5),
}
_SHUFFLENET: Mapping[str, tuple[int, ...]] = {
    "shufflenet_v2_x0_5": (24, 48, 96, 192, 1024),
    "shufflenet_v2_x1_0": (24, 116, 232, 464, 1024),
    "shufflenet_v2_x1_5": (24, 176, 352, 704, 1024),
    "shufflenet_v2_x2_0": (24, 244, 488, 976, 2048),
}
_REGNET: Mapping[str, tuple[int, int, float, float, int, float | None]] = {
    # depth, w_0, w_a, w_m, group width, squeeze ratio: the paper's names, torchvision's values
    "regnet_x_400mf": (22, 24, 24.48, 2.54, 16, None),
    "regnet_x_800mf": (16, 56, 35.73, 2.28, 16, None),
    "regnet_x_1_6gf": (18, 80, 34.01, 2.25, 24, None),
    "regnet_x_3_2gf": (25, 88, 26.31, 2.25, 48, None),
    "regnet_x_8gf": (23, 80, 49.56, 2.88, 120, None),
    "regnet_x_16gf": (22, 216, 55.59, 2.1, 128, None),
    "regnet_x_32gf": (23, 320, 69.86, 2.0, 168, None),
    "regnet_y_400mf": (16, 48, 27.89, 2.09, 8, 0.25),
    "regnet_y_800mf": (14, 56, 38.84, 2.4, 16, 0.25),
    "regnet_y_1_6gf": (27, 48, 20.71, 2.65, 24, 0.25),
    "regnet_y_3_2gf": (21, 80, 42.63, 2.66, 24, 0.25),
    "regnet_y_8gf": (17, 192, 76.82, 2.19, 56, 0.25),
    "regnet_y_16gf": (18, 200, 106.23, 2.48, 112, 0.25),
    "regnet_y_32gf": (20, 232, 115.89, 2.53, 232, 0.25),
    "regnet_y_128gf": (27, 456, 160.83, 2.52, 264, 0.25),
}


def image_side(name: str, scale: float, batch_size: int) -> int:
    """Pixels a side of the images that a model reads at a scale.

    The published side at scale 1, else that times the scale in steps of 32, and never less than
    the model's layers need; twice that for a batch of one, because batch normalisation needs more
    than one value a channel.
    """
    published = _PUBLISHED_SIDE.get(name, 224)
    if scale == 1:
        return published
    step = 28 if name == "vit_h_14" else 32
    least = _LEAST_SIDE.get(name, step) * (2 if batch_size == 1 else 1)
    return max(least, round(published * scale / step) * step)


def narrowing(name: str, scale: float) -> int:
    """By what widths are divided at a scale: the power of two nearest to 1/scale, at most 8.

    SqueezeNet's bottlenecks of 16 channels let nothing through when they are left with two.
    """
    most = 4 if name.startswith("squeezenet") else _MOST_NARROWING
    return min(most, 1 << round(math.log2(1 / scale)))


def build(name: str, *, classes: int, scale: float, side: int) -> nn.Module:
    """A model with random weights, on torch's current default device.

    Args:
        name: torchvision's name of the model.
        classes: Number of outputs.
        scale: 1 is the published size; see `narrowing` for what less does to the width.
        side: Pixels a side of its images, see `image_side`.

    Returns:
        A module that maps ``[N, 3, side, side]`` to ``[N, classes]``.
    """
    by = narrowing(name, scale)
    for table, construct in _CONSTRUCTED:
        if name in table:
            return construct(name, by, classes, side)
    if by == 1:
        return _published(name, classes)
    device = torch.get_default_device()
    with torch.device("meta"):
        model = _narrowed(_published(name, classes), by)
    model.to_empty(device=device)
    _initialise(model)
    return model


def _published(name: str, classes: int) -> nn.Module:
    if name in _REGNET:
        return _regnet(name, classes)
    # Auxiliary heads would need a second loss; without init_weights these two warn.
    extra = {"aux_logits": False, "init_weights": True} if name in _WITH_AUXILIARY else {}
    model: nn.Module = zoo.get_model(name, weights=None, num_classes=classes, **extra)
    return model


_WITH_AUXILIARY = frozenset({"googlenet", "inception_v3"})


def _regnet(name: str, classes: int) -> nn.Module:
    depth, w_0, w_a, w_m, group_width, squeeze = _REGNET[name]
    with torch.device("cpu"):  # the widths are computed with tensors, whose values are needed
        blocks = BlockParams.from_init_params(depth, w_0, w_a, w_m, group_width, se_ratio=squeeze)
    model: nn.Module = zoo.RegNet(blocks, num_classes=classes)
    return model


def _narrowed(model: nn.Module, by: int) -> nn.Module:
    """Divide the channels of each layer but the input's and the output's."""
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    last = layers[-1]
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            made = _narrow(layer, by, keep_output=layer is last)
            if made is not None:
                setattr(parent, name, made)
    return model


def _narrow(layer: nn.Module, by: int, *, keep_output: bool) -> nn.Module | None:
    def part(channels: int) -> int:
        return channels if channels == 3 else max(1, round(channels / by))

    if isinstance(layer, nn.Conv2d):
        wide_in, wide_out = layer.in_channels, layer.out_channels
        inputs = part(wide_in)
        outputs = wide_out if keep_output else part(wide_out)
        depthwise = layer.groups == wide_in
        groups = inputs if depthwise else math.gcd(layer.groups, inputs, outputs)
        return nn.Conv2d(
            inputs,
            outputs,
            (layer.kernel_size[0], layer.kernel_size[1]),
            (layer.stride[0], layer.stride[1]),
            layer.padding if isinstance(layer.padding, str) else tuple(layer.padding),  # type: ignore[arg-type]
            (layer.dilation[0], layer.dilation[1]),
            groups,
            bias=layer.bias is not None,
        )
    if isinstance(layer, nn.BatchNorm2d):
        # torch's default momentum: MNASNet's own, 0.0003, needs thousands of steps to settle.
        return nn.BatchNorm2d(part(layer.num_features), layer.eps)
    if isinstance(layer, nn.Linear):
        outputs = layer.out_features if keep_output else part(layer.out_features)
        return nn.Linear(part(layer.in_features), outputs, bias=layer.bias is not None)
    return None


def _initialise(model: nn.Module) -> None:
    """He initialisation, which also the nets without batch normalisation learn from."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d | nn.Linear):
            module.reset_parameters()


def _vit(name: str, by: int, classes: int, side: int) -> nn.Module:
    spec = _VIT[name]
    heads = max(1, spec.heads // by)
    hidden = spec.hidden // spec.heads * heads
    model: nn.Module = zoo.VisionTransformer(
        side, spec.patch, spec.layers, heads, hidden, 4 * hidden, num_classes=classes
    )
    return model


def _swin(name: str, by: int, classes: int, _side: int) -> nn.Module:
    spec = _SWIN[name]
    heads = max(1, spec.embed // 32 // by)
    model: nn.Module = zoo.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=max(8, spec.embed // by) // heads * heads,
        depths=[2, 2, spec.third_depth, 2],
        num_heads=[heads * 2**stage for stage in range(4)],
        window_size=[spec.window, spec.window],
        stochastic_depth_prob=spec.drop,
        num_classes=classes,
        block=SwinTransformerBlockV2 if spec.second_version else SwinTransformerBlock,
        downsample_layer=PatchMergingV2 if spec.second_version else PatchMerging,
    )
    return model


def _convnext(name: str, by: int, classes: int, _side: int) -> nn.Module:
    first, third_depth, drop = _CONVNEXT[name]
    widths = [first * 2**stage // by for stage in range(4)]
    blocks = [
        CNBlockConfig(widths[0], widths[1], 3),
        CNBlockConfig(widths[1], widths[2], 3),
        CNBlockConfig(widths[2], widths[3], third_depth),
        CNBlockConfig(widths[3], None, 3),
    ]
    model: nn.Module = zoo.ConvNeXt(blocks, stochastic_depth_prob=drop, num_classes=classes)
    return model


def _shufflenet(name: str, by: int, classes: int, _side: int) -> nn.Module:
    # Each stage is cut into two equal branches, so its channels must be even.
    channels = [max(2, width // by // 2 * 2) for width in _SHUFFLENET[name]]
    model: nn.Module = zoo.ShuffleNetV2([4, 8, 4], channels, num_classes=classes)
    return model


def _maxvit(_name: str, by: int, classes: int, side: int) -> nn.Module:
    model: nn.Module = zoo.MaxVit(
        input_size=(side, side),
        stem_channels=64 // by,
        partition_size=side // 32,
        block_channels=[64 // by, 128 // by, 256 // by, 512 // by],
        block_layers=[2, 2, 5, 2],
        head_dim=32 // by,
        stochastic_depth_prob=0.2,
        num_classes=classes,
    )
    return model


_CONSTRUCTED: tuple[tuple[Mapping[str, object], Callable[[str, int, int, int], nn.Module]], ...] = (
    (_VIT, _vit),
    (_SWIN, _swin),
    (_CONVNEXT, _convnext),
    (_SHUFFLENET, _shufflenet),
    ({"maxvit_t": None}, _maxvit),
)
