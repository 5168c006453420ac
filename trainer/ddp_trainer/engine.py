"""One optimiser step: forward, backward, all-reduce, update."""

import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddp_trainer.config.run import RunConfig
from ddp_trainer.data.loader import Batch, Replayed
from ddp_trainer.data.sampling import derive_seed
from ddp_trainer.distributed.ddp import missing_gradients, needs_all_gradients, replicate
from ddp_trainer.distributed.world import World
from ddp_trainer.observability.meters import ComputeClock
from ddp_trainer.optim import begin_momentum, load_optimizer
from ddp_trainer.optim.ema import Ema
from ddp_trainer.precision import Precision
from ddp_trainer.tasks import Task

_STREAM = 2


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind: tensors on the device, not yet waited for.

    ``correct`` holds the batch's right answers and answers, float32 (2,), where the engine was asked to count them.
    """

    loss: Tensor
    grad_norm: Tensor | None
    correct: Tensor | None = None


@dataclass(frozen=True)
class _Share:
    """Share of a part of the batch in the step's loss."""

    # Among this rank's parts: what the reported loss is made of.
    of_rank: Tensor | float
    # Among all parts of all ranks, times the ranks: DDP divides the sum of their gradients by that number.
    of_step: Tensor | float


class Recorded(Protocol):
    """A step that is recorded, see :class:`ddp_trainer.step_graph.StepGraph`."""

    def step(self) -> StepResult:
        """Take it with the batch that is next."""
        ...

    @property
    def settled(self) -> bool:
        """Whether the recording is over."""
        ...


