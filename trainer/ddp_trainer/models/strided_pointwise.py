"""Strided 1x1 convolutions of few channels as a slice and a convolution without a stride: the same numbers.

With channels last, oneDNN's backward pass of such a convolution writes past its workspace and corrupts the heap, below
8 or 16 channels by the kind of CPU (uxlfoundation/oneDNN#6035, open as of torch 2.14).
"""

from torch import Tensor, nn
from torch.nn.functional import conv2d

_SAFE_CHANNELS = 16


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
