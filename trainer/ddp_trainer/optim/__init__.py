"""Optimizers by name, scaling of the learning rate with the world size, and the schedule."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_sdk.errors import require
from ddp_trainer.options import SettingsGroup, option

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OptimConfig(SettingsGroup, group="optim"):
    """The optimizer, and the processing of gradients before its step."""

    name: str = option(
        "sgd",
        "update rule",
        flag="--optimizer",
        choices=("sgd", "adamw", "novograd"),
    )
    lr: float = option(0.1, "learning rate of one process, before scaling with the world size", above=0)
    lr_scaling: str = option(
        "none",
        "multiply the learning rate by the world size (linear), by its square root (sqrt), or not at all",
        choices=("none", "linear", "sqrt"),
    )
    momentum: float = option(0.9, "momentum (sgd)", only={"optim.name": ("sgd",)}, at_least=0, below=1)
    nesterov: bool = option(False, "Nesterov's momentum (sgd)", only={"optim.name": ("sgd",)})
    beta1: float | None = option(
        None,
        "decay of the mean of gradients (adamw, default 0.9; novograd, default 0.95)",
        only={"optim.name": ("adamw", "novograd")},
        at_least=0,
        below=1,
    )
    beta2: float | None = option(
        None,
        "decay of the mean of squared gradients (adamw, default 0.999; novograd, default 0.98)",
        only={"optim.name": ("adamw", "novograd")},
        at_least=0,
        below=1,
    )
    grad_averaging: bool = option(
        True, "take the mean of gradients instead of their sum (novograd)", only={"optim.name": ("novograd",)}
    )
    weight_decay: float = option(0.0, "weight decay", at_least=0)
    norm_bias_decay: bool = option(True, "apply weight decay also to parameters of one dimension (norms and biases)")
    clip_norm: float | None = option(None, "largest norm of the gradients; larger gradients are scaled down", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.nesterov or self.momentum > 0, "optim.nesterov", "needs a momentum", "give --momentum 0.9")

    @property
    def betas(self) -> tuple[float, float]:
        """Return ``beta1`` and ``beta2``; those that are None take the optimizer's defaults."""
        defaults = (0.95, 0.98) if self.name == "novograd" else (0.9, 0.999)
        beta1 = defaults[0] if self.beta1 is None else self.beta1
        beta2 = defaults[1] if self.beta2 is None else self.beta2
        return beta1, beta2


def build_optimizer(config: OptimConfig, parameters: "Iterable[torch.nn.Parameter]") -> "torch.optim.Optimizer":
    """Build the optimizer for ``parameters``; SGD and AdamW use torch's fused kernels."""
    import torch

    from ddp_trainer.optim.novograd import NovoGrad

    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    groups = _group_parameters(list(parameters), config)
    if config.name == "novograd":
        return NovoGrad(groups, betas=config.betas, grad_averaging=config.grad_averaging, **common)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, betas=config.betas, fused=True, **common)
    return torch.optim.SGD(groups, momentum=config.momentum, nesterov=config.nesterov, fused=True, **common)


def _group_parameters(parameters: "list[torch.nn.Parameter]", config: OptimConfig) -> list[dict[str, Any]]:
    """Return the parameter groups: one, or two where norms and biases have no weight decay. No group is empty."""
    if config.norm_bias_decay:
        return [{"params": parameters}]
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def begin_momentum(optimizer: "torch.optim.Optimizer") -> None:
    """Initialize SGD's momentum with zeros, as torch's first step does.

    If a gradient scaler skips the first step, the fused kernel would otherwise read uninitialized memory.
    """
    import torch

    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group["momentum"] and group["fused"]:
            for parameter in group["params"]:
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


# Settings that identify the optimizer of a saved state.
_KINDS = frozenset(("momentum", "amsgrad", "grad_averaging"))  # sgd, adamw, novograd


