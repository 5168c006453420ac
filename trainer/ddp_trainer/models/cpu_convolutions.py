"""Replacements for convolutions that are slow or unsafe on CPUs; weights keep their names and shapes.

ImageNet's networks reduce a 32x32 image to 2x2 pixels and then to one. There a padded 3x3 convolution multiplies most
of its weights by zeros. Three cases are matrix products, which are faster: the output is one pixel; the kernel is one
pixel; each output pixel depends on each input pixel. Results and gradients are equal up to the order of additions.

With channels last, oneDNN's backward pass of a strided 1x1 convolution of few channels writes past its workspace and
corrupts the heap, below 8 or 16 channels depending on the CPU (uxlfoundation/oneDNN#6035, open as of torch 2.14). A
slice followed by a convolution without a stride gives the same numbers.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

# Largest image, in pixels, for which a kernel of one pixel is computed as a matrix product.
_MAX_PIXELS = 64
# Largest number of pairs of an input and an output pixel for one matrix of all of them.
_MAX_PAIRS = 16
# Input channels from which oneDNN's backward pass is safe.
_SAFE_CHANNELS = 16


class SmallMapConv2d(nn.Conv2d):
    """A convolution that is computed as a matrix product on a CPU for small images."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, H', W')."""
        if input.device.type != "cpu":
            return super().forward(input)
        height, width = input.shape[2:]
        kernel = self.kernel_size
        stride = self.stride
        padding = self.padding
        assert not isinstance(padding, str)
        out_height = (height + 2 * padding[0] - kernel[0]) // stride[0] + 1
        out_width = (width + 2 * padding[1] - kernel[1]) // stride[1] + 1
        if out_height == out_width == 1:
            return self._one_pixel(input)
        if kernel == (1, 1) and stride == (1, 1) and padding == (0, 0) and height * width <= _MAX_PIXELS:
            pixels = linear(input.permute(0, 2, 3, 1), _as_matrix(self.weight), self.bias)
            return pixels.permute(0, 3, 1, 2)
        if height * width * out_height * out_width <= _MAX_PAIRS:
            pairs = _select_weights(height, width, out_height, out_width, kernel, stride, padding)
            if pairs is not None:
                return self._every_pair(input, pairs, out_height, out_width)
        return super().forward(input)

    def _one_pixel(self, input: Tensor) -> Tensor:
        """Compute the single output pixel from the weights that cover the image, without those over its border."""
        assert not isinstance(self.padding, str)
        top, left = self.padding
        kernel_height, kernel_width = self.kernel_size
        covered = input[:, :, : max(0, kernel_height - top), : max(0, kernel_width - left)]
        if self.kernel_size == (1, 1):
            matrix = _as_matrix(self.weight)
        else:
            matrix = self.weight[:, :, top : top + covered.shape[2], left : left + covered.shape[3]].flatten(1)
        return linear(covered.flatten(1), matrix, self.bias).view(len(input), -1, 1, 1)

    def _every_pair(self, input: Tensor, pairs: Tensor, height: int, width: int) -> Tensor:
        """Multiply by one matrix from all input to all output pixels and channels; it repeats each weight."""
        pixels_out = height * width
        pixels_in = input.shape[2] * input.shape[3]
        # A product with zeros and ones selects the weights: its gradient is a product too, not a scattered sum.
        selection = pairs.to(self.weight)
        chosen = (self.weight.flatten(2) @ selection).view(self.out_channels, self.in_channels, pixels_out, pixels_in)
        matrix = chosen.permute(2, 0, 3, 1).reshape(pixels_out * self.out_channels, pixels_in * self.in_channels)
        bias = None if self.bias is None else self.bias.repeat(pixels_out)
        pixels = linear(input.permute(0, 2, 3, 1).flatten(1), matrix, bias)
        return pixels.view(len(input), height, width, -1).permute(0, 3, 1, 2)


class _AsMatrix(torch.autograd.Function):
    """A kernel of one pixel without its last two dimensions; the gradient has the weight's strides.

    With channels last the strides would differ although the memory order is the same, and DDP would warn and copy.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.size = weight.size()
        ctx.stride = weight.stride()
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
def _select_weights(
    height: int,
    width: int,
    out_height: int,
    out_width: int,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> Tensor | None:
    """Return, for each pair of an output and an input pixel, the weight between them as a column of zeros and a one.

    The shape is (kernel pixels, output pixels * input pixels). None if an output pixel does not depend on all input
    pixels.
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
    """Make the convolutions of ``model`` compute matrix products where possible; parameters stay the same objects."""
    for module in model.modules():
        plain = type(module) is nn.Conv2d and module.groups == 1 and module.dilation == (1, 1)
        if plain and not isinstance(module.padding, str) and module.padding_mode == "zeros":
            module.__class__ = SmallMapConv2d


class SlicedConv2d(nn.Conv2d):
    """A 1x1 convolution that applies its stride by a slice of the input."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, H', W')."""
        return conv2d(input[:, :, :: self.stride[0], :: self.stride[1]], self.weight, self.bias)


def slice_before_narrow_convolutions(model: nn.Module) -> None:
    """Avoid oneDNN's defect in a ``model`` with channels last on a CPU; parameters stay the same objects."""
    for module in model.modules():
        if type(module) is not nn.Conv2d or module.in_channels >= _SAFE_CHANNELS or module.groups != 1:
            continue
        if module.kernel_size == (1, 1) and module.stride != (1, 1) and module.padding in ((0, 0), "valid"):
            module.__class__ = SlicedConv2d
