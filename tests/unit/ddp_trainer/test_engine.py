"""One optimizer step: its gradients, rates, clipping, dropout, state, and the replica under DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_sdk.errors import UserError
from ddp_sdk.rank_env import RankEnv
from ddp_trainer.config.run import RunConfig
from ddp_trainer.data import DataConfig
from ddp_trainer.data.loader import Batch
from ddp_trainer.distributed import DistributedConfig
from ddp_trainer.distributed.world import World
from ddp_trainer.engine import Engine
from ddp_trainer.models import ModelConfig, build_model
from ddp_trainer.optim import OptimConfig, build_optimizer
from ddp_trainer.precision import Precision, PrecisionConfig
from ddp_trainer.tasks import Classification

CPU = torch.device("cpu")
WORLD = World(RankEnv(), CPU)


def engine(optim: OptimConfig, *, precision: str = "fp32", dropout: float = 0.0, seed: int = 0) -> Engine:
    torch.manual_seed(0)
    model = build_model(ModelConfig(width=4, dropout=dropout), 1, 10)
    optimizer = build_optimizer(optim, model.parameters())
    form = Precision(PrecisionConfig(name=precision), CPU)
    return Engine(model, Classification(), optimizer, form, WORLD, RunConfig(optim=optim, seed=seed))


def batch(size: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return Batch(torch.randn(size, 1, 8, 8, generator=generator), torch.randint(0, 10, (size,), generator=generator))


def weights(one: Engine) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in one.model.parameters()])


def test_only_whole_batches_are_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []

    def compile_it(module: nn.Module, **_: object) -> Callable[[torch.Tensor], torch.Tensor]:
        def call(images: torch.Tensor) -> torch.Tensor:
            compiled.append(len(images))
            outputs: torch.Tensor = module(images)
            return outputs

        return call

    monkeypatch.setattr(torch, "compile", compile_it)
    plain = engine(OptimConfig())
    parts = plain.model, plain.task, plain.optimizer, plain.precision
    config = RunConfig(data=DataConfig(batch_size=6), precision=PrecisionConfig(compile=True))
    trainer = Engine(*parts, WORLD, config)
    for step, size in enumerate((6, 5, 6)):
        trainer.step(batch(size), step, 0.1)
    assert compiled == [6, 6]


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


def test_data_parallel_equals_one_process_and_saves_same_names(group: World) -> None:
    """Without GPUs it passes each batch on to the model."""
    plain = engine(OptimConfig())
    model = build_model(ModelConfig(width=4), 1, 10)
    model.load_state_dict(plain.model.state_dict())
    shared = replica_engine(model, WORLD, DistributedConfig(data_parallel=True))
    assert isinstance(shared.replica, nn.DataParallel)
    for step in range(2):
        plain.step(batch(), step, 0.1)
        shared.step(batch(), step, 0.1)
    assert torch.equal(weights(plain), weights(shared))
    assert shared.state_dict()["model"].keys() == plain.state_dict()["model"].keys()
    with pytest.raises(UserError, match="one process for all GPUs, but 2 processes run"):
        replica_engine(nn.Linear(1, 1), group, DistributedConfig(data_parallel=True))


def test_missing_gradients_are_named_before_optimizer_step_unless_they_are_searched(group: World) -> None:
    trainer = replica_engine(Unused(), group, DistributedConfig())
    before = weights(trainer)
    with pytest.raises(UserError) as caught:
        trainer.step(batch(), 0, 0.1)
    assert caught.value.field == "distributed.find_unused_parameters"
    assert "step 1 gave no gradient to spare.0.weight, spare.1.weight, " in caught.value.problem
    assert "spare.7.weight and 2 more" in caught.value.problem
    assert torch.equal(weights(trainer), before)

    searching, alone = (
        replica_engine(Unused(), world, DistributedConfig(find_unused_parameters=True)) for world in (group, WORLD)
    )
    alone.model.load_state_dict(searching.model.state_dict())
    for step in range(3):
        searching.step(batch(), step, 0.1)
        alone.step(batch(), step, 0.1)
    torch.testing.assert_close(weights(searching), weights(alone))


def test_step_uses_given_learning_rate_and_counts_compute_time_once() -> None:
    trainer = engine(OptimConfig(momentum=0.0, lr=123.0))
    assert trainer.clock.seconds() == 0.0
    before = weights(trainer)
    trainer.step(batch(), 0, 0.0)
    assert torch.equal(weights(trainer), before)
    assert trainer.clock.seconds() > 0.0
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


@pytest.mark.parametrize("name", ["sgd", "adamw", "novograd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_few_steps_lower_loss(name: str, precision: str) -> None:
    trainer = engine(OptimConfig(name=name), precision=precision)
    losses = [float(trainer.step(batch(), step, 0.01).loss) for step in range(20)]
    assert losses[-1] < 0.9 * losses[0]


def test_dropout_differs_between_steps_and_seeds_and_is_same_for_same_step() -> None:
    def loss(step: int, seed: int) -> float:
        return float(engine(OptimConfig(), dropout=0.5, seed=seed).step(batch(), step, 0.1).loss)

    assert loss(0, 0) == loss(0, 0)
    assert len({loss(0, 0), loss(1, 0), loss(0, 1)}) == 3


@pytest.mark.parametrize("after", ["sgd", "adamw", "novograd"])
@pytest.mark.parametrize("before", ["sgd", "adamw", "novograd"])
def test_state_of_same_optimizer_continues_bitwise_and_of_another_is_refused(before: str, after: str) -> None:
    whole = engine(OptimConfig(name=before), dropout=0.5)
    second = engine(OptimConfig(name=after), dropout=0.5)
    whole.step(batch(), 0, 0.01)
    if before != after:
        with pytest.raises(ValueError, match="the state is not one of"):
            second.load_state_dict(whole.state_dict())
        return
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.zero_()
    second.load_state_dict(copy.deepcopy(whole.state_dict()))
    torch.manual_seed(99)
    for trainer in (whole, second):
        trainer.step(batch(), 1, 0.01)
    assert torch.equal(weights(second), weights(whole))
    with pytest.raises(RuntimeError):
        second.load_state_dict(whole.state_dict() | {"model": nn.Linear(2, 2).state_dict()})


def test_resumed_run_uses_its_own_settings() -> None:
    trainer = engine(OptimConfig(momentum=0.9, weight_decay=0.1))
    trainer.step(batch(), 0, 0.01)
    second = engine(OptimConfig(momentum=0.5, weight_decay=0.0))
    second.load_state_dict(trainer.state_dict())
    (group,) = second.optimizer.param_groups
    assert (group["momentum"], group["weight_decay"]) == (0.5, 0.0)
    buffers = [[state["momentum_buffer"] for state in each.optimizer.state.values()] for each in (trainer, second)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*buffers, strict=True))
