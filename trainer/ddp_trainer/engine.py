"""One optimizer step: forward, backward, all-reduce, update."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_trainer.config.run import RunConfig
from ddp_trainer.data.loader import Batch
from ddp_trainer.data.sampling import derive_seed
from ddp_trainer.distributed.ddp import missing_gradients, needs_all_gradients, replicate
from ddp_trainer.distributed.world import World
from ddp_trainer.observability.meters import ComputeClock
from ddp_trainer.optim import begin_momentum, load_optimizer
from ddp_trainer.optim.user_optimizer import UserOptimizer
from ddp_trainer.precision import Precision
from ddp_trainer.tasks import Task

_STREAM = 2


@dataclass(frozen=True)
class StepResult:
    """The results of a step: tensors on the device, which may still be computing them.

    ``correct`` holds the numbers of correct answers and of answers, float32 (2,), with ``train_accuracy``.
    """

    loss: Tensor
    grad_norm: Tensor | None
    correct: Tensor | None = None


@dataclass(frozen=True)
class _Share:
    """The weight of a part of the batch in the step's loss."""

    # Relative to this rank's parts, for the reported loss.
    of_rank: Tensor | float
    # Relative to all parts of all ranks, times the number of ranks: DDP divides the sum of gradients by it.
    of_step: Tensor | float