class Engine:
    """The model with everything that changes it. Its state dict holds all that a resumed run needs to go on."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        world: World,
        config: RunConfig,
    ) -> None:
        self.model, self.task, self.optimizer, self.precision, self.world = model, task, optimizer, precision, world
        optim, distributed, self._config = config.optim, config.distributed, config
        self._parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # Before DDP, whose hooks are none of the copy's business.
        self.ema = Ema(model, optim.ema_decay) if optim.ema_decay is not None else None
        self._replicate()
        self._needs_all_gradients = needs_all_gradients(self.replica, distributed)
        self._correct: Tensor | None = None
        # Of the step under way. Where a step may be recorded, the rate is no argument of kernels: they read it.
        self._to_compile = config.precision.compile
        self._lr = optim.lr
        self._lr_on_device: Tensor | None = None
        self._step = 0
        self.graph: Recorded | None = None
        if precision.scaler is not None:
            begin_momentum(optimizer)
        if world.device.type == "cuda":
            self.keep_lr_on_device()
        # After DDP, so that it hears of a gradient when DDP has taken it.
        self.clock = ComputeClock(model, world.device)

    def _replicate(self) -> None:
        self.replica = replicate(self.model, self._config.distributed, self.world)
        self._forward: Callable[[Any], Any] = self.replica
        precision = self._config.precision
        if precision.compile:
            # Apart from the module, so that validation, with other batch sizes, stays as it is.
            self._forward = torch.compile(self.replica, mode=precision.compile_mode, dynamic=False)

    def keep_lr_on_device(self) -> None:
        """Let the optimiser read the learning rate from the device's memory, in fp32."""
        if self._lr_on_device is None:
            self._lr_on_device = torch.zeros((), device=self.world.device)

    def step(self, batch: Batch, step: int, lr: float) -> StepResult:
        """Take step ``step`` (from 0) with this rank's ``batch``, at learning rate ``lr``.

        With accumulation the batch is cut into parts and only the last part's backward talks to other ranks. Raises
        :class:`UserError` where a parameter that DDP waits for got no gradient.
        """
        if not (self.replica.training and self.model.training):
            self.replica.train()
        # Dropout and the like draw from the generator: seeded by step, it needs no saving.
        seed_generator(derive_seed(self._config.seed, _STREAM, step, self.world.rank), self.world.device)
        self._step, self._lr, value = step, lr, self._lr_on_device
        for group in self.optimizer.param_groups:
            group["lr"] = lr if value is None else value.fill_(lr)
        if isinstance(batch, Replayed):
            assert self.graph is not None
            result = self.graph.step()
        else:
            result = self.take(batch)
        if self.ema is not None:
            self.ema.update()
        return result

    def take(self, batch: Batch) -> StepResult:
        """Forward, backward, all-reduce and update: what of a step can be recorded on a device."""
        self._correct = None
        accumulate = self._config.optim.accumulate
        whole = len(batch) == self._config.data.batch_size * accumulate
        parts = [batch] if accumulate == 1 else batch.split(-(-len(batch) // accumulate))
        # Before the clock: waiting for the numbers of other ranks is no compute time of this one.
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

    def recover(self) -> None:
        """Be ready for a step after one that ended midway, with nothing done on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        if isinstance(self.replica, nn.parallel.DistributedDataParallel):
            # DDP waits for the rest of the gradients. A second one is of use only when the first has let go of them.
            self.replica = self._forward = self.model
            gc.collect()
            self._replicate()

    def _weight(self, parts: list[Batch]) -> list[_Share]:
        """Weight ``parts`` by the elements that the task counts, over all ranks, or else by their samples."""
        counts = [self.task.count_elements(part.targets) for part in parts]
        elements = [count for count in counts if count is not None]
        if not elements:
            samples = sum(len(part) for part in parts)
            return [_Share(len(part) / samples, len(part) / samples) for part in parts]

        own = torch.stack(elements).double()
        of_rank = own / own.sum().clamp(min=1)
        mine = own.sum()
        everyone, ranks = self.world.sum_on_device(torch.stack([mine, torch.ones_like(mine)])).unbind()
        of_step = own * ranks / everyone.clamp(min=1)
        return [_Share(*pair) for pair in zip(of_rank.unbind(), of_step.unbind(), strict=True)]

    def _backward(self, part: Batch, share: _Share) -> Tensor:
        """Add the gradients of ``part``; returns its part of this rank's loss."""
        with self.precision.autocast():
            # An epoch's last batch, which may be smaller, is not worth compiling for.
            outputs = (self._forward if len(part) == self._config.data.batch_size else self.replica)(part.inputs)
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

    @property
    def evaluated_model(self) -> nn.Module:
        """The model that is validated and saved for use: the average of the weights, if one is kept."""
        return self.model if self.ema is None else self.ema.model

    def state_dict(self) -> dict[str, Any]:
        """Model, optimiser, scaler and average of the weights. The tensors are the live ones."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "precision": self.precision.state_dict(),
        }
        for group in state["optimizer"]["param_groups"]:
            group["lr"] = self._lr
        return state if self.ema is None else state | {"ema": self.ema.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state; raises RuntimeError, KeyError or ValueError where shapes or names don't fit.

        Raises :class:`UserError` for an average of the weights in an earlier version's form. One that was not saved
        begins at the weights.
        """
        self.model.load_state_dict(state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        self._lr = self.optimizer.param_groups[0]["lr"]
        self.precision.load_state_dict(state["precision"])
        if self.ema is not None:
            if "ema" in state:
                self.ema.load_state_dict(state["ema"])
            else:
                self.ema.restart()

    def load_weights(self, state: dict[str, Any]) -> None:
        """Take up of a state what is validated; raises RuntimeError or KeyError where shapes or names don't fit."""
        ema = {name: tensor for name, tensor in state.get("ema", {}).items() if name.startswith("module.")}
        self.model.load_state_dict({name.removeprefix("module."): ema[name] for name in ema} or state["model"])
        if self.ema is not None:
            self.ema.restart()


def _scale(loss: Tensor, share: Tensor | float) -> Tensor:
    if isinstance(share, Tensor):
        return loss * share.to(loss.dtype)
    return loss if share == 1.0 else loss * share


def seed_generator(seed: int, device: torch.device) -> None:
    """Seed torch's default generator of the CPU, and of the device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        assert device.index is not None
        torch.cuda.default_generators[device.index].manual_seed(seed)
