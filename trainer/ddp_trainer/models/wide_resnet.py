"""The WideResNet of the Fashion-MNIST and CIFAR-10 presets: three stages of two wide blocks, no stride.

After Zagoruyko and Komodakis, "Wide Residual Networks" (2016), in the form that the presets' document uses: a narrow
stem of 16 channels, stages 16k, 32k, 64k wide (k = 10: 160, 320, 640) with a 2x2 max pooling between them, batch norm
and ReLU after every convolution, and a sum with the shortcut without an activation after it.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ddp_trainer.models import ModelConfig

STEM = 16
# From here on drawing gaps, which takes a logarithm each, saves nothing.
_RARE = 0.1


def _conv_norm_relu(in_channels: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
    )


class WideBlock(nn.Module):
    """Two 3x3 convolutions with dropout between them; a 1x1 convolution on the shortcut where channels change."""

    def __init__(self, in_channels: int, channels: int, dropout: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(_conv_norm_relu(in_channels, channels), dropout, _conv_norm_relu(channels, channels))
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != channels:
            self.shortcut = nn.Conv2d(in_channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, channels, H, W)."""
        out: Tensor = self.body(x) + self.shortcut(x)
        return out


class WideResNet(nn.Module):
    """Stem, six wide blocks, an average over the whole image, one linear layer.

    ``pool`` is the side of the averaged window from the top left corner instead of the whole image: the document
    averages 7x7, which is all of a 28x28 image's last stage, but not of a 32x32 image's.
    """

    def __init__(self, config: ModelConfig, in_channels: int, num_classes: int) -> None:
        super().__init__()
        drop = SparseDropout if config.sparse_dropout else nn.Dropout
        widths = [times * STEM * config.widen for times in (1, 2, 4)]
        self.stem = _conv_norm_relu(in_channels, STEM)
        stages: list[nn.Module] = []
        last = STEM
        for number, width in enumerate(widths):
            if number:
                stages.append(nn.MaxPool2d(2))
            stages += [WideBlock(last, width, drop(config.dropout)), WideBlock(width, width, drop(config.dropout))]
            last = width
        self.stages = nn.Sequential(*stages)
        self.pool = config.pool
        self.head = nn.Linear(last, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_channels, H, W) to logits (N, num_classes)."""
        out = self.stages(self.stem(x))
        if self.pool is not None:
            out = out[:, :, : self.pool, : self.pool]
        logits: Tensor = self.head(out.mean(dim=(2, 3)))
        return logits


def build(config: ModelConfig, in_channels: int, num_classes: int) -> nn.Module:
    """Build the network that ``config`` describes."""
    return WideResNet(config, in_channels, num_classes)


class SparseDropout(nn.Dropout):
    """``nn.Dropout`` that draws which values fall, instead of drawing for every value whether it does.

    On a CPU the draws are most of dropout's time. Where one value in a hundred falls, there is a hundredth of them to
    draw: the gaps between those that fall, which are geometric (Devroye, "Non-Uniform Random Variate Generation", 1986,
    X.2).
    """

    def forward(self, input: Tensor) -> Tensor:
        """Zero each value with probability ``p`` while training and scale the others by ``1 / (1 - p)``."""
        short = self.training and 0.0 < self.p <= _RARE and input.device.type == "cpu" and _is_dense(input)
        if not short:
            return super().forward(input)
        dropped: Tensor = _Drop.apply(input, draw_positions(input.numel(), self.p), 1.0 / (1.0 - self.p))  # type: ignore[no-untyped-call]
        return dropped


def draw_positions(count: int, probability: float) -> Tensor:
    """Return in order the indices, int64, out of ``count`` that independent draws of ``probability`` choose."""
    expected = count * probability
    drawn: list[Tensor] = []
    last = -1
    while last < count:
        gaps = torch.empty(int(expected + 6 * math.sqrt(expected)) + 16, dtype=torch.int64).geometric_(probability)
        drawn.append(gaps.cumsum(0).add_(last))
        last = int(drawn[-1][-1])
    positions = torch.cat(drawn)
    return positions[positions < count]


def _is_dense(values: Tensor) -> bool:
    """Return whether the values fill one piece of memory, in whatever order."""
    return values.is_contiguous() or (values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last))


def _scale_and_zero(values: Tensor, positions: Tensor, scale: float, strides: tuple[int, ...]) -> Tensor:
    """``values`` times ``scale`` in memory of these strides, with zeros at ``positions`` of that memory."""
    out = torch.empty_strided(values.shape, strides, dtype=values.dtype)
    torch.mul(values, scale, out=out)
    out.as_strided((out.numel(),), (1,)).index_fill_(0, positions, 0.0)
    return out


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, positions: Tensor, scale: float) -> Tensor:
        context.save_for_backward(positions)
        context.scale, context.strides = scale, x.stride()
        return _scale_and_zero(x, positions, scale, x.stride())

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (positions,) = context.saved_tensors
        return _scale_and_zero(gradients[0], positions, context.scale, context.strides), None, None
