"""One rank of a measurement: builds the contenders, which take steps in turn. Started by :mod:`.launch`."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ddp_sdk.rank_env import RankEnv
from ddp_trainer.config.run import resolve
from ddp_trainer.distributed import DistributedConfig
from ddp_trainer.distributed.world import World
from ddp_trainer.options import merge
from ddp_trainer.trainer import TrainingLoop
from tests.bench.trainer.contenders import (
    Bare,
    Ours,
    Switches,
    build_config,
    gradient_bytes,
    start_exporter,
)
from tests.bench.trainer.documents import DocumentsLoop
from tests.bench.trainer.network import probe
from tests.bench.trainer.systems import VARIANTS, changes_of

TRAINED = ("preset", "published")


@dataclass(frozen=True)
class MeasurementSpec:
    """The measurement. ``contenders`` are ``documents``, ``ours:VARIANT``, ``bare:…`` and ``mute:…``.

    ``documents:fp16`` is the documents' loop with autocast and GradScaler, as is ``documents`` with ``half``.
    ``mute`` is the bare step without all-reduce. With ``train`` the preset is then trained for the document's epochs,
    unchanged and as published.
    """

    preset: str
    changes: dict[str, Any]
    contenders: list[str]
    device: str
    rounds: int
    seconds: float
    result: str
    half: bool = False
    data_parallel: bool = False
    train: bool = False
    # Whether to measure what is too small to show between two turns.
    costs: bool = True
    # Maximum steps in a turn, and in the warm-up before the first turn.
    max_steps: int = 2000
    warm_up: int = 3


class _Runner:
    """A contender with its position in the stream of its steps."""

    def __init__(self, name: str, spec: MeasurementSpec, world: World, defaults: Switches) -> None:
        defaults.set()
        self.name = name
        self.contender = _build(name, spec, world)
        self.switches = Switches()
        self.batch_size: int = self.contender.batch_size
        self._steps: Iterator[float] = self.contender.steps()
        started = time.perf_counter()
        self.take(1, world)
        self.first_seconds = time.perf_counter() - started
        self.take(spec.warm_up, world)
        seconds, _ = self.take(3, world)
        self.turn = _agree_on_steps(seconds / 3, spec, world)
        self.windows: list[tuple[float, float]] = []

    def take(self, steps: int, world: World) -> tuple[float, float]:
        """Take ``steps`` steps. Return the seconds that a rank needed for them, and how many of these for data."""
        self.switches.set()
        for _ in range(self.contender.prefetched):  # created while others took their turns, so not counted
            next(self._steps)
        _barrier(world)
        started = time.perf_counter()
        waited = 0.0
        for _ in range(steps):
            waited += next(self._steps)
        _barrier(world)
        return time.perf_counter() - started, waited

    def summary(self, world: World) -> dict[str, Any]:
        """Medians over the turns, images a second of all ranks together."""
        rates = [self.turn * self.batch_size * world.size / seconds for seconds, _ in self.windows]
        return {
            "images_per_second": statistics.median(rates),
            "rates": rates,
            "lowest": min(rates),
            "highest": max(rates),
            "step_seconds": statistics.median(seconds / self.turn for seconds, _ in self.windows),
            "data_seconds": statistics.median(waited / self.turn for _, waited in self.windows),
            "steps_a_turn": self.turn,
            "turns": len(self.windows),
            "batch_size": self.batch_size,
            "first_step_seconds": self.first_seconds,
        }


def _build(name: str, spec: MeasurementSpec, world: World) -> Any:
    kind, _, variant = name.partition(":")
    if kind == "documents":
        published = build_config(spec.preset, spec.changes, as_published=True)
        half = spec.half or variant == "fp16"
        return DocumentsLoop(published, world, half=half, data_parallel=spec.data_parallel)
    changes = merge(changes_of(variant), {"distributed": {"data_parallel": spec.data_parallel}})
    if spec.half and variant == "preset":
        changes = merge(changes, VARIANTS["fp16"])
    config = build_config(spec.preset, {"distributed": {"device": spec.device}}, spec.changes, changes)
    if kind in ("bare", "mute"):
        return Bare(config, world, all_reduce=kind == "bare")
    return Ours(config, world, start_exporter(world.env))


def _barrier(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    if world.is_distributed:
        world.sum([0.0])


def _agree_on_steps(step_seconds: float, spec: MeasurementSpec, world: World) -> int:
    mean = world.sum([step_seconds])[0] / world.size
    return max(1, min(spec.max_steps, round(spec.seconds / mean)))


def measure(spec: MeasurementSpec, world: World) -> dict[str, Any]:
    """Build all contenders, let each take turns, and return the results; the same on every rank except for times."""
    runners: list[_Runner] = []
    defaults = Switches()
    results: dict[str, Any] = {}
    for name in spec.contenders:
        problem = ""
        try:
            runner = _Runner(name, spec, world, defaults)
        except Exception as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        # The failure of one rank leaves its peers in a collective; the launcher's time limit ends them.
        if problem:
            results[name] = {"failed": problem}
        else:
            runners.append(runner)
    for number in range(spec.rounds):
        # Each contender is first once, so that none always follows the same one. There may be none.
        first = number % max(1, len(runners))
        for runner in runners[first:] + runners[:first]:
            runner.windows.append(runner.take(runner.turn, world))
    results |= {runner.name: runner.summary(world) for runner in runners}
    about: dict[str, Any] = {"results": results, "ranks": world.size, "threads": torch.get_num_threads()}
    if world.is_distributed:
        about["link"] = _link(world)
    for runner in runners:
        if isinstance(runner.contender, Ours | Bare):
            about.setdefault("gradient_bytes", gradient_bytes(runner.contender))
        if spec.costs and runner.name.startswith("ours:") and len(runners) > 1:
            results[runner.name] |= _measure_costs(runner.contender, world)
    if spec.train:
        runners.clear()  # with the memory of their models
        about["trained"] = {name: train(spec, world, as_published=name == "published") for name in TRAINED}
    return about


def train(spec: MeasurementSpec, world: World, *, as_published: bool) -> dict[str, Any]:
    """Train for the document's epochs. Return the last accuracy, and the epochs and seconds until then."""
    changes = merge({"csv_dir": None, "metrics": {"port": 0}, "distributed": {"device": spec.device}}, spec.changes)
    started = time.perf_counter()
    exporter = start_exporter(world.env)
    loop = TrainingLoop(resolve(spec.preset, None, changes, as_published=as_published), world, exporter)
    loop.fit()
    position = loop.position
    exporter.close()
    return {"accuracy": position.accuracy, "epochs": position.epoch, "seconds": time.perf_counter() - started}


