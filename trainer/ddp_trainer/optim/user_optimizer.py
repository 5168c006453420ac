"""A program's own optimizer and learning-rate schedule: their checks, their rates, and their state."""

import inspect
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_map_only

from ddp_trainer.errors import UserError, require

# Parameters that a message names.
_MOST_NAMES = 8

# From the model, and from the optimizer and the number of steps of the whole run.
BuildOptimizer = Callable[[nn.Module], Optimizer]
BuildScheduler = Callable[[Optimizer, int], LRScheduler]


class UserOptimizer:
    """An optimizer with the learning rates of its groups; the program builds the optimizer, its schedule or both.

    ``scheduler`` advances after every step. Without one, the trainer's schedule multiplies the rate that each group has
    at the beginning. Raises :class:`UserError` if the scheduler's state can't be saved.
    """

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler | None = None) -> None:
        self.optimizer = optimizer
        self._scheduler = scheduler
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._has_stepped = False
        if scheduler is not None:
            check_state("scheduler", scheduler.state_dict())

    def begin_step(self, factor: float) -> float:
        """Multiply the groups' rates by ``factor`` unless a scheduler sets them; return the first group's rate."""
        groups = self.optimizer.param_groups
        if self._scheduler is None:
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate * factor
        return float(groups[0]["lr"])

    def end_step(self) -> None:
        """Advance the scheduler. Raises :class:`UserError` after the first step if the state can't be saved."""
        if self._scheduler is not None:
            self._scheduler.step()
        if not self._has_stepped:
            self._has_stepped = True
            check_state("optimizer", self.optimizer.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizer and scheduler, and their classes."""
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict(), "classes": self._list_classes()}
        if self._scheduler is not None:
            state["scheduler"] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, with all options of the saved groups. Raises ValueError if it has other classes."""
        saved = state.get("classes")
        own = self._list_classes()
        if saved != own:
            described = " with ".join(saved) if saved else "one of the trainer"
            raise ValueError(f"its optimizer is {described}, this run's is {' with '.join(own)}")
        self.optimizer.load_state_dict(state["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])

    def _list_classes(self) -> list[str]:
        parts = [self.optimizer] if self._scheduler is None else [self.optimizer, self._scheduler]
        return [type(part).__name__ for part in parts]


def build_user_optimizer(build: BuildOptimizer, model: nn.Module) -> Optimizer:
    """Call the program's function and check its result.

    Raises :class:`UserError` if it is no optimizer, lacks parameters of the model, or can't be stepped by the trainer.
    """
    example = "pass a function of the model, such as lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)"
    require(not isinstance(build, Optimizer), "optimizer", f"{type(build).__name__} is already built", example)
    is_class = isinstance(build, type) and issubclass(build, Optimizer)
    require(not is_class, "optimizer", f"{getattr(build, '__name__', build)} is a class", example)
    optimizer = build(model)
    require(
        isinstance(optimizer, Optimizer),
        "optimizer",
        f"the function returned {type(optimizer).__name__}",
        "return a torch.optim.Optimizer",
    )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    require(
        closure is None or closure.default is not inspect.Parameter.empty,
        "optimizer",
        f"{type(optimizer).__name__}.step needs a closure, which evaluates the model several times in a step",
        "choose an optimizer whose step() needs no argument",
    )
    for group in optimizer.param_groups:
        require(group.get("lr") is not None, "optimizer", "a parameter group has no lr", "give the group a lr")
    _check_parameters(optimizer, model)
    return optimizer


def _check_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise :class:`UserError` unless the groups hold exactly the parameters of ``model`` that need a gradient."""
    grouped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    foreign = grouped - {id(parameter) for parameter in model.parameters()}
    require(
        not foreign,
        "optimizer",
        f"{len(foreign)} of its tensors are not parameters of the model",
        "build the optimizer from the parameters of the model that the function receives",
    )
    missing = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in grouped
    ]
    more = f" and {len(missing) - _MOST_NAMES} more" if len(missing) > _MOST_NAMES else ""
    require(
        not missing,
        "optimizer",
        f"no parameter group contains {', '.join(missing[:_MOST_NAMES])}{more}",
        "add them to a group, or freeze them in the model with requires_grad_(False)",
    )


def build_user_scheduler(build: BuildScheduler, optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """Call the program's function and check its result; ``total_steps`` are those of the whole run.

    Raises :class:`UserError` if it is no scheduler of ``optimizer``, or needs more than the number of steps.
    """
    remedy = "pass a function such as lambda optimizer, total_steps: CosineAnnealingLR(optimizer, total_steps)"
    require(not isinstance(build, LRScheduler), "scheduler", f"{type(build).__name__} is already built", remedy)
    scheduler = build(optimizer, total_steps)
    name = type(scheduler).__name__
    require(
        isinstance(scheduler, LRScheduler),
        "scheduler",
        f"the function returned {name}",
        "return a torch.optim.lr_scheduler.LRScheduler",
    )
    require(
        not isinstance(scheduler, ReduceLROnPlateau),
        "scheduler",
        f"{name} needs a metric in every step",
        "choose a schedule by the number of steps",
    )
    require(scheduler.optimizer is optimizer, "scheduler", f"{name} has another optimizer", "use the given optimizer")
    return scheduler


def check_state(field: str, state: dict[str, Any]) -> None:
    """Raise :class:`UserError` unless a checkpoint with ``state`` can be loaded without executing its content."""
    plain = tree_map_only(Tensor, lambda tensor: torch.empty(0, dtype=tensor.dtype), state)
    file = io.BytesIO()
    try:
        torch.save(plain, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # of pickle, or of any class in the state
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            field,
            f"a run could not resume from its state_dict() ({type(error).__name__}: {reason})",
            "return tensors, numbers, text, lists and dicts there",
        ) from error
