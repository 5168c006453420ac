"""NovoGrad: SGD with momentum on gradients that are normalized per layer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class NovoGrad(torch.optim.Optimizer):
    """Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments" (2019), algorithm 1.

    For every tensor w with gradient g, where v is one number per tensor (||g||^2 at the first step)::

        v <- beta2 * v + (1 - beta2) * ||g||^2
        m <- beta1 * m + s * (g / (sqrt(v) + eps) + weight_decay * w)      s = 1 - beta1 if grad_averaging else 1
        w <- w - lr * m

    With ``grad_averaging`` m is a mean of gradients instead of a sum. The host never waits for the device, which also
    decides whether v already has a value.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_averaging: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"grad_averaging": grad_averaging})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; a closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._update(group, weights)

    def _update(self, group: dict[str, Any], weights: list[torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["exp_avg"] = torch.zeros_like(weight)
                self.state[weight]["exp_avg_sq"] = torch.zeros((), dtype=torch.float32, device=weight.device)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        means = [self.state[weight]["exp_avg"] for weight in weights]
        squares = [self.state[weight]["exp_avg_sq"] for weight in weights]

        norms = torch.stack(torch._foreach_norm(gradients)).float().square()
        old = torch.stack(squares)
        new = torch.where(old == 0, norms, old * beta2 + norms * (1.0 - beta2))
        torch._foreach_copy_(squares, list(new.unbind()))

        updates = torch._foreach_div(gradients, list((new.sqrt() + group["eps"]).unbind()))
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, updates, alpha=1.0 - beta1 if group["grad_averaging"] else 1.0)
        torch._foreach_add_(weights, means, alpha=-group["lr"])