def load_optimizer(optimizer: "torch.optim.Optimizer", state: dict[str, Any]) -> None:
    """Load an optimizer's saved state, but keep the settings of this run.

    The saved learning rate applies until the next step sets it. Raises ValueError or KeyError if the state belongs to
    another optimizer or has other parameters, :class:`UserError` if its parameters are grouped differently.
    """
    groups = len(optimizer.param_groups)
    saved_groups = len(state["param_groups"])
    require(
        groups == saved_groups,
        "optim.norm_bias_decay",
        f"the checkpoint has {saved_groups} parameter group(s), this run {groups}",
        f"give --norm-bias-decay {'true' if saved_groups == 1 else 'false'} as in the saved run, or another "
        "--checkpoint-dir",
    )
    settings = [
        {name: value for name, value in group.items() if name not in ("params", "lr")}
        for group in optimizer.param_groups
    ]
    for own, saved in zip(settings, state["param_groups"], strict=True):
        if _KINDS & own.keys() != _KINDS & saved.keys():
            raise ValueError(f"the state is not one of {type(optimizer).__name__}")
    # Loaded together with the state: the device of the step count depends on whether the optimizer is fused.
    merged = [{**saved, **own} for own, saved in zip(settings, state["param_groups"], strict=True)]
    optimizer.load_state_dict({**state, "param_groups": merged})


def lr_scale(config: OptimConfig, world_size: int) -> float:
    """Return the factor by which the learning rate grows with the global batch.

    Linear: Goyal et al., "Accurate, Large Minibatch SGD" (2017). Square root: Krizhevsky, "One weird trick" (2014).
    """
    if config.lr_scaling == "linear":
        return float(world_size)
    if config.lr_scaling == "sqrt":
        return math.sqrt(world_size)
    return 1.0


@dataclass(frozen=True)
class ScheduleConfig(SettingsGroup, group="schedule"):
    """The course of the learning rate over the training."""

    name: str = option("constant", "course after the warm-up", flag="--schedule", choices=("constant", "cosine"))
    warmup_epochs: float = option(0.0, "epochs over which the learning rate rises linearly", at_least=0)
    warmup_start: float | None = option(
        None,
        "the first step's share of the learning rate; none: the rate before scaling",
        only={"schedule.warmup_epochs": ()},
        at_least=0,
        at_most=1,
    )
    warmup_by_node: bool = option(
        False,
        "start the warm-up at 1 / (processes of this node), as a document does",
        only={"schedule.warmup_epochs": ()},
    )
    warmup_stairs: bool = option(
        False, "raise the rate once per epoch instead of every step", only={"schedule.warmup_epochs": ()}
    )
    final: float = option(
        0.0,
        "share of the rate at the end (cosine)",
        flag="--lr-final",
        only={"schedule.name": ("cosine",)},
        at_least=0,
        at_most=1,
    )


@dataclass(frozen=True)
class Schedule:
    """The learning rate at every position of a training of ``length`` epochs.

    ``base`` is the rate before scaling with the world size, ``scale`` the factor of the scaling. Positions are in
    epochs, not steps, so that a run resumed on another number of ranks continues at the same position.
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
        """Return the learning rate of the step that starts ``position`` epochs into the training.

        Warm-up: ``base * scale`` times a factor that rises linearly from ``warmup_start`` to 1. Afterwards with
        ``cosine`` times ``final + (1 - final) * (1 + cos(pi * t)) / 2``, with t from 0 to 1 over the rest of the
        training.
        """
        peak = self.base * self.scale
        warmup = self.config.warmup_epochs
        if position < warmup:
            start = self._start()
            if self.config.warmup_stairs:
                position = math.floor(position)
            return peak * (start + (1.0 - start) * position / warmup)
        if self.config.name == "constant" or self.length <= warmup:
            return peak
        progress = min(1.0, (position - warmup) / (self.length - warmup))
        final = self.config.final
        return peak * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress)))