class Engine:
    """The model and all state that a step changes. Its state dict is sufficient to resume."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        world: World,
        config: RunConfig,
        user_optimizer: UserOptimizer | None = None,
    ) -> None:
        self.model = model
        self.task = task
        self.optimizer = optimizer
        # Set if the program builds the optimizer or the schedule.
        self._user_optimizer = user_optimizer
        self.precision = precision
        self.world = world
        self._config = config
        self._parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.replica = replicate(model, config.distributed, world)
        self._forward: Callable[[Any], Any] = self.replica
        if config.precision.compile:
            # A separate callable, so that validation, with other batch sizes, does not compile.
            self._forward = torch.compile(self.replica, dynamic=False, mode=config.precision.compile_mode)
        self._needs_all_gradients = needs_all_gradients(self.replica, config.distributed)
        self._to_compile = config.precision.compile
        # State of the current step.
        self._correct: Tensor | None = None
        self._step = 0
        self._lr = float(optimizer.param_groups[0]["lr"])
        if precision.scaler is not None:
            begin_momentum(optimizer)
        # Created after DDP, so that its hook runs after DDP's hook for the same gradient.
        self.clock = ComputeClock(model, world.device)

    def step(self, batch: Batch, step: int, lr: float) -> StepResult:
        """Take step ``step`` (from 0) with this rank's ``batch``, at learning rate ``lr``.

        For a program's own optimizer ``lr`` is the factor of its groups' rates; its own schedule ignores ``lr``. With
        accumulation the batch is split into parts, and only the last part's backward communicates. Raises
        :class:`UserError` if a parameter that DDP waits for got no gradient.
        """
        if not (self.replica.training and self.model.training):
            self.replica.train()
        # Dropout and similar layers draw from this generator. It is seeded in each step, so it needs no saving.
        seed_generator(derive_seed(self._config.seed, _STREAM, step, self.world.rank), self.world.device)
        self._step = step
        self._set_rates(lr)
        result = self._take(batch)
        if self._user_optimizer is not None:
            self._user_optimizer.end_step()
        return result

    def _set_rates(self, lr: float) -> None:
        if self._user_optimizer is not None:
            self._lr = self._user_optimizer.begin_step(lr)
            return
        self._lr = lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    @property
    def lr(self) -> float:
        """Return the learning rate of the last step, with several groups that of the first."""
        return self._lr

    def _take(self, batch: Batch) -> StepResult:
        """Run forward, backward, all-reduce and update."""
        self._correct = None
        accumulate = self._config.optim.accumulate
        whole = len(batch) == self._config.data.batch_size * accumulate
        parts = [batch] if accumulate == 1 else batch.split(-(-len(batch) // accumulate))
        # Before the clock starts: waiting for the counts of other ranks is not this rank's compute time.
        shares = self._weight(parts)
        started = time.perf_counter()
        self.clock.begin()
        with self.precision.tuned(whole):
            loss = self._backward_in_parts(parts, shares)
        if self._to_compile and whole:
            self._to_compile = False
            if self.world.is_main:
                print(f"torch.compile: {time.perf_counter() - started:.1f} s, in the first step", flush=True)
        if self._needs_all_gradients and any(parameter.grad is None for parameter in self._parameters):
            raise missing_gradients(self.model, self._step)
        norm = self.precision.step(self.optimizer, self._parameters, self._config.optim.clip_norm)
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm, self._correct)

    def _weight(self, parts: list[Batch]) -> list[_Share]:
        """Weight ``parts`` by the elements that the task counts over all ranks, or by samples if it counts none."""
        counts = [self.task.count_elements(part.targets) for part in parts]
        elements = [count for count in counts if count is not None]
        if not elements:
            samples = sum(len(part) for part in parts)
            return [_Share(len(part) / samples, len(part) / samples) for part in parts]

        own = torch.stack(elements).double()
        own_total = own.sum()
        of_rank = own / own_total.clamp(min=1)
        total, ranks = self.world.sum_on_device(torch.stack([own_total, torch.ones_like(own_total)])).unbind()
        of_step = own * ranks / total.clamp(min=1)
        return [_Share(*pair) for pair in zip(of_rank.unbind(), of_step.unbind(), strict=True)]

    def _backward(self, part: Batch, share: _Share) -> Tensor:
        """Add the gradients of ``part``; return its share of this rank's loss."""
        with self.precision.autocast():
            # A smaller last batch of the epoch runs uncompiled, because it would need another compilation.
            forward = self._forward if len(part) == self._config.data.batch_size else self.replica
            outputs = forward(part.inputs)
            self.task.check(outputs, part.targets)
            loss = self.task.loss(outputs, part.targets)
            shared = _scale(loss, share.of_step)
        if self._config.train_accuracy:
            correct = self.task.correct(outputs, part.targets)
            self._correct = correct if self._correct is None else self._correct + correct
        self.precision.backward(shared)
        return _scale(loss.detach(), share.of_rank)

    def _backward_in_parts(self, parts: list[Batch], shares: list[_Share]) -> Tensor:
        total: Tensor | None = None
        for number, (part, share) in enumerate(zip(parts, shares, strict=True), start=1):
            ddp = self.replica if isinstance(self.replica, nn.parallel.DistributedDataParallel) else None
            with ddp.no_sync() if ddp is not None and number < len(parts) else contextlib.nullcontext():
                loss = self._backward(part, share)
            total = loss if total is None else total + loss
        assert total is not None
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return the state of model, optimizer and scaler. Its tensors are not copies."""
        state = {"model": self.model.state_dict(), "precision": self.precision.state_dict()}
        if self._user_optimizer is not None:
            state |= self._user_optimizer.state_dict()
        else:
            state["optimizer"] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state. Raises RuntimeError, KeyError or ValueError if shapes or names differ."""
        self.model.load_state_dict(state["model"])
        if self._user_optimizer is not None:
            self._user_optimizer.load_state_dict(state)
        else:
            load_optimizer(self.optimizer, state["optimizer"])
        self._lr = self.optimizer.param_groups[0]["lr"]
        self.precision.load_state_dict(state["precision"])

    def load_weights(self, state: dict[str, Any]) -> None:
        """Load only the weights; raises RuntimeError or KeyError if shapes or names differ."""
        self.model.load_state_dict(state["model"])


def _scale(loss: Tensor, share: Tensor | float) -> Tensor:
    if isinstance(share, Tensor):
        return loss * share.to(loss.dtype)
    return loss if share == 1.0 else loss * share


def seed_generator(seed: int, device: torch.device) -> None:
    """Seed torch's default generators of the CPU and of ``device``."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        assert device.index is not None
        torch.cuda.default_generators[device.index].manual_seed(seed)
