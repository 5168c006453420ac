from __future__ import annotations

import math

import pytest

from ddp_trainer.errors import UserError
from ddp_trainer.optim import OptimConfig, Schedule, ScheduleConfig, lr_scale
from ddp_trainer.plan import Plan, Position


def plan(
    *, first: Position | None = None, epochs: int = 3, max_steps: int | None = None, drop_last: bool = False
) -> Plan:
    return Plan(100, 16, drop_last, epochs, max_steps, first or Position())


def test_steps_of_epoch_include_last_partial_step_unless_dropped() -> None:
    assert plan().steps_left(0) == 7
    assert plan(drop_last=True).steps_left(0) == 6
    assert plan().steps_left(96) == 1
    assert plan(drop_last=True).steps_left(96) == 0
    assert plan().steps_left(112) == 0


def test_run_ends_at_same_step_from_any_resume() -> None:
    whole = plan().total_steps
    assert whole == 21
    assert plan(first=Position(step=7, epoch=1)).total_steps == whole
    assert plan(first=Position(step=10, epoch=1, consumed=48)).total_steps == whole
    assert plan(first=Position(step=21, epoch=3)).total_steps == whole


def test_max_steps_ends_run_early_but_not_before_current_step() -> None:
    assert plan(max_steps=5).total_steps == 5
    assert plan(max_steps=50).total_steps == 21
    assert plan(max_steps=5, first=Position(step=9, epoch=1, consumed=32)).total_steps == 9


def test_length_in_epochs_follows_max_steps() -> None:
    assert plan().length == 3.0
    assert plan(max_steps=14).length == 2.0
    assert plan(max_steps=7, drop_last=True).length == pytest.approx(7 / 6)


def test_fraction_counts_epochs() -> None:
    assert plan().fraction(Position(step=9, epoch=1, consumed=32)) == pytest.approx(1.32)


# The learning rate


def test_constant_rate_equals_scaled_rate() -> None:
    assert Schedule(ScheduleConfig(), 0.1, 4.0, 10.0).lr(3.0) == pytest.approx(0.4)


def test_warm_up_starts_at_single_process_rate_and_ends_at_scaled_rate() -> None:
    schedule = Schedule(ScheduleConfig(warmup_epochs=5.0), 0.1, 8.0, 10.0)
    assert schedule.lr(0.0) == pytest.approx(0.1)
    assert schedule.lr(2.5) == pytest.approx((0.1 + 0.8) / 2)
    assert schedule.lr(5.0) == pytest.approx(0.8)


def test_warm_up_may_start_at_fraction() -> None:
    schedule = Schedule(ScheduleConfig(warmup_epochs=1.0, warmup_start=0.25), 0.1, 1.0, 10.0)
    assert schedule.lr(0.0) == pytest.approx(0.025)


def test_cosine_falls_from_peak_to_final_share() -> None:
    schedule = Schedule(ScheduleConfig(name="cosine", warmup_epochs=2.0, warmup_start=0.0, final=0.1), 1.0, 1.0, 10.0)
    assert schedule.lr(2.0) == pytest.approx(1.0)
    assert schedule.lr(6.0) == pytest.approx(0.55)
    assert schedule.lr(10.0) == pytest.approx(0.1)
    assert schedule.lr(4.0) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    rates = [schedule.lr(2.0 + step / 10) for step in range(81)]
    assert rates == sorted(rates, reverse=True)


def test_run_shorter_than_its_warm_up_still_has_rate() -> None:
    schedule = Schedule(ScheduleConfig(name="cosine", warmup_epochs=5.0, warmup_start=0.0), 1.0, 1.0, 1.0)
    assert schedule.lr(0.5) == pytest.approx(0.1)
    assert schedule.lr(5.0) == pytest.approx(1.0)


@pytest.mark.parametrize(("scaling", "expected"), [("none", 1.0), ("linear", 9.0), ("sqrt", 3.0)])
def test_rate_scales_with_world_size(scaling: str, expected: float) -> None:
    assert lr_scale(OptimConfig(lr_scaling=scaling), 9) == expected


def test_settings_out_of_range_are_user_errors() -> None:
    with pytest.raises(UserError, match=r"schedule.final"):
        ScheduleConfig(final=1.5)
