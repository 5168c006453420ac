"""NovoGrad: SGD with momentum on gradients that are normalized per layer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class NovoGrad(torch.optim.Optimizer):
    """Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments" (2019), algorithm 1.

    For every tensor w with gradient g, where v is one number per tensor (||g||^2 at the first step)::

        v <- beta2 * v + (1 - beta2) * ||g||^2
        m <- beta1 * m + s * (g / (sqrt(v) + eps) + weight_decay * w)      s = 1 - beta1 if grad_averaging else 1
        w <- w - lr * m

    With ``grad_averaging`` m is a mean of gradients instead of a sum. The host never waits for the device, which also
    decides whether v already has a value, and on a GPU the number of launches does not depend on the number of tensors.
    As torch's fused optimizers it supports a gradient scaler: the device skips a step with non-finite gradients.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_averaging: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
        }
        super().__init__(params, defaults)
        # Numbers of elements on the device, copied once.
        self._lengths: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; a closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._update(group, weights)

    def _update(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["exp_avg"] = torch.zeros_like(weight)
                self.state[weight]["exp_avg_sq"] = torch.zeros((), dtype=torch.float32, device=weight.device)
        means = [self.state[weight]["exp_avg"] for weight in weights]
        squares = [self.state[weight]["exp_avg_sq"] for weight in weights]
        gradients, skip = self._gradients(weights)
        old = torch.stack(squares)
        norms = torch.stack(torch._foreach_norm(gradients)).float().square()
        new = torch.where(old == 0, norms, old * beta2 + norms * (1.0 - beta2))
        updates = self._divide(gradients, new.sqrt() + group["eps"])
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        decay: Any = beta1
        moves = means
        if skip is not None:
            new = torch.where(skip, old, new)
            decay = torch.where(skip, 1.0, beta1)
            updates = _without(updates, skip)
        torch._foreach_mul_(means, decay)
        torch._foreach_add_(means, updates, alpha=1.0 - beta1 if group["grad_averaging"] else 1.0)
        if skip is not None:
            moves = list(torch._foreach_mul(means, torch.where(skip, 0.0, 1.0)))
        torch._foreach_add_(weights, moves, alpha=-lr)
        torch._foreach_copy_(squares, list(new.unbind()))

    def _divide(self, tensors: list[Tensor], divisors: Tensor) -> list[Tensor]:
        """Divide each tensor by its number.

        Torch needs one launch for many tensors if the divisors have the tensors' shapes, so on a GPU the numbers are
        first expanded. A CPU has no launches, and expanding would only cost a pass over the memory.
        """
        if not _launches(divisors.device):
            return list(torch._foreach_div(tensors, list(divisors.unbind())))
        sizes = tuple(tensor.numel() for tensor in tensors)
        if sizes not in self._lengths:
            self._lengths[sizes] = torch.tensor(sizes, device=divisors.device)
        spread = torch.repeat_interleave(divisors, self._lengths[sizes], output_size=sum(sizes))
        return list(torch._foreach_div(tensors, _views(spread, tensors)))

    def _gradients(self, weights: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """Return the unscaled gradients, and whether to skip this step; None without a gradient scaler."""
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if scale is not None:
            gradients = list(torch._foreach_div(gradients, scale))
        return gradients, None if found_inf is None else found_inf != 0


def _views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Split ``flat`` into consecutive parts with the shapes and layouts of the tensors ``like``."""
    views = []
    begin = 0
    for tensor in like:
        dense = tensor.is_contiguous() or (
            tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        )
        part = flat[begin : begin + tensor.numel()]
        views.append(part.as_strided(tensor.shape, tensor.stride()) if dense else part.view(tensor.shape))
        begin += tensor.numel()
    return views


def _launches(device: torch.device) -> bool:
    """Return whether each operation costs a launch."""
    return device.type != "cpu"


def _without(tensors: list[Tensor], skip: Tensor) -> list[Tensor]:
    """Return copies of the tensors, or zeros if ``skip`` is true, also for NaN."""
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), device=skip.device, dtype=tensors[0].dtype)
    views = _views(flat, tensors)
    torch._foreach_copy_(views, tensors)
    flat.masked_fill_(skip, 0.0)
    return views
