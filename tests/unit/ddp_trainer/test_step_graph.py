"""A recorded and replayed step equals the original step.

A tape of operations is the stand-in for a GPU's graph. It freezes the same values as a graph: see
tests/support/tape.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_trainer import step_graph
from ddp_trainer.config.run import RunConfig, resolve
from ddp_trainer.data import augment
from ddp_trainer.data.arrays import Datasets, ImageData
from ddp_trainer.data.loader import Batch, TrainLoader
from ddp_trainer.data.sources import CachedSource, Place
from ddp_trainer.distributed import RankEnv
from ddp_trainer.distributed.world import World
from ddp_trainer.engine import Engine, StepResult
from ddp_trainer.errors import UserError
from ddp_trainer.models import build_model
from ddp_trainer.optim import build_optimizer
from ddp_trainer.precision import Precision
from ddp_trainer.step_graph import StepGraph, obstacle
from ddp_trainer.tasks import build_task
from tests.support import tape
from tests.support.fake_capture import FakeCapture

CPU = torch.device("cpu")
ALONE = World(RankEnv(), CPU)


class StepHarness:
    """The objects that take the steps of a training, and their results."""

    def __init__(self, config: RunConfig, world: World = ALONE, scaler: Any = None) -> None:
        shape = (1, 8, 8) if config.data.name == "digits" else (3, 8, 8)
        random = torch.Generator().manual_seed(1)
        images = torch.randint(0, 256, (26, *shape), dtype=torch.uint8, generator=random)
        data = ImageData(images, torch.randint(0, 4, (26,), generator=random))
        datasets = Datasets(data, data, 4, (0.5,), (0.5,))
        self.config = config
        size = config.data.batch_size * config.optim.accumulate
        self.loader = TrainLoader(datasets, config.data, Place(0, 1, CPU), samples_per_step=size, seed=3)
        torch.manual_seed(0)
        model = build_model(config.model, shape[0], 4)
        parts = build_task(datasets, 0.1), build_optimizer(config.optim, model.parameters())
        precision = Precision(config.precision, CPU)
        precision.scaler = scaler
        self.engine = Engine(model, *parts, precision, world, config)
        self.engine.keep_lr_on_device()
        self.taken: list[StepResult] = []

    def graph(self, record: step_graph.Record = tape.record) -> None:
        assert isinstance(self.loader.source, CachedSource)
        StepGraph(self.engine, self.loader.source, self.config, record)

    def step(self, batch: Batch) -> None:
        step = len(self.taken)
        rate = 0.1 / (1 + step)
        self.taken.append(self.engine.step(batch, step, rate))
        # Two runs that keep a rate of long ago would be the same as well.
        assert all(float(group["lr"]) == pytest.approx(rate) for group in self.engine.optimizer.param_groups)

    def train(self, epochs: range, consumed: int = 0) -> list[Tensor]:
        """Take the steps of ``epochs``. Return everything that a checkpoint contains, and all losses."""
        for epoch in epochs:
            for batch in self.loader.epoch(epoch, consumed):
                self.step(batch)
            consumed = 0
        state = torch.utils._pytree.tree_leaves(self.engine.state_dict())
        results = [value for item in self.taken for value in vars(item).values()]
        return [torch.as_tensor(value).clone() for value in (*state, *results) if value is not None]


@pytest.fixture(autouse=True)
def _cut_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Crops are gathered, as on a GPU; NumPy's slices exist on the host only."""

    def gather(cache: Tensor, indices: Tensor, places: Any, flips: Any, height: int, width: int) -> Tensor:
        there = torch.from_numpy(places), torch.from_numpy(flips)
        return augment._gather_indexed(cache, indices, *there, height, width)

    monkeypatch.setattr(augment, "_slice_numpy", gather)
    monkeypatch.setattr(step_graph, "WARM_UP", 3)


def settings(**changes: Any) -> RunConfig:
    own = {"data": {"batch_size": 6, "name": "cifar10", "augment": ["crop", "flip"], "crop_padding": 1}}
    values = {"model": {"name": "small-resnet", "width": 4, "dropout": 0.3}, **own}
    for group, value in changes.items():
        values[group] = {**values.get(group, {}), **value} if isinstance(value, dict) else value
    return resolve(None, None, values)


