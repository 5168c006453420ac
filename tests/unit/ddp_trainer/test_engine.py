from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_trainer.config.run import RunConfig
from ddp_trainer.data import DataConfig
from ddp_trainer.data.loader import Batch
from ddp_trainer.distributed import DistributedConfig, RankEnv
from ddp_trainer.distributed.ddp import replicate
from ddp_trainer.distributed.stop import Reason, StopAgreement, StopSignal
from ddp_trainer.distributed.world import World
from ddp_trainer.engine import Engine
from ddp_trainer.errors import UserError
from ddp_trainer.models import ModelConfig, build_model
from ddp_trainer.observability.meters import AsyncScalars, Stopwatch, Timeline
from ddp_trainer.observability.reporter import format_duration
from ddp_trainer.optim import OptimConfig, build_optimizer
from ddp_trainer.precision import Precision, PrecisionConfig
from ddp_trainer.tasks import Classification
from tests.support.fake_gpu import FakeGpu

CPU = torch.device("cpu")
WORLD = World(RankEnv(), CPU)


def engine(optim: OptimConfig, *, precision: str = "fp32", dropout: float = 0.0, seed: int = 0) -> Engine:
    torch.manual_seed(0)
    model = build_model(ModelConfig(width=4, norm="group", dropout=dropout), 1, 10)
    optimizer = build_optimizer(optim, model.parameters())
    form = Precision(PrecisionConfig(name=precision), CPU)
    return Engine(model, Classification(), optimizer, form, WORLD, RunConfig(optim=optim, seed=seed))


def batch(size: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return Batch(torch.randn(size, 1, 8, 8, generator=generator), torch.randint(0, 10, (size,), generator=generator))


def weights(one: Engine) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in one.model.parameters()])


