"""A replacement for convolutions that are unsafe on CPUs; weights keep their names and shapes.

With channels last, oneDNN's backward pass of a strided 1x1 convolution of few channels writes past its workspace and
corrupts the heap, below 8 or 16 channels depending on the CPU (uxlfoundation/oneDNN#6035, open as of torch 2.14). A
slice followed by a convolution without a stride gives the same numbers.
"""

from torch import Tensor, nn
from torch.nn.functional import conv2d

# Input channels from which oneDNN's backward pass is safe.
_SAFE_CHANNELS = 16


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
