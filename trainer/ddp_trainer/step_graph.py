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
from ddp_trainer.data.sampling import samples_per_rank
from ddp_trainer.data.sources import CachedSource
from ddp_trainer.distributed.ddp import uses_gloo
from ddp_trainer.distributed.world import World
from ddp_trainer.engine import Engine, StepResult
from ddp_trainer.errors import UserError
from ddp_trainer.observability.meters import Timeline

# DDP measures its first ten steps by events that can't be recorded, and torch picks kernels in the first ones.
WARM_UP = 11
# Graphs whose recording has failed: torch's allocators may keep pointers to them.
_ABANDONED: list[Any] = []
# Replays that the device has not done yet. The next one is there when one ends, and a stop is not far away.
_AHEAD = 2
_PIECES = "steps are launched piece by piece"

Record = Callable[[Callable[[], StepResult]], tuple[Callable[[], None], StepResult]]


def obstacle(config: RunConfig, source: object, world: World) -> str:
    """Why no step of this run can be recorded on a GPU; empty where one can."""
    distributed, mode = config.distributed, config.precision.compile_mode
    own = ":" in f"{config.model.name}{config.task}" and config.precision.cuda_graph != "on"
    reasons = {
        "the batches are not cut from images on the GPU": not isinstance(source, CachedSource),
        "an epoch has no whole batch": isinstance(source, CachedSource) and not _has_whole_batch(config, source, world),
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


def _has_whole_batch(config: RunConfig, source: CachedSource, world: World) -> bool:
    share = samples_per_rank(len(source.labels), world.size, config.data.drop_last)
    return share >= config.data.batch_size * config.optim.accumulate


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
        self._engine.clock.forget_recording()

    def _wait(self, moment: Any) -> None:
        """Wait until the device is there. In turns: NCCL's own watchdog does not see what a graph sends."""
        deadline = time.perf_counter() + self._timeout
        while not self._timeline.reached(moment):
            if time.perf_counter() > deadline:
                raise RuntimeError(f"the device has not ended a step in {self._timeout:g} s: does another rank hang?")
            time.sleep(0.0002)

    @property
    def settled(self) -> bool:
        """Whether the recording is over, or never takes place."""
        return self._failed or self._replay is not None

    def _begin(self) -> None:
        """Record a step; on all ranks or on none, because a message that is recorded is one for all of them.

        Raises :class:`UserError` on all ranks where one can't continue without it.
        """
        started = time.perf_counter()
        problem = ""
        broken = False
        recorded: tuple[Callable[[], None], StepResult] | None = None
        try:
            with _capturable(self._engine.optimizer), self._engine.clock.recording():
                recorded = self._record(lambda: self._engine.take(self._source.at_cursor(self._size)))
        except Exception as error:
            # As text: an exception holds the frames of the step, and with them the replica that recover() replaces.
            problem = _describe_cause(error)
            broken = isinstance(error, AllocatorError)
        outcomes = self._world.sum([float(recorded is None), float(broken)])
        failed = int(outcomes[0])
        if not failed and recorded is not None:
            self._replay, self._result = recorded
            seconds = time.perf_counter() - started
            say(self._world, f"recorded after {WARM_UP} steps in {seconds:.1f} s; each is one launch now")
            return
        self._failed = True
        recorded = None
        self._engine.clock.forget_recording()
        where = f" on {failed} of {self._world.size} ranks" if self._world.is_distributed else ""
        reason = f"it can't be recorded{where}{problem and ': '}{problem}"
        if outcomes[1]:
            raise UserError(
                "precision.cuda_graph",
                f"the step's CUDA graph can't be recorded{where}, and torch's allocator has not recovered"
                f"{problem and ': '}{problem}",
                "restart with --cuda-graph off",
            )
        self._engine.recover()
        say(self._world, f"none, {_PIECES}: {reason}")


def _describe_cause(error: BaseException) -> str:
    """Describe the first exception: what follows it states only that the recording has failed."""
    seen = [error]
    while (earlier := seen[-1].__cause__ or seen[-1].__context__) is not None and earlier not in seen:
        seen.append(earlier)
    return " ".join(str(seen[-1]).split())[:200] or type(seen[-1]).__name__


def say(world: World, what: str) -> None:
    """Tell on rank 0 what became of the graph."""
    if world.is_main:
        print(f"CUDA graph of a step: {what}", flush=True)


class AllocatorError(RuntimeError):
    """A recording has failed, and torch's allocators can't be used any more in this process."""


def record_on_gpu(function: Callable[[], StepResult]) -> tuple[Callable[[], None], StepResult]:
    """Record what ``function`` asks the device for, without doing it; returns how to do it, and where its result is.

    Threads that write checkpoints or read ahead may go on with theirs. Raises :class:`AllocatorError` where it fails
    and leaves the process without a working allocator.
    """
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = function()
    except Exception as error:
        try:
            _abandon_recording(graph, pool, stream.device)
        except Exception as broken:  # also where a version of torch lacks what this needs
            raise AllocatorError(str(broken)) from error
        raise
    return graph.replay, result


def _abandon_recording(graph: Any, pool: Any, device: torch.device) -> None:
    """Take allocators and generator of ``device`` out of a recording that has failed.

    Until 2.11 torch's capture_end() throws before it closes the pool (pytorch#180395), and from then on every
    release of memory and every random number fails an assertion. Raises RuntimeError where they still do.
    """
    _ABANDONED.append(graph)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the stream is still recording")

    torch.cuda.synchronize(device)
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:  # torch has closed it, and resets the graph with its pool
        graph.reset()
    else:
        graph.reset()
        torch._C._cuda_releasePool(device.index, pool)
    _renew_generator(device)

    # What fails an assertion after a recording that is not closed: a draw, pinned memory, and the release of memory.
    generator = torch.cuda.default_generators[device.index]
    seed = generator.initial_seed()
    torch.rand(1, device=device)
    torch.empty(1).pin_memory()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    generator.manual_seed(seed)


def _renew_generator(device: torch.device) -> None:
    """Give the device's generator a state that is in no recording, with the same seed."""
    generator = torch.cuda.default_generators[device.index]
    fresh = torch.Generator(device)
    fresh.manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


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
