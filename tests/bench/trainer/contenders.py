"""The contenders of a measurement: the documents' loop, the trainer's, and the bare step that bounds both."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddp_sdk.exporter import Exporter
from ddp_sdk.rank_env import RankEnv
from ddp_trainer.assembly import assemble
from ddp_trainer.config.run import RunConfig, resolve
from ddp_trainer.data.sampling import derive_seed
from ddp_trainer.distributed.world import World
from ddp_trainer.engine import seed_generator
from ddp_trainer.options import merge
from ddp_trainer.trainer import TrainingLoop


class Switches:
    """torch's global switches; each contender has its own settings."""

    def __init__(self) -> None:
        cudnn = torch.backends.cudnn
        self._values = (cudnn.benchmark, cudnn.deterministic)
        self._deterministic = torch.are_deterministic_algorithms_enabled()

    def set(self) -> None:
        """Restore the switches as they were when this object was created."""
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = self._values
        torch.use_deterministic_algorithms(self._deterministic, warn_only=True)


class Contender(Protocol):
    """Takes steps of ``batch_size`` images a rank on request, with at most ``prefetched`` batches in advance."""

    batch_size: int
    prefetched: int

    def steps(self) -> Iterator[float]:
        """Take a step for each item; an item is the seconds that the host waited for the batch."""
        ...


def build_config(preset: str, *changes: Mapping[str, Any], as_published: bool = False) -> RunConfig:
    """The preset's configuration for a measurement: no output, no validation, no end, every step a whole batch."""
    values: dict[str, Any] = {
        "epochs": 10_000,
        "csv_dir": None,
        "output_dir": None,
        "data": {"verify": False, "download": False, "drop_last": True},
        "early_stop": {"target_accuracy": None},
        "metrics": {"port": 0},
    }
    for change in changes:
        values = merge(values, change)
    return resolve(preset, None, values, as_published=as_published)


class Ours:
    """The trainer's own loop, as ``python -m ddp_trainer`` runs it, with its exporter and its log."""

    def __init__(self, config: RunConfig, world: World, exporter: Exporter) -> None:
        self.batch_size = config.data.batch_size
        self.trainer = TrainingLoop(config, world, exporter)
        self.trainer.report.begin(self.trainer.plan)
        self.prefetched = getattr(self.trainer.loader.source, "prefetched", 0)
        self._waited = 0.0
        report = self.trainer.report.step

        def note(*arguments: Any, **named: Any) -> None:
            self._waited = named["waited"]
            report(*arguments, **named)

        self.trainer.report.step = note  # type: ignore[method-assign]

    def steps(self) -> Iterator[float]:
        """See :class:`Contender`."""
        while True:
            for _ in self.trainer.steps():
                yield self._waited

    def loading_seconds(self, batches: int) -> float:
        """Time of a batch from the loader alone, on an idle device."""
        device = self.trainer.world.device
        taken = 0
        source = iter(self.trainer.loader.epoch(0))
        _synchronize(device)
        started = time.perf_counter()
        for _ in source:
            taken += 1
            if taken == batches:
                break
        _synchronize(device)
        return (time.perf_counter() - started) / taken

    def report_seconds(self, steps: int) -> float:
        """The cost of exporter and log for the host per step, measured by ``steps`` of them without pause."""
        loss = torch.zeros((), device=self.trainer.world.device)
        position = self.trainer.position
        report = self.trainer.report
        started = time.perf_counter()
        for _ in range(steps):
            position.step += 1
            report.step(position, loss, None, self.batch_size, 0.1, seconds=0.1, waited=0.0, computed=0.1)
        return (time.perf_counter() - started) / steps

    def save_seconds(self, folder: str) -> tuple[float, float]:
        """How long a save stalls the step loop, and how long until it is on the disk."""
        from ddp_trainer.checkpoint import CheckpointConfig
        from ddp_trainer.checkpoint.store import Checkpointer

        checkpointer = Checkpointer(CheckpointConfig(dir=folder))
        checkpointer.prepare()
        held = []
        whole = []
        for step in range(3):
            _synchronize(self.trainer.world.device)
            started = time.perf_counter()
            checkpointer.save({"engine": self.trainer.engine.state_dict()}, step, None, {})
            held.append(time.perf_counter() - started)
            checkpointer.wait()
            whole.append(time.perf_counter() - started)
        return min(held), min(whole)


class Bare:
    """Forward, backward and update of the same model in the same format, on existing tensors.

    Without ``all_reduce`` no gradient is sent: the difference of the times is the wait for communication.
    """

    prefetched = 0

    def __init__(self, config: RunConfig, world: World, *, all_reduce: bool = True) -> None:
        self.batch_size = config.data.batch_size
        self.parts = assemble(config, world)
        self.clip_norm = config.optim.clip_norm
        self.all_reduce = all_reduce
        seed_generator(derive_seed(config.seed, 99), world.device)
        batch = next(iter(self.parts.loader.epoch(0)))
        self.images = batch.inputs.clone()
        self.labels = batch.targets.clone()
        for name in ("cache", "labels"):
            for loader in (self.parts.loader, self.parts.validation):
                if hasattr(loader.source, name):
                    setattr(loader.source, name, None)  # the memory is the cache's, not the step's

    def steps(self) -> Iterator[float]:
        """See :class:`Contender`."""
        engine = self.parts.engine
        precision = self.parts.engine.precision
        task = self.parts.task
        engine.replica.train()
        forward: Callable[[Tensor], Tensor] = engine._forward
        quiet = contextlib.nullcontext
        if not self.all_reduce and isinstance(engine.replica, nn.parallel.DistributedDataParallel):
            quiet = engine.replica.no_sync  # type: ignore[assignment]
        while True:
            with quiet():
                with precision.autocast():
                    loss = task.loss(forward(self.images), self.labels)
                precision.backward(loss)
            precision.step(engine.optimizer, engine._parameters, self.clip_norm)
            engine.optimizer.zero_grad(set_to_none=True)
            yield 0.0


def gradient_bytes(contender: Bare | Ours) -> int:
    """Bytes that an all-reduce of this model's gradients moves."""
    engine = contender.parts.engine if isinstance(contender, Bare) else contender.trainer.engine
    return sum(parameter.numel() * parameter.element_size() for parameter in engine._parameters)


def start_exporter(env: RankEnv) -> Exporter:
    """An exporter on any free port, as under the launcher."""
    return Exporter.start(port=0, env=env)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
