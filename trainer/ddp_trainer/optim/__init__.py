"""Optimisers by name, learning-rate scaling with the world size, and the schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_trainer.config.options import Settings, option
from ddp_trainer.errors import require

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OptimConfig(Settings, group="optim"):
    """The optimiser and what happens to gradients before it."""

    name: str = option("sgd", "update rule", flag="--optimizer", choices=("sgd", "adamw", "novograd"))
    lr: float = option(0.1, "learning rate of one process, before scaling with the world size", above=0)
    lr_scaling: str = option(
        "none",
        "learning rate times the world size (linear), times its square root (sqrt), or not",
        choices=("none", "linear", "sqrt"),
    )
    momentum: float = option(0.9, "momentum (sgd)", at_least=0, below=1)
    nesterov: bool = option(False, "Nesterov's momentum (sgd)")
    beta1: float | None = option(
        None, "decay of the mean of gradients (adamw, default 0.9; novograd, default 0.95)", at_least=0, below=1
    )
    beta2: float | None = option(
        None,
        "decay of the mean of squared gradients (adamw, default 0.999; novograd, default 0.98)",
        at_least=0,
        below=1,
    )
    grad_averaging: bool = option(True, "take the mean of gradients instead of their sum (novograd)")
    weight_decay: float = option(0.0, "weight decay", at_least=0)
    clip_norm: float | None = option(None, "largest norm of the gradients; longer ones are shortened to it", above=0)
    accumulate: int = option(1, "batches whose gradients make up one step", at_least=1)
    label_smoothing: float = option(0.0, "share of the target spread over all classes", at_least=0, below=1)
    ema_decay: float | None = option(
        None,
        "decay a step of an average of the weights, which validates and is saved in their place; none: no average",
        above=0,
        below=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.nesterov or self.momentum > 0, "optim.nesterov", "needs a momentum", "give --momentum 0.9")

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
            raise ValueError(f"the state is not one of {type(optimizer).__name__}")
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