def _measure_costs(ours: Ours, world: World) -> dict[str, Any]:
    """Costs that are too small to show between two turns."""
    loading = ours.loading_seconds(16)
    closer = {"report_seconds": ours.report_seconds(2000), "loading_seconds": loading}
    if world.is_main:
        with tempfile.TemporaryDirectory() as folder:
            closer["save_held_seconds"], closer["save_seconds"] = ours.save_seconds(folder)
    return closer


def _link(world: World) -> dict[str, Any] | None:
    measured = probe(world.device)
    if measured is None:
        return None
    link = "nccl between two GPUs" if world.device.type == "cuda" else "gloo between two processes of this machine"
    return {"bandwidth": measured[0], "latency": measured[1], "what": link}


def main(path: str) -> None:
    """Run the measurement of the file ``path``; rank 0 writes the result."""
    spec = MeasurementSpec(**json.loads(Path(path).read_text()))
    world = World.start(DistributedConfig(device=spec.device, timeout_seconds=300.0), RankEnv.from_environ())
    about = measure(spec, world) if spec.contenders else {"link": _link(world)}
    if world.is_main:
        Path(spec.result).write_text(json.dumps({**about, "spec": asdict(spec)}))
    world.close()


if __name__ == "__main__":
    main(sys.argv[1])
