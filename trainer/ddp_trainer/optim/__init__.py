"""Optimisers by name, learning-rate scaling with the world size, and the schedule."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_trainer.config.options import Settings, option
from ddp_trainer.errors import require

if TYPE_CHECKING:
    import torch


# Update rules and courses of the learning rate, with the settings that they read.
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("optim.momentum", "optim.nesterov"),
    "adamw": ("optim.beta1", "optim.beta2"),
    "novograd": ("optim.beta1", "optim.beta2", "optim.grad_averaging"),
}
SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "constant": (),
    "cosine": ("schedule.final",),
    "polynomial": ("schedule.final", "schedule.power"),
    "step": ("schedule.step_epochs", "schedule.gamma"),
}


@dataclass(frozen=True)
class OptimConfig(Settings, group="optim"):
    """The optimiser and what happens to gradients before it."""

    name: str = option("sgd", "update rule", flag="--optimizer", choices=tuple(OPTIMIZERS))
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
    norm_bias_decay: bool = option(
        True, "decay parameters of one dimension (those of norms, and biases) like the others; false: not at all"
    )
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


def build_optimizer(config: OptimConfig, parameters: "Iterable[torch.nn.Parameter]") -> "torch.optim.Optimizer":
    """The optimiser for ``parameters``; fused kernels, which update all of them in one pass, where torch has them."""
    import torch

    from ddp_trainer.optim.novograd import NovoGrad

    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    every = list(parameters)
    groups: list[dict[str, Any]] = [{"params": every}]
    if not config.norm_bias_decay:
        small = {"params": [one for one in every if one.ndim <= 1], "weight_decay": 0.0}
        groups = [group for group in ({"params": [one for one in every if one.ndim > 1]}, small) if group["params"]]
    if config.name == "novograd":
        return NovoGrad(groups, betas=config.betas, grad_averaging=config.grad_averaging, **common)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, betas=config.betas, fused=True, **common)
    return torch.optim.SGD(groups, momentum=config.momentum, nesterov=config.nesterov, fused=True, **common)


def begin_momentum(optimizer: "torch.optim.Optimizer") -> None:
    """Begin SGD's momentum at zero, which is what torch's first step makes of it.

    Where a gradient scaler leaves that step out, the fused kernel would go on from memory that nobody has written.
    """
    import torch

    for group in optimizer.param_groups:
        if group.get("momentum"):
            for parameter in group["params"]:
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


# By which of these its groups hold, an optimiser's state says whose it is.
_KINDS = frozenset(("momentum", "amsgrad", "grad_averaging"))  # sgd, adamw, novograd


def load_optimizer(optimizer: "torch.optim.Optimizer", state: dict[str, Any]) -> None:
    """Take up an optimiser's saved state; its settings stay those of this run.

    But for the learning rate, which is the last step's until the next one sets it. Raises ValueError or KeyError where
    the state is another optimiser's, or of other parameters; :class:`UserError` where they are grouped otherwise.
    """
    ours, theirs = len(optimizer.param_groups), len(state["param_groups"])
    require(
        ours == theirs,
        "optim.norm_bias_decay",
        f"the checkpoint has its parameters in {theirs} group(s), this run in {ours}",
        f"give --norm-bias-decay {'true' if theirs == 1 else 'false'}, as then, or another --checkpoint-dir",
    )
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


@dataclass(frozen=True)
class ScheduleConfig(Settings, group="schedule"):
    """How the learning rate runs over the training."""

    name: str = option(
        "constant",
        "course after the warm-up",
        flag="--schedule",
        choices=tuple(SCHEDULES),
    )
    warmup_epochs: float = option(0.0, "epochs over which the learning rate rises linearly", at_least=0)
    warmup_start: float | None = option(
        None,
        "share of the learning rate at the first step; none: the rate before scaling",
        at_least=0,
        at_most=1,
    )
    warmup_by_node: bool = option(False, "begin the warm-up at 1 / the processes of this node, as a document wrote it")
    warmup_stairs: bool = option(False, "raise the rate from epoch to epoch, not from step to step")
    final: float = option(
        0.0, "share of the rate at the end (cosine, polynomial)", flag="--lr-final", at_least=0, at_most=1
    )
    power: float = option(1.0, "power of what is left of the training (polynomial)", flag="--lr-power", above=0)
    step_epochs: float = option(30.0, "epochs after which the rate falls (step)", flag="--lr-step-epochs", above=0)
    gamma: float = option(0.1, "factor by which it falls each time (step)", flag="--lr-gamma", above=0, at_most=1)


@dataclass(frozen=True)
class Schedule:
    """The learning rate at every position of a training of ``length`` epochs.

    ``base`` is the rate before scaling with the world size, ``scale`` the factor of the scaling. Positions are in
    epochs, not steps, so that a run resumed on another number of ranks goes on where it was.
    """

    config: ScheduleConfig
    base: float
    scale: float
    length: float
    processes_per_node: int = 1

    def _start(self) -> float:
        if self.config.warmup_start is not None:
            return self.config.warmup_start
        return 1.0 / (self.processes_per_node if self.config.warmup_by_node else self.scale)

    def lr(self, position: float) -> float:
        """The learning rate of the step that begins ``position`` epochs into the training.

        Warm-up: ``base * scale`` times a factor that rises linearly from ``warmup_start`` to 1. What follows is torch's
        ``StepLR`` of epochs from the end of the warm-up, or ``final + (1 - final) * f(t)`` with t from 0 to 1 over what
        is left of the training: ``(1 + cos(pi * t)) / 2``, or ``(1 - t) ** power``, torch's ``PolynomialLR``.
        """
        peak = self.base * self.scale
        warmup = self.config.warmup_epochs
        if position < warmup:
            start = self._start()
            if self.config.warmup_stairs:
                position = math.floor(position)
            return peak * (start + (1.0 - start) * position / warmup)
        if self.config.name == "step":
            return peak * math.pow(self.config.gamma, (position - warmup) // self.config.step_epochs)
        if self.config.name == "constant" or self.length <= warmup:
            return peak
        progress, final = min(1.0, (position - warmup) / (self.length - warmup)), self.config.final
        if self.config.name == "polynomial":
            return peak * (final + (1.0 - final) * math.pow(1.0 - progress, self.config.power))
        return peak * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress)))