WIDE = {"name": "wide-resnet", "widen": 1, "dropout": 0.1}
CHANGES = {
    "sgd": {"optim": {"clip_norm": 0.5, "ema_decay": 0.9}, "train_accuracy": True},
    "plain": {"optim": {"momentum": 0.0}, "data": {"augment": []}},
    "adamw": {"optim": {"name": "adamw", "weight_decay": 0.1}, "precision": {"name": "bf16"}},
    "novograd": {
        "optim": {"name": "novograd", "weight_decay": 0.1},
        "model": WIDE,
        "data": {"augment": ["flip", "rotate", "affine", "jitter"]},
    },
    "accumulate": {"optim": {"accumulate": 2}, "data": {"batch_size": 3}},
}


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Compare bit by bit; the norm of a step that a scaler skips is not a number."""
    pairs = zip(ours, theirs, strict=True)
    return all(torch.allclose(item, second, rtol=0.0, atol=0.0, equal_nan=True) for item, second in pairs)


@pytest.mark.parametrize("name", CHANGES)
def test_replayed_steps_are_steps_themselves(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    eager = StepHarness(settings(**CHANGES[name]))
    replayed = StepHarness(settings(**CHANGES[name]))
    replayed.graph()
    assert same(eager.train(range(3)), replayed.train(range(3)))
    # Epochs have four whole batches and one of two samples, which is not recorded.
    assert "CUDA graph of a step: recorded after 3 steps in " in capsys.readouterr().out
    assert len({float(item.loss) for item in replayed.taken}) == 15


def test_scaler_scales_and_skips_steps_in_replays() -> None:
    # The scale is too large: the first steps are skipped, and the scale halves each time.
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=4) for _ in range(2)]
    runs = [StepHarness(settings(optim={"clip_norm": 0.5}), scaler=scaler) for scaler in scalers]
    runs[1].graph()
    eager, replayed = (run.train(range(3)) for run in runs)
    assert same(eager, replayed)
    scales = [run.engine.precision.state_dict()["scale"] for run in runs]
    assert scales[0] == scales[1] < 2.0**125
    assert bool(torch.stack([item.loss for item in runs[0].taken]).isfinite().all())


def test_resumed_run_records_again_and_continues_bitwise() -> None:
    whole, first, second = (StepHarness(settings(optim={"ema_decay": 0.9})) for _ in range(3))
    for run in (whole, first, second):
        run.graph()
    expected = whole.train(range(3))
    first.train(range(1))
    batches = first.loader.epoch(1)
    for _ in range(2):
        first.step(next(batches))
    state = first.engine.state_dict()
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.1 / 7, "as a number, for whoever resumes without a graph"
    second.engine.load_state_dict(state)
    second.taken = first.taken
    rest = second.train(range(1, 3), consumed=12)
    assert same(expected, rest)


class HostWork(TorchDispatchMode):
    """Records the operations that the host runs outside the tape."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_replay_needs_few_launches() -> None:
    watch = HostWork()
    steps = 0

    def record(function: Callable[[], StepResult]) -> Any:
        replay, result = tape.record(function)

        def count() -> None:
            nonlocal steps
            asked = list(watch.asked)
            steps = steps + 1
            replay()
            watch.asked[:] = asked  # the operations on the tape are not repeated by the host

        return count, result

    run = StepHarness(settings(optim={"clip_norm": 0.5}))
    run.graph(record)
    run.train(range(1))
    for batch in run.loader.epoch(1):
        watch.asked.clear()
        with watch:
            run.engine.step(batch, 5, 0.1)
        if len(batch) == 6:
            assert watch.asked == ["fill_.Scalar", "clone.default", "clone.default"]
        else:
            assert len(watch.asked) > 100
    assert steps == 5


