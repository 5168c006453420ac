"""One optimizer step: forward, backward, all-reduce, update."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_sdk.meters import ComputeClock
from ddp_trainer.config.run import RunConfig
from ddp_trainer.data.loader import Batch
from ddp_trainer.data.sampling import derive_seed
from ddp_trainer.distributed.ddp import missing_gradients, needs_all_gradients, replicate
from ddp_trainer.distributed.world import World
from ddp_trainer.optim import begin_momentum, load_optimizer
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
    ) -> None:
        self.model = model
        self.task = task
        self.optimizer = optimizer
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
        if precision.scaler is not None:
            begin_momentum(optimizer)
        # Created after DDP, so that its hook runs after DDP's hook for the same gradient.
        self.clock = ComputeClock(model, world.device)

    def step(self, batch: Batch, step: int, lr: float) -> StepResult:
        """Take step ``step`` (from 0) with this rank's ``batch``, at learning rate ``lr``.

        Raises :class:`UserError` if a parameter that DDP waits for got no gradient.
        """
        if not (self.replica.training and self.model.training):
            self.replica.train()
        # Dropout and similar layers draw from this generator. It is seeded in each step, so it needs no saving.
        seed_generator(derive_seed(self._config.seed, _STREAM, step, self.world.rank), self.world.device)
        for group in self.optimizer.param_groups:
            group["lr"] = lr

        weight = self._weigh(batch)  # before the clock starts: waiting for other ranks is not this rank's compute time
        started = time.perf_counter()
        self.clock.begin()
        loss, correct = self._backward(batch, weight)
        if self._to_compile and self._is_whole(batch):
            self._to_compile = False
            if self.world.is_main:
                print(f"torch.compile: {time.perf_counter() - started:.1f} s, in the first step", flush=True)

        if self._needs_all_gradients and any(parameter.grad is None for parameter in self._parameters):
            raise missing_gradients(self.model, step)
        norm = self.precision.step(self.optimizer, self._parameters, self._config.optim.clip_norm)
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm, correct)

    def _weigh(self, batch: Batch) -> Tensor | None:
        """Return this rank's weight in the step's gradient, by the elements that the task counts; None: one.

        DDP averages the gradients of the ranks, each of which is the mean over its own elements.
        """
        count = self.task.count_elements(batch.targets)
        if count is None or not self.world.is_distributed:
            return None
        own = count.double()
        total, ranks = self.world.sum_on_device(torch.stack([own, torch.ones_like(own)])).unbind()
        return own * ranks / total.clamp(min=1)

    def _is_whole(self, batch: Batch) -> bool:
        return len(batch) == self._config.data.batch_size

    def _backward(self, batch: Batch, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute the gradients; return this rank's loss, and the correct answers if they are counted."""
        with self.precision.autocast():
            # A smaller last batch of the epoch runs uncompiled, because it would need another compilation.
            forward = self._forward if self._is_whole(batch) else self.replica
            outputs = forward(batch.inputs)
            self.task.check(outputs, batch.targets)
            loss = self.task.loss(outputs, batch.targets)
            weighted = loss if weight is None else loss * weight.to(loss.dtype)
        correct = self.task.correct(outputs, batch.targets) if self._config.train_accuracy else None
        self.precision.backward(weighted)
        return loss.detach(), correct

    def state_dict(self) -> dict[str, Any]:
        """Return the state of model, optimizer and scaler. Its tensors are not copies."""
        return {
            "model": self.model.state_dict(),
            "precision": self.precision.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state. Raises RuntimeError, KeyError or ValueError if shapes or names differ."""
        self.model.load_state_dict(state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        self.precision.load_state_dict(state["precision"])


def seed_generator(seed: int, device: torch.device) -> None:
    """Seed torch's default generators of the CPU and of ``device``."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        assert device.index is not None
        torch.cuda.default_generators[device.index].manual_seed(seed)
