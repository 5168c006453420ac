"""A program's own optimizer and schedule: the steps of a plain loop, exact resume, and what is refused."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

from ddp_trainer import (
    CheckpointConfig,
    DataConfig,
    Datasets,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    Trainer,
    UserError,
)
from ddp_trainer.cli import main
from ddp_trainer.config.run import MetricsConfig
from ddp_trainer.data.sampling import train_order
from ddp_trainer.distributed import DistributedConfig
from ddp_trainer.engine import Engine
from ddp_trainer.memory.state import flatten
from tests.support.own_task import example
from tests.support.saved_states import load, same

EXAMPLE = example()
DATA = Datasets(EXAMPLE.samples(100, 0), EXAMPLE.samples(20, 1))
STEPS = 26  # 13 steps of 8 samples in each of two epochs


@pytest.fixture(autouse=True)
def _in_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DDP_METRICS_PORT", "0")
    monkeypatch.delenv("DDP_CHECKPOINT_DIR", raising=False)
    monkeypatch.chdir(tmp_path)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = EXAMPLE.build()
    return model


def adamw(model: nn.Module) -> Optimizer:
    """Two groups with rates of their own."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return torch.optim.AdamW([{"params": matrices, "lr": 0.02}, {"params": vectors, "weight_decay": 0.0}], lr=0.05)


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, dampening=0.5)


def one_cycle(optimizer: Optimizer, total_steps: int) -> OneCycleLR:
    """One that also changes the momentum, in the optimizer's groups."""
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=total_steps)


def falling(optimizer: Optimizer, total_steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0 - step / (2 * total_steps))


def fit(folder: str, optimizer: Any = None, scheduler: Any = None, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "epochs": 2,
        "data": DataConfig(batch_size=8, workers=0),
        "distributed": DistributedConfig(device="cpu"),
        "metrics": MetricsConfig(port=0),
        "checkpoint": CheckpointConfig(dir=folder, keep=99, every_steps=1),
    }
    trainer = Trainer(
        RunConfig(**(values | changes)),
        model=build_model,
        data=DATA,
        task=EXAMPLE.Regression(),
        optimizer=optimizer,
        scheduler=scheduler,
    )
    return trainer.fit()


def train_plainly(
    build: Callable[[nn.Module], Optimizer], schedule: Callable[[Optimizer, int], Any] | None = None
) -> dict[str, Tensor]:
    """The same training as a loop of PyTorch."""
    model = build_model()
    optimizer = build(model)
    scheduler = None if schedule is None else schedule(optimizer, STEPS)
    inputs, targets = EXAMPLE.samples(100, 0).tensors
    for epoch in range(2):
        for chosen in train_order(100, seed=0, epoch=epoch, rank=0, world_size=1).split(8):
            optimizer.zero_grad()
            EXAMPLE.Regression().loss(model(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        (adamw, None),
        (momentum, one_cycle),
        (adamw, falling),
        (
            functools.partial(lambda rate, model: torch.optim.RMSprop(model.parameters(), rate, momentum=0.9), 0.01),
            None,
        ),
    ],
    ids=("groups", "one-cycle", "lambda", "rmsprop"),
)
def test_steps_equal_those_of_plain_loop(optimizer: Any, scheduler: Any) -> None:
    result = fit("run", optimizer, scheduler)
    assert result.steps == STEPS
    assert same(dict(result.model.state_dict()), dict(train_plainly(optimizer, scheduler)))


def test_own_schedule_advances_trainers_optimizer() -> None:
    result = fit("run", scheduler=falling, optim=OptimConfig(name="sgd", lr=0.05, momentum=0.9))

    def sgd(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)

    assert same(dict(result.model.state_dict()), dict(train_plainly(sgd, falling)))


