from __future__ import annotations

import math

import pytest
import torch

from ddp_trainer.optim import OptimConfig, Schedule, ScheduleConfig, lr_scale
from ddp_trainer.plan import Plan, Position


def plan(
    *, first: Position | None = None, epochs: int = 3, max_steps: int | None = None, drop_last: bool = False
) -> Plan:
    return Plan(100, 16, drop_last, epochs, max_steps, first or Position())


def test_steps_of_epoch_include_last_partial_step_unless_dropped() -> None:
    assert [plan().steps_left(consumed) for consumed in (0, 96, 112)] == [7, 1, 0]
    assert [plan(drop_last=True).steps_left(consumed) for consumed in (0, 96)] == [6, 0]


@pytest.mark.parametrize(
    ("first", "max_steps", "steps"),
    [
        (Position(), None, 21),
        (Position(step=7, epoch=1), None, 21),
        (Position(step=10, epoch=1, consumed=48), None, 21),
        (Position(step=21, epoch=3), None, 21),
        (Position(), 5, 5),
        (Position(), 50, 21),
        (Position(step=9, epoch=1, consumed=32), 5, 9),
    ],
)
def test_run_ends_at_same_step_from_any_resume(first: Position, max_steps: int | None, steps: int) -> None:
    assert plan(first=first, max_steps=max_steps).total_steps == steps


def test_length_and_fraction_are_in_epochs() -> None:
    assert [plan().length, plan(max_steps=14).length] == [3.0, 2.0]
    assert plan(max_steps=7, drop_last=True).length == pytest.approx(7 / 6)
    assert plan().fraction(Position(step=9, epoch=1, consumed=32)) == pytest.approx(1.32)


# The learning rate


@pytest.mark.parametrize(
    ("config", "scale", "length", "rates"),
    [
        (ScheduleConfig(), 4.0, 10.0, {3.0: 4.0}),
        (ScheduleConfig(warmup_epochs=5.0), 8.0, 10.0, {0.0: 1.0, 0.5: 1.7, 2.5: 4.5, 5.0: 8.0}),
        (ScheduleConfig(warmup_epochs=1.0, warmup_start=0.25), 1.0, 10.0, {0.0: 0.25}),
        (
            ScheduleConfig(name="cosine", warmup_epochs=2.0, warmup_start=0.0, final=0.1),
            1.0,
            10.0,
            {2.0: 1.0, 4.0: 0.1 + 0.45 * (1 + math.cos(math.pi / 4)), 6.0: 0.55, 10.0: 0.1, 11.0: 0.1},
        ),
        # Shorter than its warm-up.
        (ScheduleConfig(name="cosine", warmup_epochs=5.0, warmup_start=0.0), 1.0, 1.0, {0.5: 0.1, 5.0: 1.0}),
    ],
    ids=("constant", "warm-up", "start", "cosine", "short"),
)
def test_rate_follows_position(config: ScheduleConfig, scale: float, length: float, rates: dict[float, float]) -> None:
    schedule = Schedule(config, 1.0, scale, length)
    assert {position: schedule.lr(position) for position in rates} == pytest.approx(rates)


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("epochs", [7, 40])
def test_cosine_is_torchs(epochs: int, warmup: int) -> None:
    schedule = Schedule(ScheduleConfig(name="cosine", warmup_epochs=warmup), 0.07, 1.0, epochs)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.07)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs - warmup)
    for epoch in range(warmup, epochs + 1):
        assert schedule.lr(epoch) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-15)
        optimizer.step()
        theirs.step()


def test_published_warm_up_starts_at_rate_of_one_node_in_steps() -> None:
    config = ScheduleConfig(warmup_epochs=5.0, warmup_by_node=True, warmup_stairs=True)
    schedule = Schedule(config, 0.01, 1.0, 40.0, processes_per_node=4)
    # torch's LinearLR(start_factor=1/4, total_iters=5), stepped once an epoch.
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    linear = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 4, total_iters=5)
    for epoch in range(8):
        expected = optimizer.param_groups[0]["lr"]
        assert schedule.lr(epoch) == pytest.approx(expected)
        assert schedule.lr(epoch + 0.9) == pytest.approx(expected)
        optimizer.step()
        linear.step()


@pytest.mark.parametrize(("scaling", "expected"), [("none", 1.0), ("linear", 9.0), ("sqrt", 3.0)])
def test_rate_scales_with_world_size(scaling: str, expected: float) -> None:
    assert lr_scale(OptimConfig(lr_scaling=scaling), 9) == expected
