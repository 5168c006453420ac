"""Replacements of layers that keep the names and shapes of weights, for batch norm over ranks and convolutions on CPUs.

torch's SyncBatchNorm runs on GPUs only, synchronizes the host with the device in every layer, and breaks
torch.compile's graph. This one has the same parameters and buffers: state dicts are interchangeable with those of
``BatchNorm2d`` and torch's SyncBatchNorm.

With channels last, oneDNN's backward pass of a strided 1x1 convolution of few channels writes past its workspace and
corrupts the heap, below 8 or 16 channels depending on the CPU (uxlfoundation/oneDNN#6035, open as of torch 2.14). A
slice followed by a convolution without a stride gives the same numbers.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d

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


def convert(module: nn.Module) -> nn.Module:
    """Replace all batch norms of ``module`` by :class:`SyncBatchNorm` and return the module.

    Parameters and buffers stay the same objects. Training needs a process group.
    """
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        return SyncBatchNorm(module)
    for name, child in module.named_children():
        setattr(module, name, convert(child))
    return module


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A batch norm that normalizes with mean and variance of all ranks' samples in training."""

    def __init__(self, old: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats)
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(self, name, getattr(old, name))
        self.training = old.training

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm expects a shape of (N, C, ...), got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize (N, C, ...). Every rank must make the same number of calls, with at least one value per channel."""
        if not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(input)
        self._check_input_dim(input)
        kind = _statistics_type(input)
        weight = self.weight if self.affine else input.new_ones(self.num_features, dtype=kind)
        bias = self.bias if self.affine else input.new_zeros(self.num_features, dtype=kind)
        output, mean, var, count = _Normalise.apply(input, weight, bias, self.eps)  # type: ignore[no-untyped-call]
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                # A tensor without a fixed momentum: reading the count would synchronize the host with the device.
                share: Any = self.momentum
                if share is None:
                    share = self.num_batches_tracked.to(mean.dtype).reciprocal()
                self.running_mean.lerp_(mean, share)
                # As in torch's batch norm, the running variance is the unbiased one.
                self.running_var.lerp_(var * (count / (count - 1.0).clamp(min=1.0)), share)
        normalized: Tensor = output
        return normalized


def _statistics_type(x: Tensor) -> torch.dtype:
    """Return the type of mean and variance: float32, or that of ``x`` if it is wider."""
    return torch.promote_types(x.dtype, torch.float32)


class _Normalise(torch.autograd.Function):
    """Forward and gradient of Ioffe and Szegedy, "Batch Normalization" (2015), with sums over all ranks."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        kind = _statistics_type(x)
        if torch.compiler.is_compiling():  # torch.compile fuses it with neighbouring operations
            own_var, own_mean = torch.var_mean(x.to(kind), [0, *range(2, x.dim())], correction=0)
        else:
            # BatchNorm2d's own kernel: torch.var_mean is up to thirty times slower with channels last. On a GPU the
            # kernel reads half precision and accumulates in fp32.
            own_mean, own_var = torch.batch_norm_update_stats(x if x.is_cuda else x.to(kind), None, None, 0.0)
        own_count = own_mean.new_full((1,), float(x.numel() // x.shape[1]))
        # A table with a row per rank, zero in the rows of other ranks: their sum is exact, in one all-reduce.
        channels = x.shape[1]
        rank = dist.get_rank()
        gathered = own_mean.new_zeros(dist.get_world_size(), 2 * channels + 1)
        torch.cat([own_mean, own_var, own_count], out=gathered[rank])
        dist.all_reduce(gathered)
        means = gathered[:, :channels]
        variances = gathered[:, channels:-1]
        counts = gathered[:, -1:]
        # Total variance = mean of the variances + variance of the means. Subtracting squares would lose digits.
        count = counts.sum()
        shares = counts / count
        mean = (shares * means).sum(0)
        var = (shares * (variances + (means - mean).square())).sum(0)
        # With given mean and variance, as in evaluation, torch's kernel supports any memory layout.
        output = batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
        context.save_for_backward(x, weight, mean, var, count)
        context.eps = eps
        context.mark_non_differentiable(mean, var, count)
        return output, mean, var, count

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient, with xhat = (x - mean) / sigma and sums over all ranks' N values of a channel::

        dx = weight / sigma * (dy - sum(dy) / N - xhat * sum(dy * xhat) / N)

        The parameters' gradients are those of this rank; DDP averages them.
        """
        x, weight, mean, var, count = context.saved_tensors
        inverse = torch.rsqrt(var + context.eps)
        # The CPU kernel reads the variance, the GPU kernel its inverse square root.
        _, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
            gradients[0], x, weight, mean, var, mean, inverse, False, context.eps, [False, True, True]
        )
        sums = torch.cat([dbias, dweight]).to(mean.dtype)
        dist.all_reduce(sums)
        sum_dy, sum_dy_xhat = sums.div_(count).view(2, -1).unbind(0)
        # dx is linear in x and in dy: slope * x + offset + scale * dy.
        scale = weight.to(mean.dtype) * inverse
        slope = -scale * inverse * sum_dy_xhat
        offset = -scale * sum_dy - slope * mean
        shape = [1, -1] + [1] * (x.dim() - 2)
        dx = torch.addcmul(offset.view(shape).to(x.dtype), x, slope.view(shape).to(x.dtype))
        dx.addcmul_(gradients[0], scale.view(shape).to(dx.dtype))
        return dx, dweight, dbias, None
