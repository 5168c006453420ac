"""Optimisers by name, learning-rate scaling with the world size, and the schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_trainer.config.options import option
from ddp_trainer.errors import require

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser and what happens to gradients before it."""

    name: str = option("sgd", "update rule", flag="--optimizer", choices=("sgd", "adamw", "novograd"))
    lr: float = option(0.1, "learning rate of one process, before scaling with the world size")
    lr_scaling: str = option(
        "none",
        "learning rate times the world size (linear), times its square root (sqrt), or not",
        choices=("none", "linear", "sqrt"),
    )
    momentum: float = option(0.9, "momentum (sgd)")
    nesterov: bool = option(False, "Nesterov's momentum (sgd)")
    beta1: float | None = option(None, "decay of the mean of gradients (adamw, default 0.9; novograd, default 0.95)")
    beta2: float | None = option(
        None, "decay of the mean of squared gradients (adamw, default 0.999; novograd, default 0.98)"
    )
    grad_averaging: bool = option(True, "take the mean of gradients instead of their sum (novograd)")
    weight_decay: float = option(0.0, "weight decay")
    clip_norm: float | None = option(None, "largest norm of the gradients; longer ones are shortened to it")
    accumulate: int = option(1, "batches whose gradients make up one step")
    label_smoothing: float = option(0.0, "share of the target spread over all classes")
    ema_decay: float | None = option(
        None, "decay a step of an average of the weights, which validates and is saved in their place; none: no average"
    )

    def __post_init__(self) -> None:
        require(
            self.lr > 0 and math.isfinite(self.lr), "optim.lr", f"{self.lr} is not positive", "give for example 0.1"
        )
        require(
            0.0 <= self.momentum < 1.0, "optim.momentum", f"{self.momentum} is not in [0, 1)", "give for example 0.9"
        )
        require(not self.nesterov or self.momentum > 0, "optim.nesterov", "needs a momentum", "give --momentum 0.9")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(
                value is None or 0.0 <= value < 1.0,
                f"optim.{name}",
                f"{value} is not in [0, 1)",
                "give for example 0.9",
            )
        require(self.weight_decay >= 0, "optim.weight_decay", f"{self.weight_decay} is negative", "give 0 or more")
        require(
            self.clip_norm is None or self.clip_norm > 0,
            "optim.clip_norm",
            f"{self.clip_norm} is not positive",
            "give for example 1.0, or none",
        )
        require(self.accumulate >= 1, "optim.accumulate", f"{self.accumulate} is less than one batch", "give 1 or more")
        require(
            0.0 <= self.label_smoothing < 1.0,
            "optim.label_smoothing",
            f"{self.label_smoothing} is not in [0, 1)",
            "give for example 0.1",
        )
        require(
            self.ema_decay is None or 0.0 < self.ema_decay < 1.0,
            "optim.ema_decay",
            f"{self.ema_decay} is not between 0 and 1",
            "give for example 0.999, or none",
        )

    @property
    def betas(self) -> tuple[float, float]:
        """``beta1`` and ``beta2``, with the optimiser's own defaults."""
        first, second = (0.95, 0.98) if self.name == "novograd" else (0.9, 0.999)
        return first if self.beta1 is None else self.beta1, second if self.beta2 is None else self.beta2


def build_optimizer(config: OptimConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser for ``parameters``; fused kernels, which update all of them in one pass, where torch has them."""
    import torch

    from ddp_trainer.optim.novograd import NovoGrad

    if config.name == "novograd":
        return NovoGrad(
            parameters,
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            grad_averaging=config.grad_averaging,
        )
    if config.name == "adamw":
        return torch.optim.AdamW(
            parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
    return torch.optim.SGD(
        parameters,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
        fused=True,
    )


# By which of these its groups hold, an optimiser's state says whose it is.
_KINDS = frozenset(("momentum", "amsgrad", "grad_averaging"))  # sgd, adamw, novograd


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take up an optimiser's saved state; its settings stay those of this run.

    But for the learning rate, which is the last step's until the next one sets it. Raises ValueError or KeyError where
    the state is another optimiser's, or of other parameters.
    """
    settings = [
        {name: value for name, value in group.items() if name not in ("params", "lr")}
        for group in optimizer.param_groups
    ]
    for own, saved in zip(settings, state["param_groups"], strict=True):
        if _KINDS & own.keys() != _KINDS & saved.keys():
            raise ValueError(f"the optimiser is {type(optimizer).__name__}, and the state is another one's")
    # Given to torch with the state: on which device a step's number belongs depends on whether the optimiser is fused.
    groups = [{**saved, **own} for own, saved in zip(settings, state["param_groups"], strict=True)]
    optimizer.load_state_dict({**state, "param_groups": groups})


def lr_scale(config: OptimConfig, world_size: int) -> float:
    """The factor by which the learning rate grows with the global batch.

    Linear: Goyal et al., "Accurate, Large Minibatch SGD" (2017). Square root: Krizhevsky, "One weird trick" (2014).
    """
    if config.lr_scaling == "linear":
        return float(world_size)
    return math.sqrt(world_size) if config.lr_scaling == "sqrt" else 1.0