@pytest.mark.parametrize("accumulate", [2, 3, 5])
def test_accumulation_equals_whole_batch(accumulate: int) -> None:
    whole = engine(OptimConfig())
    parts = engine(OptimConfig(accumulate=accumulate))
    for step in range(3):
        expected = whole.step(batch(), step, 0.1).loss
        torch.testing.assert_close(parts.step(batch(), step, 0.1).loss, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights(parts), weights(whole), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_only_whole_batches_are_compiled_for(accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []

    def compile_it(module: nn.Module, **_: object) -> Callable[[torch.Tensor], torch.Tensor]:
        def call(images: torch.Tensor) -> torch.Tensor:
            compiled.append(len(images))
            outputs: torch.Tensor = module(images)
            return outputs

        return call

    monkeypatch.setattr(torch, "compile", compile_it)
    optim = OptimConfig(accumulate=accumulate)
    plain = engine(optim)
    parts = plain.model, plain.task, plain.optimizer, plain.precision
    config = RunConfig(optim=optim, data=DataConfig(batch_size=6), precision=PrecisionConfig(compile=True))
    trainer = Engine(*parts, WORLD, config)
    for step, size in enumerate((6 * accumulate, 5 * accumulate, 6 * accumulate)):
        trainer.step(batch(size), step, 0.1)
    assert compiled == [6] * accumulate * 2


def test_accumulation_sends_gradients_once_per_step() -> None:
    trainer = engine(OptimConfig(accumulate=3))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trainer.replica = nn.parallel.DistributedDataParallel(trainer.model)
        trainer._forward = trainer.replica
        sent: list[int] = []

        def count(_, bucket):  # type: ignore[no-untyped-def]
            sent.append(bucket.index())
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        trainer.replica.register_comm_hook(None, count)
        trainer.step(batch(), 0, 0.1)
        assert sent == [0]
        trainer.step(batch(), 1, 0.1)
        assert sent == [0, 0]
    finally:
        dist.destroy_process_group()


class Unused(nn.Module):
    """Ten layers that the outputs do not depend on, beside one that they do."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(64, 10)
        self.spare = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.used(images.flatten(1))
        return outputs


@pytest.fixture
def group() -> Iterator[World]:
    """A process group of this process only with a world size of two, so that the model is a replica under DDP."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(RankEnv(world_size=2), CPU)
    dist.destroy_process_group()


def replica_engine(model: nn.Module, world: World, distributed: DistributedConfig) -> Engine:
    config = RunConfig(distributed=distributed)
    optimizer = build_optimizer(config.optim, model.parameters())
    return Engine(model, Classification(), optimizer, Precision(PrecisionConfig(), CPU), world, config)


def test_data_parallel_equals_one_process_and_saves_same_names() -> None:
    """Without GPUs it passes each batch on to the model."""
    plain = engine(OptimConfig())
    model = build_model(ModelConfig(width=4, norm="group"), 1, 10)
    model.load_state_dict(plain.model.state_dict())
    shared = replica_engine(model, WORLD, DistributedConfig(data_parallel=True))
    assert isinstance(shared.replica, nn.DataParallel)
    for step in range(2):
        plain.step(batch(), step, 0.1)
        shared.step(batch(), step, 0.1)
    assert torch.equal(weights(plain), weights(shared))
    assert shared.state_dict()["model"].keys() == plain.state_dict()["model"].keys()


def test_data_parallel_rejects_several_processes_and_compile(group: World) -> None:
    with pytest.raises(UserError, match="one process for all GPUs, but 2 processes run"):
        replica_engine(nn.Linear(1, 1), group, DistributedConfig(data_parallel=True))
    with pytest.raises(UserError, match=r"^distributed\.data_parallel: .*--compile"):
        RunConfig(distributed=DistributedConfig(data_parallel=True), precision=PrecisionConfig(compile=True))


def test_missing_gradients_are_named_before_optimizer_step(group: World) -> None:
    trainer = replica_engine(Unused(), group, DistributedConfig())
    before = weights(trainer)
    with pytest.raises(UserError) as caught:
        trainer.step(batch(), 0, 0.1)
    assert caught.value.field == "distributed.find_unused_parameters"
    assert "step 1 gave no gradient to spare.0.weight, spare.1.weight, " in caught.value.problem
    assert "spare.7.weight and 2 more, and DDP waits for all of them" in caught.value.problem
    assert "--find-unused-parameters" in caught.value.remedy
    assert torch.equal(weights(trainer), before)


def test_find_unused_parameters_accepts_missing_gradients(group: World) -> None:
    config = DistributedConfig(find_unused_parameters=True)
    engine = replica_engine(Unused(), group, config)
    alone = replica_engine(Unused(), WORLD, config)
    alone.model.load_state_dict(engine.model.state_dict())
    for step in range(3):
        engine.step(batch(), step, 0.1)
        alone.step(batch(), step, 0.1)
    torch.testing.assert_close(weights(engine), weights(alone))


@pytest.mark.parametrize(("given", "first"), [(None, 1), (25.0, 3)], ids=("default", "given"))
def test_first_bucket_is_small_by_default(given: float | None, first: int, group: World) -> None:
    layers = [nn.Linear(512, 512, bias=False) for _ in range(3)]  # 1 MiB each
    replica = replicate(nn.Sequential(*layers), DistributedConfig(bucket_mb=given), group)
    assert isinstance(replica, nn.parallel.DistributedDataParallel)
    sizes: list[int] = []

    def note(_, bucket):  # type: ignore[no-untyped-def]
        sizes.append(bucket.buffer().nbytes >> 20)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    replica.register_comm_hook(None, note)
    for _ in range(3):  # DDP rebuilds its buckets after the first step, in the order of its gradients
        sizes.clear()
        replica(torch.ones(1, 512)).sum().backward()
    assert sizes[0] == first
    assert sum(sizes) == 3


def test_compression_sends_in_small_buckets(group: World) -> None:
    replica = replicate(nn.Linear(1, 1), DistributedConfig(compression="bf16"), group)
    assert isinstance(replica, nn.parallel.DistributedDataParallel)
    assert replica.bucket_bytes_cap == 5 << 20


def test_step_uses_given_learning_rate() -> None:
    trainer = engine(OptimConfig(momentum=0.0, lr=123.0))
    before = weights(trainer)
    trainer.step(batch(), 0, 0.0)
    assert torch.equal(weights(trainer), before)
    trainer.step(batch(), 1, 0.1)
    assert not torch.equal(weights(trainer), before)


def test_clipping_bounds_update_and_reports_previous_norm() -> None:
    free = engine(OptimConfig(momentum=0.0))
    clipped = engine(OptimConfig(momentum=0.0, clip_norm=0.01))
    before = weights(free)
    assert free.step(batch(), 0, 1.0).grad_norm is None
    norm = clipped.step(batch(), 0, 1.0).grad_norm
    assert norm is not None
    torch.testing.assert_close(norm, (weights(free) - before).norm(), rtol=1e-4, atol=1e-6)
    assert float((weights(clipped) - before).norm()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_few_steps_lower_loss(name: str, precision: str) -> None:
    trainer = engine(OptimConfig(name=name), precision=precision)
    losses = [float(trainer.step(batch(), step, 0.01).loss) for step in range(20)]
    assert losses[-1] < 0.9 * losses[0]


def test_state_loaded_by_another_engine_continues_bitwise() -> None:
    optim = OptimConfig(name="adamw", clip_norm=1.0)
    whole = engine(optim, dropout=0.5)
    first = engine(optim, dropout=0.5)
    for step in range(6):
        whole.step(batch(), step, 0.01)
    for step in range(3):
        first.step(batch(), step, 0.01)
    torch.manual_seed(99)
    second = engine(optim, dropout=0.5)
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.zero_()
    second.load_state_dict(first.state_dict())
    for step in range(3, 6):
        second.step(batch(), step, 0.01)
    assert torch.equal(weights(second), weights(whole))


def test_dropout_differs_between_steps_and_seeds_and_is_same_for_same_step() -> None:
    def loss(step: int, seed: int) -> float:
        return float(engine(OptimConfig(), dropout=0.5, seed=seed).step(batch(), step, 0.1).loss)

    assert loss(0, 0) == loss(0, 0)
    assert len({loss(0, 0), loss(1, 0), loss(0, 1)}) == 3


def test_state_of_another_model_is_refused() -> None:
    trainer = engine(OptimConfig())
    state = trainer.state_dict() | {"model": nn.Linear(2, 2).state_dict()}
    with pytest.raises(RuntimeError):
        trainer.load_state_dict(state)


@pytest.mark.parametrize("after", ["sgd", "adamw", "novograd"])
@pytest.mark.parametrize("before", ["sgd", "adamw", "novograd"])
def test_state_of_another_optimizer_is_rejected(before: str, after: str) -> None:
    trainer = engine(OptimConfig(name=before))
    second = engine(OptimConfig(name=after))
    trainer.step(batch(), 0, 0.01)
    if before == after:
        second.load_state_dict(trainer.state_dict())
        second.step(batch(), 1, 0.01)
    else:
        with pytest.raises(ValueError, match="the state is not one of"):
            second.load_state_dict(trainer.state_dict())


def test_resumed_run_uses_its_own_settings() -> None:
    trainer = engine(OptimConfig(momentum=0.9, weight_decay=0.1))
    trainer.step(batch(), 0, 0.01)
    second = engine(OptimConfig(momentum=0.5, weight_decay=0.0))
    second.load_state_dict(trainer.state_dict())
    (group,) = second.optimizer.param_groups
    assert (group["momentum"], group["weight_decay"]) == (0.5, 0.0)
    buffers = [[state["momentum_buffer"] for state in each.optimizer.state.values()] for each in (trainer, second)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*buffers, strict=True))


def test_precision_that_needs_gpu_is_refused_on_cpu() -> None:
    with pytest.raises(UserError, match="fp16 needs a GPU"):
        Precision(PrecisionConfig(name="fp16"), CPU)


def test_compute_time_is_counted_once_step() -> None:
    trainer = engine(OptimConfig())
    assert trainer.clock.seconds() == 0.0
    trainer.step(batch(), 0, 0.1)
    assert trainer.clock.seconds() > 0.0


# Models


def test_small_resnet_maps_images_to_logits() -> None:
    for norm in ("batch", "group", "none"):
        model = build_model(ModelConfig(norm=norm), 3, 7)
        assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 7)


def test_users_model_must_be_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_trainer.models.small_resnet.build", lambda *arguments: 3)
    with pytest.raises(UserError, match=r"model.name: .* returned int; return a torch.nn.Module"):
        build_model(ModelConfig(name="ddp_trainer.models.small_resnet:build"), 1, 10)


# Task and meters


def test_totals_of_parts_add_up_to_whole() -> None:
    task = Classification()
    outputs = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(10) % 4
    parts = task.totals(outputs[:3], targets[:3]) + task.totals(outputs[3:], targets[3:])
    scores = task.scores(parts.tolist())
    assert len(parts) == task.num_totals
    assert scores["accuracy"] == pytest.approx(float((outputs.argmax(1) == targets).float().mean()))
    assert scores["loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs, targets)), rel=1e-5)


def test_scalars_of_any_shape_and_type_keep_order() -> None:
    taken = AsyncScalars([torch.tensor(1.0), torch.tensor([2.0]), torch.tensor(6, dtype=torch.int64)])
    assert taken.ready()
    assert taken.read() == [1.0, 2.0, 6.0]
    assert AsyncScalars([]).read() == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pauses_are_excluded_from_training_time(device: str, gpu: FakeGpu) -> None:
    watch = Stopwatch(torch.device(device))
    timeline = Timeline(torch.device(device))
    gpu.work(10.0)
    gpu.wait()
    before = timeline.now()
    gpu.work(2.0)
    gpu.wait()
    watch.pause(before, timeline.now())
    assert watch.lap()() == 10.0
    assert watch.lap()() == 0.0


def test_lap_on_gpu_ends_with_device_work(gpu: FakeGpu) -> None:
    device = torch.device("cuda")
    watch = Stopwatch(device)
    timeline = Timeline(device)
    gpu.work(10.0, host=0.5)
    before = timeline.now()
    gpu.work(2.0, host=0.25)  # for example copies of a state, for which the host does not wait
    watch.pause(before, timeline.now())
    gpu.work(10.0, host=0.5)
    end = timeline.now()
    lap = watch.lap()
    assert gpu.host == 1.25
    assert not timeline.reached(end)
    assert lap() == 20.5
    assert timeline.reached(end)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (65, "1:05"), (3723, "1:02:03")])
