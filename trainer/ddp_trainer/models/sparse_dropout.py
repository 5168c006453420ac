"""Dropout that draws which values fall, instead of drawing for every value whether it does.

On a CPU the draws are most of dropout's time. Where one value in a hundred falls, there is a hundredth of them to draw:
the gaps between those that fall, which are geometric (Devroye, "Non-Uniform Random Variate Generation", 1986, X.2).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

# From here on drawing gaps, which takes a logarithm each, saves nothing.
_RARE = 0.1


class SparseDropout(nn.Dropout):
    """``nn.Dropout``, the short way on CPUs where few values fall."""

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
