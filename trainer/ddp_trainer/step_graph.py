"""One CUDA graph per step: the hundreds of kernel launches of a step are recorded once and replayed by one launch."""

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

# Steps before the recording: DDP times its first ten steps by events that can't be recorded, and torch selects kernels
# in the first steps.
WARM_UP = 11
# Graphs whose recording failed, kept alive because torch's allocators may have pointers to them.
_ABANDONED: list[Any] = []
# Replays in the device's queue: enough to keep it busy, few enough to stop soon.
_MAX_QUEUED_REPLAYS = 2
_NOT_RECORDED = "not recorded (steps run kernel by kernel)"

Record = Callable[[Callable[[], StepResult]], tuple[Callable[[], None], StepResult]]


def obstacle(config: RunConfig, source: object, world: World) -> str:
    """Return why no step of this run can be recorded on a GPU; empty if one can."""
    if not isinstance(source, CachedSource):
        return "the images are not held on the GPU"
    if not _has_whole_batch(config, source, world):
        return "an epoch has no whole batch"
    if ":" in f"{config.model.name}{config.task}" and config.precision.cuda_graph != "on":
        return "your own model or task may run different kernels in each step (if it does not, give --cuda-graph on)"
    if ":" in f"{config.optim.name}{config.schedule.name}":
        return "the host sets the learning rates of your own optimizer or schedule"
    if config.distributed.data_parallel:
        return "torch.nn.DataParallel copies the model in every step"
    return _find_obstacle_of_ranks(config, world) if world.is_distributed else ""


def _find_obstacle_of_ranks(config: RunConfig, world: World) -> str:
    """Return why the communication between ranks can't be recorded; empty if it can."""
    distributed = config.distributed
    if uses_gloo(distributed, world.device):
        return "gloo averages the gradients on the host"
    if distributed.find_unused_parameters:
        return "--find-unused-parameters searches the graph of every step on the host"
    if distributed.compression != "none":
        return f"the host runs --compression {distributed.compression}"
    return ""


def _has_whole_batch(config: RunConfig, source: CachedSource, world: World) -> bool:
    share = samples_per_rank(len(source.labels), world.size, config.data.drop_last)
    return share >= config.data.batch_size * config.optim.accumulate


def record_steps(config: RunConfig, engine: Engine, source: object) -> None:
    """Make ``engine`` record and replay its steps if possible, otherwise print why not. Does nothing on a CPU."""
    if engine.world.device.type != "cuda" or config.precision.cuda_graph == "off":
        return
    if reason := obstacle(config, source, engine.world):
        report(engine.world, f"{_NOT_RECORDED}: {reason}")
    else:
        assert isinstance(source, CachedSource)
        StepGraph(engine, source, config)


