"""Batch norm over the batches of all ranks together.

torch's SyncBatchNorm computes on GPUs only, where the host waits for the device in every layer, and torch.compile can't
follow it. This one has the same parameters and buffers, so that a state dict moves between ``BatchNorm2d``, torch's and
this one.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import batch_norm


def convert(module: nn.Module) -> nn.Module:
    """``module`` with all its batch norms synchronised over the ranks.

    Needs a process group. Parameters and buffers stay the same objects.
    """
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        return SyncBatchNorm(module)
    for name, child in module.named_children():
        setattr(module, name, convert(child))
    return module


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Takes the place of a batch norm; normalises with mean and variance of all ranks' samples while training."""

    def __init__(self, old: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats)
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(self, name, getattr(old, name))
        self.training = old.training

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm takes (N, C, ...), not {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (N, C, ...); every rank must call this equally often, with at least one value a channel."""
        if not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(input)
        self._check_input_dim(input)
        kind = _statistics_type(input)
        weight = self.weight if self.affine else input.new_ones(self.num_features, dtype=kind)
        bias = self.bias if self.affine else input.new_zeros(self.num_features, dtype=kind)
        output, mean, var, count = _Normalise.apply(input, weight, bias, self.eps)  # type: ignore[no-untyped-call]
        if self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                assert self.num_batches_tracked is not None
                self.num_batches_tracked.add_(1)
                # A number or a tensor: the host does not wait to know how many batches there were.
                share: Any = self.momentum
                if share is None:
                    share = self.num_batches_tracked.to(mean.dtype).reciprocal()
                self.running_mean.lerp_(mean, share)
                # The running variance is the unbiased one, as batch norm has it.
                self.running_var.lerp_(var * (count / (count - 1.0).clamp(min=1.0)), share)
        normalised: Tensor = output
        return normalised


def _statistics_type(x: Tensor) -> torch.dtype:
    """The type of mean and variance: of more digits than half a number has, and of no fewer than ``x``."""
    return torch.promote_types(x.dtype, torch.float32)


class _Normalise(torch.autograd.Function):
    """Ioffe and Szegedy, "Batch Normalization" (2015): forward and gradient, with the sums taken over all ranks."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        kind = _statistics_type(x)
        if torch.compiler.is_compiling():  # into a kernel with what is beside it
            own_var, own_mean = torch.var_mean(x.to(kind), [0, *range(2, x.dim())], correction=0)
        else:
            # What BatchNorm2d's own kernel takes; torch.var_mean needs up to thirty times as long with channels last.
            # On a GPU that reads halves and adds up in fp32.
            own_mean, own_var = torch.batch_norm_update_stats(x if x.is_cuda else x.to(kind), None, None, 0.0)
        own_count = own_mean.new_full((1,), float(x.numel() // x.shape[1]))
        # Each rank's row of a table, of which the others know nothing: the sum is exact, and one message for all ranks.
        channels, rank = x.shape[1], dist.get_rank()
        gathered = own_mean.new_zeros(dist.get_world_size(), 2 * channels + 1)
        torch.cat([own_mean, own_var, own_count], out=gathered[rank])
        dist.all_reduce(gathered)
        means, variances, counts = gathered[:, :channels], gathered[:, channels:-1], gathered[:, -1:]
        # Variances of parts are put together with the spread of their means: subtracting squares would cancel digits.
        count = counts.sum()
        shares = counts / count
        mean = (shares * means).sum(0)
        var = (shares * (variances + (means - mean).square())).sum(0)
        # As in evaluation, mean and variance are given: torch's own kernel, in any memory layout.
        output = batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
        context.save_for_backward(x, weight, mean, var, count)
        context.eps = eps
        context.mark_non_differentiable(mean, var, count)
        return output, mean, var, count

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """With xhat = (x - mean) / sigma and sums over all ranks' N values of a channel::

        dx = weight / sigma * (dy - sum(dy) / N - xhat * sum(dy * xhat) / N)

        The parameters' gradients stay this rank's own; DDP averages them.
        """
        x, weight, mean, var, count = context.saved_tensors
        inverse = torch.rsqrt(var + context.eps)
        # A CPU's kernel takes the variance, a GPU's its inverse root.
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