def test_trainers_schedule_multiplies_rates_of_own_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[list[float]] = []
    step = Engine.step

    def record(self: Engine, *arguments: Any) -> Any:
        result = step(self, *arguments)
        rates.append([group["lr"] for group in self.optimizer.param_groups])
        return result

    monkeypatch.setattr(Engine, "step", record)
    fit("run", adamw, schedule=ScheduleConfig(name="cosine", warmup_epochs=1.0, warmup_start=0.5))
    assert rates[0] == [0.01, 0.025]
    assert rates[13] == [0.02, 0.05]
    assert rates[-1][0] < 0.001
    assert all(first / second == pytest.approx(0.4) for first, second in rates)


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "schedule"),
    [
        (adamw, None, ScheduleConfig(name="cosine", warmup_epochs=0.5, warmup_start=0.1)),
        (momentum, one_cycle, ScheduleConfig()),
        (None, falling, ScheduleConfig()),
    ],
    ids=("groups", "one-cycle", "schedule-only"),
)
@pytest.mark.parametrize("cut", [1, 5, 13, 20])
def test_run_resumes_to_bitwise_same_state(
    cut: int, optimizer: Any, scheduler: Any, schedule: ScheduleConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fit("whole", optimizer, scheduler, schedule=schedule)
    whole = load(tmp_path / "whole" / f"step-{STEPS:09d}.pt")
    step = Engine.step

    def fail(self: Engine, batch: Any, number: int, lr: float) -> Any:
        if number == cut:
            raise RuntimeError("fails here")
        return step(self, batch, number, lr)

    for folder, memory in (("disk", None), ("memory", str(tmp_path / "copies"))):
        with monkeypatch.context() as patch:
            if memory:
                patch.setenv("DDP_MEMORY_DIR", memory)
                patch.setenv("DDP_MEMORY_INTERVAL", "1")
            with monkeypatch.context() as failing:
                failing.setattr(Engine, "step", fail)
                with pytest.raises(RuntimeError, match="fails here"):
                    fit(folder, optimizer, scheduler, schedule=schedule)
            fit(folder, optimizer, scheduler, schedule=schedule)
        assert same(load(tmp_path / folder / f"step-{STEPS:09d}.pt"), whole)
    flatten(whole)


def test_checkpoint_of_other_optimizer_is_refused() -> None:
    fit("run", momentum, max_steps=3)
    with pytest.raises(UserError, match=r"does not fit .* \(its optimizer is SGD, this run's is AdamW with LambdaLR\)"):
        fit("run", adamw, falling)
    with pytest.raises(UserError, match=r"does not fit this model or optimizer"):
        fit("run", optim=OptimConfig(name="adamw"))
    fit("other", optim=OptimConfig(lr=0.01), max_steps=3)
    with pytest.raises(UserError, match=r"its optimizer is one of the trainer, this run's is SGD\)"):
        fit("other", momentum)


class Unsaved(torch.optim.SGD):
    """Its state has an object of a class of its own after a step."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = pytest.approx(1.0)
        return loss


def sgd_of(
    find: Callable[[nn.Module], Any], kind: type[Optimizer] = torch.optim.SGD
) -> Callable[[nn.Module], Optimizer]:
    return lambda model: kind(find(model), lr=0.1)  # type: ignore[call-arg]


class Plateau(LambdaLR):
    """A schedule whose state can't be loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {"clock": pytest.approx(1.0)}


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "message"),
    [
        (torch.optim.AdamW, None, r"optimizer: AdamW is a class; pass a function of the model, such as lambda model:"),
        (momentum(build_model()), None, r"optimizer: SGD is already built; pass a function of the model"),
        (lambda model: 3, None, r"optimizer: the function returned int; return a torch\.optim\.Optimizer"),
        (sgd_of(nn.Module.parameters, torch.optim.LBFGS), None, r"optimizer: LBFGS\.step needs a closure"),
        (sgd_of(lambda model: build_model().parameters()), None, r"optimizer: 4 of its tensors are not parameters of"),
        (sgd_of(lambda model: model[0].parameters()), None, r"optimizer: no parameter group contains 2\.weight, "),
        (sgd_of(nn.Module.parameters, Unsaved), None, r"optimizer: a run could not resume from its state_dict\(\)"),
        (momentum, lambda *_: 3, r"scheduler: the function returned int; return a torch\.optim\.lr_scheduler"),
        (momentum, lambda optimizer, _: ReduceLROnPlateau(optimizer), r"scheduler: ReduceLROnPlateau needs a metric"),
        (momentum, lambda *_: CosineAnnealingLR(momentum(build_model()), 9), r"scheduler: CosineAnnealingLR has ano"),
        (momentum, lambda optimizer, _: Plateau(optimizer, float), r"scheduler: a run could not resume from its state"),
        (momentum, CosineAnnealingLR(momentum(build_model()), 9), r"scheduler: CosineAnnealingLR is already built"),
    ],
)  # fmt: skip
def test_mistake_is_named(optimizer: Any, scheduler: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit("run", optimizer, scheduler)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": OptimConfig(lr=0.3)}, r"optim\.lr: optimizer .*:momentum does not read --lr; leave it out"),
        ({"optim": OptimConfig(weight_decay=0.3)}, r"does not read --weight-decay"),
        ({"schedule": ScheduleConfig(warmup_epochs=1.0)}, r"schedule .*:one_cycle does not read --warmup-epochs"),
        ({"optim": OptimConfig(lr_scaling="linear")}, r"schedule .*:one_cycle does not read --lr-scaling"),
    ],
)
def test_setting_that_own_optimizer_or_schedule_does_not_read_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit("run", momentum, one_cycle, **changes)


def test_optimizer_and_schedule_can_be_named_on_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    digits = ["--preset", "digits-resnet", "--model-width", "4", "--epochs", "1", "--device", "cpu", "--max-steps", "3"]
    named = ["--optimizer", f"{__name__}:momentum", "--schedule", f"{__name__}:falling"]
    assert main([*digits, *named, "--log-every", "1"]) == 0
    message = capsys.readouterr().out
    assert f"name={__name__}:momentum" in message
    assert re.findall(r"step \d/3 .* lr (\S+)", message) == ["0.01", "0.008333", "0.006667"]
    assert main([*digits, "--optimizer", "sdg"]) == 81
    assert (
        "optim.name: 'sdg' is not known; choose one of sgd, adamw, novograd, or module:function"
        in capsys.readouterr().err
    )