class StepGraph:
    """Runs the first steps of whole batches without a graph, then records one step and replays it from then on.

    The graph contains the batch's gather and augmentation, forward, backward, all-reduce and update. Values that differ
    between steps are written to the device before: the batch's start in the epoch, the learning rate and the
    generator's seed. If the recording fails, the run continues without it and prints the reason. Steps of smaller
    batches are never recorded.
    """

    def __init__(self, engine: Engine, source: CachedSource, config: RunConfig, record: Record | None = None) -> None:
        self._engine = engine
        self._source = source
        self._world = engine.world
        self._size = config.data.batch_size * config.optim.accumulate
        self._timeout = config.distributed.timeout_seconds
        self._record = record_on_gpu if record is None else record
        self._timeline = Timeline(engine.world.device)
        self._eager_steps = 0
        self._failed = False
        self._replay: Callable[[], None] | None = None
        self._result: StepResult | None = None
        # For each replay in the device's queue, the moment of its end.
        self._queued: deque[Any] = deque()
        if isinstance(engine.replica, DistributedDataParallel):
            # By default DDP times every hundredth step, also after the first ten.
            engine.replica._set_ddp_runtime_logging_sample_rate(2**30)  # type: ignore[no-untyped-call]
        engine.keep_lr_on_device()
        engine.graph = self
        engine.world.before_close.append(self.close)
        source.record(self._replays)

    def _replays(self, count: int) -> bool:
        """Return whether the next step, of ``count`` samples, is recorded or replayed."""
        if count != self._size or self._failed:
            return False
        self._eager_steps += 1
        return self._eager_steps > WARM_UP

    def step(self) -> StepResult:
        """Take the step of the batch at the source's cursor.

        Raises RuntimeError if the device does not finish a step in time, as when another rank hangs.
        """
        if self._replay is None:
            self._begin()
        if self._replay is None or self._result is None:
            return self._engine.take(self._source.at_cursor(self._size))
        while len(self._queued) >= _MAX_QUEUED_REPLAYS:
            self._wait(self._queued.popleft())
        self._engine.clock.replayed()
        self._replay()
        self._queued.append(self._timeline.now())
        norm = self._result.grad_norm
        correct = self._result.correct
        return StepResult(
            self._result.loss.clone(),
            None if norm is None else norm.clone(),
            None if correct is None else correct.clone(),
        )

    def close(self) -> None:
        """Release the recorded step: NCCL waits for that before it leaves the group."""
        while self._queued:
            self._wait(self._queued.popleft())
        self._replay = None
        self._result = None
        self._engine.clock.forget_recording()

    def _wait(self, moment: Any) -> None:
        """Wait until the device reaches ``moment``; time out, because NCCL's watchdog does not cover replays."""
        deadline = time.perf_counter() + self._timeout
        while not self._timeline.reached(moment):
            if time.perf_counter() > deadline:
                raise RuntimeError(
                    f"the device did not finish a step within {self._timeout:g} s; another rank may hang"
                )
            time.sleep(0.0002)

    @property
    def settled(self) -> bool:
        """Return whether the recording has succeeded or failed."""
        return self._failed or self._replay is not None

    def _begin(self) -> None:
        """Record a step on all ranks or on none: a recorded all-reduce needs all ranks.

        Raises :class:`UserError` on all ranks if one can't continue after a failed recording.
        """
        started = time.perf_counter()
        problem = ""
        broken = False
        recorded: tuple[Callable[[], None], StepResult] | None = None
        try:
            with _capturable(self._engine.optimizer), self._engine.clock.recording():
                recorded = self._record(lambda: self._engine.take(self._source.at_cursor(self._size)))
        except Exception as error:
            # Kept as text: the exception references the step's frames, and so the replica that recover() replaces.
            problem = _describe_cause(error)
            broken = isinstance(error, AllocatorError)
        outcomes = self._world.sum([float(recorded is None), float(broken)])
        failed = int(outcomes[0])
        if not failed and recorded is not None:
            self._replay, self._result = recorded
            seconds = time.perf_counter() - started
            report(self._world, f"recorded after {WARM_UP} steps in {seconds:.1f} s; each step is now one launch")
            return
        self._failed = True
        recorded = None
        self._engine.clock.forget_recording()
        ranks = f" on {failed}/{self._world.size} ranks" if self._world.is_distributed else ""
        cause = f": {problem}" if problem else ""
        if outcomes[1]:
            raise UserError(
                "precision.cuda_graph",
                f"recording the step's CUDA graph failed{ranks}, and torch's allocator has not recovered{cause}",
                "restart with --cuda-graph off",
            )
        self._engine.recover()
        report(self._world, f"{_NOT_RECORDED}: the recording failed{ranks}{cause}")


def _describe_cause(error: BaseException) -> str:
    """Describe the first exception of the chain: later ones only state that the recording failed."""
    chain = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None and earlier not in chain:
        chain.append(earlier)
    return " ".join(str(chain[-1]).split())[:200] or type(chain[-1]).__name__


def report(world: World, status: str) -> None:
    """Print on rank 0 whether the graph is recorded."""
    if world.is_main:
        print(f"CUDA graph of a step: {status}", flush=True)


class AllocatorError(RuntimeError):
    """A recording failed and left torch's allocators unusable in this process."""


def record_on_gpu(function: Callable[[], StepResult]) -> tuple[Callable[[], None], StepResult]:
    """Record the kernels of ``function`` without running them; return a function that replays them, and their result.

    Other threads may use the device meanwhile, to write checkpoints or to read ahead. Raises :class:`AllocatorError` if
    the recording fails and the allocators do not recover.
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
        except Exception as failure:  # also if a version of torch lacks these functions
            raise AllocatorError(str(failure)) from error
        raise
    return graph.replay, result


def _abandon_recording(graph: Any, pool: Any, device: torch.device) -> None:
    """Restore the allocators and the generator of ``device`` after a failed recording.

    Until 2.11 torch's capture_end() throws before it closes the pool (pytorch#180395). From then on every release of
    memory and every random number fails an assertion. Raises RuntimeError if they still fail.
    """
    _ABANDONED.append(graph)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the stream is still recording")

    torch.cuda.synchronize(device)
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:  # torch has already closed the pool; reset() releases it
        graph.reset()
    else:
        graph.reset()
        torch._C._cuda_releasePool(device.index, pool)
    _renew_generator(device)

    # These three fail an assertion if the recording is still open: a draw, pinned memory, the release of memory.
    generator = torch.cuda.default_generators[device.index]
    seed = generator.initial_seed()
    torch.rand(1, device=device)
    torch.empty(1).pin_memory()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    generator.manual_seed(seed)


def _renew_generator(device: torch.device) -> None:
    """Give the device's generator a new state, which no recording uses, with the same seed."""
    generator = torch.cuda.default_generators[device.index]
    fresh = torch.Generator(device)
    fresh.manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


@contextlib.contextmanager
def _capturable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Set the optimizer's ``capturable`` during the recording; outside of one, fused optimizers would warn about it."""
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    previous = [group["capturable"] for group in groups]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group, value in zip(groups, previous, strict=True):
            group["capturable"] = value
