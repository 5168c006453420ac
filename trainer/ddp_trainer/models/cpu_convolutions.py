"""Convolutions that CPUs do badly, done in another way; weights keep their names and shapes.

ImageNet's networks shrink a 32x32 image to 2x2 pixels and then to one. There a padded 3x3 convolution multiplies most
of its weights by zeros, and its kernel has none of the many pixels that it is good at. Three cases are products of
matrices, which are many times faster: one pixel comes out; the kernel is one pixel; every pixel that comes out sees
every pixel that goes in. The result is the same, in another order of additions, and so are the gradients.

With channels last, oneDNN's backward pass of a strided 1x1 convolution of few channels writes past its workspace and
corrupts the heap, below 8 or 16 channels by the kind of CPU (uxlfoundation/oneDNN#6035, open as of torch 2.14). A slice
and a convolution without a stride give the same numbers.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

# Pixels an image may have for a kernel of one pixel to be a plain matrix product, and pairs of pixels, in and out.
_PIXELS, _PAIRS = 64, 16
_SAFE_CHANNELS = 16


class SmallMapConv2d(nn.Conv2d):
    """A convolution that takes the short way on a CPU where there is one, and else is an ordinary one."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, H', W')."""
        if input.device.type != "cpu":
            return super().forward(input)
        height, width = input.shape[2:]
        kernel, stride, padding = self.kernel_size, self.stride, self.padding
        assert not isinstance(padding, str)
        out_height = (height + 2 * padding[0] - kernel[0]) // stride[0] + 1
        out_width = (width + 2 * padding[1] - kernel[1]) // stride[1] + 1
        if out_height == out_width == 1:
            return self._one_pixel(input)
        if kernel == (1, 1) and stride == (1, 1) and padding == (0, 0) and height * width <= _PIXELS:
            pixels = linear(input.permute(0, 2, 3, 1), _as_matrix(self.weight), self.bias)
            return pixels.permute(0, 3, 1, 2)
        if height * width * out_height * out_width <= _PAIRS:
            pairs = _pairs(height, width, out_height, out_width, kernel, stride, padding)
            if pairs is not None:
                return self._every_pair(input, pairs, out_height, out_width)
        return super().forward(input)

    def _one_pixel(self, input: Tensor) -> Tensor:
        """The weights that meet the image, and not its border, by the pixels that they meet."""
        assert not isinstance(self.padding, str)
        (top, left), (high, wide) = self.padding, self.kernel_size
        seen = input[:, :, : max(0, high - top), : max(0, wide - left)]
        if self.kernel_size == (1, 1):
            matrix = _as_matrix(self.weight)
        else:
            matrix = self.weight[:, :, top : top + seen.shape[2], left : left + seen.shape[3]].flatten(1)
        return linear(seen.flatten(1), matrix, self.bias).view(len(input), -1, 1, 1)

    def _every_pair(self, input: Tensor, pairs: Tensor, height: int, width: int) -> Tensor:
        """A matrix from all pixels and channels to all pixels and channels; each weight stands in it several times."""
        pixels_out, pixels_in = height * width, input.shape[2] * input.shape[3]
        # The weights are chosen by a product with zeros and ones: its gradient is one, too, and not a scattered sum.
        selection = pairs.to(self.weight)
        chosen = (self.weight.flatten(2) @ selection).view(self.out_channels, self.in_channels, pixels_out, pixels_in)
        matrix = chosen.permute(2, 0, 3, 1).reshape(pixels_out * self.out_channels, pixels_in * self.in_channels)
        bias = None if self.bias is None else self.bias.repeat(pixels_out)
        pixels = linear(input.permute(0, 2, 3, 1).flatten(1), matrix, bias)
        return pixels.view(len(input), height, width, -1).permute(0, 3, 1, 2)


class _AsMatrix(torch.autograd.Function):
    """A kernel of one pixel without its last two dimensions; the gradient gets the weight's own strides back.

    They differ where channels come last, although the numbers lie in the same order, and DDP's buckets copy and warn
    then.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.size, ctx.stride = weight.size(), weight.stride()
        return weight.flatten(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if ctx.stride[:2] != (ctx.size[1], 1):
            return gradient.view(ctx.size)
        return gradient.contiguous().as_strided(ctx.size, ctx.stride)


def _as_matrix(weight: Tensor) -> Tensor:
    """Map (out, in, 1, 1) to (out, in)."""
    matrix: Tensor = _AsMatrix.apply(weight)  # type: ignore[no-untyped-call]
    return matrix


@functools.cache
def _pairs(
    height: int,
    width: int,
    out_height: int,
    out_width: int,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> Tensor | None:
    """For each pair of a pixel out and a pixel in the weight between them, as a column of zeros and a one.

    None where some pixels don't see each other. Shape (kernel pixels, pixels out * pixels in).
    """
    selection = torch.zeros(kernel[0] * kernel[1], out_height * out_width, height * width)
    for out in range(out_height * out_width):
        for into in range(height * width):
            row = into // width + padding[0] - out // out_width * stride[0]
            column = into % width + padding[1] - out % out_width * stride[1]
            if not (0 <= row < kernel[0] and 0 <= column < kernel[1]):
                return None
            selection[row * kernel[1] + column, out, into] = 1.0
    return selection.flatten(1)


def use_matrix_products(model: nn.Module) -> None:
    """Let the convolutions of ``model`` take the short way where they can; parameters stay the same objects."""
    for module in model.modules():
        plain = type(module) is nn.Conv2d and module.groups == 1 and module.dilation == (1, 1)
        if plain and not isinstance(module.padding, str) and module.padding_mode == "zeros":
            module.__class__ = SmallMapConv2d


class SlicedConv2d(nn.Conv2d):
    """A 1x1 convolution that leaves the pixels out first that its stride leaves out."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, H', W')."""
        return conv2d(input[:, :, :: self.stride[0], :: self.stride[1]], self.weight, self.bias)


def slice_before_narrow_convolutions(model: nn.Module) -> None:
    """Keep ``model``, on a CPU and with channels last, clear of oneDNN's defect; parameters stay the same objects."""
    for module in model.modules():
        if type(module) is not nn.Conv2d or module.in_channels >= _SAFE_CHANNELS or module.groups != 1:
            continue
        if module.kernel_size == (1, 1) and module.stride != (1, 1) and module.padding in ((0, 0), "valid"):
            module.__class__ = SlicedConv2d