@pytest.fixture
def group() -> Iterator[World]:
    """A process group of this process only with a world size of two, so that the model is a replica under DDP."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(RankEnv(world_size=2), CPU)
    dist.destroy_process_group()


def test_ddp_communication_is_recorded(group: World) -> None:
    eager, replayed = (StepHarness(settings(), group) for _ in range(2))
    sent = 0
    original = tape.Tape.replay

    def replay(self: tape.Tape) -> None:
        nonlocal sent
        sent += sum(call[0].name() == "c10d::allreduce_" for call in self.calls)
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tape.Tape, "replay", replay)
        replayed.graph()
        assert same(eager.train(range(2)), replayed.train(range(2)))
    assert sent >= 5


def fails_midway(function: Callable[[], StepResult]) -> Any:
    class Refuses(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ == "convolution_backward.default":
                raise RuntimeError("operation not permitted\nwhen stream is capturing")
            return func(*args, **(kwargs or {}))

    def refused() -> StepResult:
        with Refuses():
            return function()

    return tape.record(refused)


@pytest.mark.parametrize("several", [False, True])
def test_failed_recording_falls_back_to_eager_step(
    several: bool, group: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world = group if several else ALONE
    eager, refused = (StepHarness(settings(), world) for _ in range(2))
    refused.graph(fails_midway)
    assert same(eager.train(range(2)), refused.train(range(2)))
    where = " on 1/2 ranks" if several else ""
    assert capsys.readouterr().out == (
        f"CUDA graph of a step: not recorded (steps run kernel by kernel): the recording failed{where}: "
        "operation not permitted when stream is capturing\n"
    )


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, ""),
        ({"precision": {"compile": True}}, ""),
        ({"model": {"name": "mine:build"}}, "your own model or task may run different kernels"),
        ({"model": {"name": "mine:build"}, "precision": {"cuda_graph": "on"}}, ""),
        ({"distributed": {"compression": "bf16"}}, "the host runs --compression bf16"),
        ({"distributed": {"find_unused_parameters": True}}, "--find-unused-parameters searches"),
        ({"distributed": {"backend": "gloo"}}, "gloo averages the gradients"),
        ({"distributed": {"data_parallel": True}}, "torch.nn.DataParallel"),
        ({"optim": {"name": "mine:build"}}, "the learning rates of your own optimizer"),
        ({"schedule": {"name": "mine:build"}}, "the learning rates of your own optimizer"),
    ],
)
def test_obstacle_names_reason(changes: dict[str, Any], word: str) -> None:
    source = StepHarness(settings()).loader.source
    world = World(RankEnv(world_size=2), torch.device("cuda", 0))
    why = obstacle(settings(**changes), source, world)
    assert word in why
    assert bool(word) == bool(why)


def test_unfinished_device_step_is_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = StepHarness(settings(distributed={"timeout_seconds": 0.01}))
    run.graph()
    monkeypatch.setattr("ddp_trainer.observability.meters.Timeline.reached", lambda self, moment: False)
    with pytest.raises(RuntimeError, match=r"did not finish a step within 0\.01 s"):
        run.train(range(2))


def test_epoch_without_whole_batch_is_obstacle() -> None:
    source = StepHarness(settings()).loader.source
    world = World(RankEnv(), torch.device("cuda", 0))
    assert obstacle(settings(data={"batch_size": 27}), source, world) == "an epoch has no whole batch"
    assert obstacle(settings(data={"batch_size": 26}), source, world) == ""


def refuse_to_record() -> StepResult:
    raise torch.AcceleratorError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("closes", [False, True])
def test_failed_capture_keeps_allocator_and_generator_usable(closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = FakeCapture(monkeypatch, closes=closes)
    capture.state.manual_seed(42)
    with pytest.raises(torch.AcceleratorError):
        step_graph.record_on_gpu(refuse_to_record)
    assert not capture.open
    assert capture.references == 0, "the pool's memory is lost, or released twice"
    assert not any(state is capture.state for state in capture.in_recording)
    assert capture.state.initial_seed() == 42


def test_failed_python_code_in_capture_releases_its_pool_once(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = FakeCapture(monkeypatch, closes=False)

    def fail() -> StepResult:
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        step_graph.record_on_gpu(fail)
    assert (capture.open, capture.references) == (set(), 0)


@pytest.mark.parametrize("fault", ["pool", "stream"])
def test_allocator_stuck_in_capture_ends_run_on_all_ranks(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = StepHarness(settings())

    def record(function: Callable[[], StepResult]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            capture = FakeCapture(patch, closes=False, heals=fault != "pool")
            capture.stream_captures = fault == "stream"
            return step_graph.record_on_gpu(refuse_to_record)

    run.graph(record)
    with pytest.raises(UserError, match=r"precision\.cuda_graph: .*not permitted.*; restart with --cuda-graph off"):
        run.train(range(1))


def test_events_of_graph_live_as_long_as_graph() -> None:
    run = StepHarness(settings(optim={"accumulate": 2}, data={"batch_size": 3}))
    run.graph()
    run.train(range(2))
    clock = run.engine.clock
    # The start, and the end of each part's backward pass.
    assert len(clock._recorded_events) == 3
    graph = run.engine.graph
    assert isinstance(graph, StepGraph)
    graph.close()
    assert clock._recorded_events == []


def test_events_of_graph_outlive_time_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    run = StepHarness(settings())
    run.graph()

    def fail(*_: Any) -> float:
        raise RuntimeError("both events must be recorded")

    monkeypatch.setattr("ddp_trainer.observability.meters.Timeline.seconds", fail)
    monkeypatch.setattr(run.engine.clock, "seconds", lambda: 0.0)
    run.train(range(2))
    assert run.engine.clock._recorded is None
    assert len(run.engine.clock._recorded_events) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_graph_is_settled_after_recording_or_failure(fails: bool) -> None:
    run = StepHarness(settings())
    run.graph(fails_midway if fails else tape.record)
    assert run.engine.graph is not None
    batches = run.loader.epoch(0)
    for _ in range(3):
        run.step(next(batches))
        assert not run.engine.graph.settled
    run.step(next(batches))
    assert run.engine.graph.settled
