"""One CUDA graph a step: what the host asks for in hundreds of launches, recorded once and asked for in one."""

import contextlib
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.config.run import RunConfig
from ddp_trainer.data.sources import CachedSource
from ddp_trainer.distributed.ddp import uses_gloo
from ddp_trainer.distributed.world import World
from ddp_trainer.engine import Engine, StepResult
from ddp_trainer.observability.meters import Timeline

# DDP measures its first ten steps by events that can't be recorded, and torch picks kernels in the first ones.
WARM_UP = 11
# Replays that the device has not done yet. The next one is there when one ends, and a stop is not far away.
_AHEAD = 2
_PIECES = "steps are launched piece by piece"

Record = Callable[[Callable[[], StepResult]], tuple[Callable[[], None], StepResult]]


def obstacle(config: RunConfig, source: object, world: World) -> str:
    """Why no step of this run can be recorded on a GPU; empty where one can."""
    distributed, mode = config.distributed, config.precision.compile_mode
    own = ":" in f"{config.model.name}{config.task}" and config.precision.cuda_graph == "auto"
    reasons = {
        "the batches are not cut from images on the GPU": not isinstance(source, CachedSource),
        "a model or task of your own may decide on the host what it does (--cuda-graph on: it does not)": own,
        "torch.nn.DataParallel copies the model in every step": distributed.data_parallel,
        f"--compile-mode {mode} replays graphs of its own": config.precision.compile
        and mode in ("reduce-overhead", "max-autotune"),
        "gradients travel through gloo, which is on the host": world.is_distributed
        and uses_gloo(distributed, world.device),
        "--find-unused-parameters asks in every step": world.is_distributed and distributed.find_unused_parameters,
        f"--compression {distributed.compression} is done by the host": world.is_distributed
        and distributed.compression != "none",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def record_steps(config: RunConfig, engine: Engine, source: object) -> None:
    """Let ``engine`` record and replay its steps, where that can be, or say why not. CPUs have no such thing."""
    if engine.world.device.type != "cuda" or config.precision.cuda_graph == "off":
        return
    if why := obstacle(config, source, engine.world):
        say(engine.world, f"none, {_PIECES}: {why}")
    else:
        assert isinstance(source, CachedSource)
        StepGraph(engine, source, config)


class StepGraph:
    """Takes the steps of whole batches: some as they come, then one that is recorded, then replays of that one.

    Recorded are the batch's gather and augmentation, forward, backward, all-reduce and update. What differs between
    steps is put on the device before: where in the epoch the batch begins, the learning rate and the generator's seed.
    A step that can't be recorded is a line in the log, and the run goes on without. Steps of smaller batches are never
    recorded.
    """

    def __init__(self, engine: Engine, source: CachedSource, config: RunConfig, record: Record | None = None) -> None:
        self._engine, self._source, self._world = engine, source, engine.world
        self._size = config.data.batch_size * config.optim.accumulate
        self._timeout = config.distributed.timeout_seconds
        self._record = record_on_gpu if record is None else record
        self._timeline = Timeline(engine.world.device)
        self._eager_steps = 0
        self._failed = False
        self._replay: Callable[[], None] | None = None
        self._result: StepResult | None = None
        self._under_way: deque[Any] = deque()
        if isinstance(engine.replica, DistributedDataParallel):
            # By default again in every hundredth step.
            engine.replica._set_ddp_runtime_logging_sample_rate(2**30)  # type: ignore[no-untyped-call]
        engine.keep_lr_on_device()
        engine.graph = self
        engine.world.before_close.append(self.close)
        source.record(self._replays)

    def _replays(self, count: int) -> bool:
        """Whether the next step, of ``count`` samples, is recorded or replayed."""
        if count != self._size or self._failed:
            return False
        self._eager_steps += 1
        return self._eager_steps > WARM_UP

    def step(self) -> StepResult:
        """Take the step whose batch begins where the source says.

        Raises RuntimeError where the device does not come to the end of a step, as when another rank hangs.
        """
        if self._replay is None:
            self._begin()
        if self._replay is None or self._result is None:
            return self._engine.take(self._source.at_cursor(self._size))
        while len(self._under_way) >= _AHEAD:
            self._wait(self._under_way.popleft())
        self._engine.clock.replayed()
        self._replay()
        self._under_way.append(self._timeline.now())
        loss, norm, correct = self._result.loss, self._result.grad_norm, self._result.correct
        return StepResult(
            loss.clone(), None if norm is None else norm.clone(), None if correct is None else correct.clone()
        )

    def close(self) -> None:
        """Let go of the recorded step: NCCL waits for that before it leaves the group."""
        while self._under_way:
            self._wait(self._under_way.popleft())
        self._replay = self._result = None

    def _wait(self, moment: Any) -> None:
        """Wait until the device is there. In turns: NCCL's own watchdog does not see what a graph sends."""
        deadline = time.perf_counter() + self._timeout
        while not self._timeline.reached(moment):
            if time.perf_counter() > deadline:
                raise RuntimeError(f"the device has not ended a step in {self._timeout:g} s: does another rank hang?")
            time.sleep(0.0002)

    def _begin(self) -> None:
        """Record a step; on all ranks or on none, because a message that is recorded is one for all of them."""
        started, problem = time.perf_counter(), ""
        try:
            with _capturable(self._engine.optimizer), self._engine.clock.recording():
                recorded = self._record(lambda: self._engine.take(self._source.at_cursor(self._size)))
        except Exception as error:
            problem = " ".join(str(error).split())[:200] or type(error).__name__
        failed = int(self._world.sum([float(bool(problem))])[0])
        if not failed:
            self._replay, self._result = recorded
            seconds = time.perf_counter() - started
            say(self._world, f"recorded after {WARM_UP} steps in {seconds:.1f} s; each is one launch now")
            return
        self._failed = True
        self._engine.recover()
        where = f" on {failed} of {self._world.size} ranks" if self._world.is_distributed else ""
        say(self._world, f"none, {_PIECES}: it can't be recorded{where}{problem and ': '}{problem}")


def say(world: World, what: str) -> None:
    """Tell on rank 0 what became of the graph."""
    if world.is_main:
        print(f"CUDA graph of a step: {what}", flush=True)


def record_on_gpu(function: Callable[[], StepResult]) -> tuple[Callable[[], None], StepResult]:
    """Record what ``function`` asks the device for, without doing it; returns how to do it, and where its result is.

    Threads that write checkpoints or read ahead may go on with theirs.
    """
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = function()
    return graph.replay, result


@contextlib.contextmanager
def _capturable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Tell an optimiser that asks. A fused one computes the same, but warns at every other time where it stays so."""
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    before = [group["capturable"] for group in groups]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group, value in zip(groups, before, strict=True):
            group["capturable"] = value