def test_duration_is_formatted_as_clock(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


# Stopping


def test_signal_is_recorded_and_second_interrupt_raises() -> None:
    stop = StopSignal()
    stop.install()
    agreement = StopAgreement(WORLD, stop)
    assert not agreement.poll()
    os.kill(os.getpid(), signal.SIGTERM)
    assert agreement.poll()
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("seconds", "messages"), [(0.001, 7), (0.04, 34), (2.0, 100)])
def test_short_steps_send_few_messages(
    seconds: float, messages: int, group: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    sent: list[float] = []
    send = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda note, **named: sent.append(now) or send(note, **named))
    stop = StopSignal()
    agreement = StopAgreement(group, stop)
    for _ in range(100):
        assert agreement.poll() is Reason.NONE
        now += seconds
    assert len(sent) == messages
    stop.request(Reason.SIGNAL)
    polls = 1
    while not agreement.poll():
        polls += 1
    assert polls <= 18


def test_pending_message_is_repeated_in_next_phase(group: World) -> None:
    stop = StopSignal()
    stop.request(Reason.NOT_FINITE)
    agreement = StopAgreement(group, stop)
    assert not agreement.poll()
    agreement.begin()
    assert not agreement.poll()
    assert agreement.poll() is Reason.NOT_FINITE
    agreement.begin(0)
    agreement.poll()
    assert [agreement.poll() for _ in range(30)] == [Reason.NOT_FINITE] * 30, "each has a message"


def test_greatest_stop_reason_is_kept() -> None:
    stop = StopSignal()
    stop.request(Reason.SUPERSEDED)  # nothing may be written after it
    stop.request(Reason.SIGNAL)
    assert StopAgreement(WORLD, stop).poll() is Reason.SUPERSEDED
