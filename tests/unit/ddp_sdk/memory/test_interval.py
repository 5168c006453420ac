"""The interval between copies."""

from __future__ import annotations

import math

import pytest

from ddp_sdk.memory.interval import Interval, compute_interval


@pytest.mark.parametrize(
    ("stall", "step", "interval"),
    [(0.001, 0.2, 1), (0.002, 0.2, 1), (0.0021, 0.2, 2), (0.1, 0.2, 50), (1e9, 0.2, 1000), (0.1, 0.0, 1000)],
)
def test_cost_is_at_most_one_percent_of_the_steps(stall: float, step: float, interval: int) -> None:
    assert compute_interval([stall], [step]) == interval


def test_ranks_follow_the_slowest() -> None:
    interval = Interval(None, lambda own: max(own, 7))
    for _ in range(3):
        interval.record_step(1.0)
        interval.record_save(0.001, 0.0)
    assert interval.steps == 7
    assert [step for step in range(1, 15) if interval.is_due(step)] == [7, 14]


def test_fixed_interval_is_kept() -> None:
    interval = Interval(3, lambda own: 99)
    for _ in range(70):
        interval.record_step(1.0)
        interval.record_save(10.0, 0.0)
    assert interval.steps == 3


def test_fixed_interval_waits_for_each_copy() -> None:
    assert Interval(1, lambda own: own).compute_wait() == math.inf


def test_chosen_interval_waits_for_what_the_cost_leaves_of_one_percent() -> None:
    interval = Interval(None, lambda own: own)
    assert interval.compute_wait() == 0
    for _ in range(16):
        interval.record_step(2.0)
    assert interval.compute_wait() == pytest.approx(0.02)
    for _ in range(3):
        interval.record_save(0.004, 0.0, 0.001)
    assert interval.compute_wait() == pytest.approx(0.015)
    for _ in range(5):
        interval.record_save(0.03, 0.0, 0.02)
    assert interval.steps == 3
    assert interval.compute_wait() == pytest.approx(0.01)
    for _ in range(8):
        interval.record_save(1.0, 0.0)
    assert interval.compute_wait() == 0


def test_waits_that_end_late_use_one_percent_in_sum() -> None:
    interval = Interval(None, lambda own: own)
    stopped = 0.0
    for _ in range(1000):
        interval.record_step(1.0)
        waited = interval.compute_wait() * 1.3
        stopped += 0.001 + waited
        interval.record_save(0.001, waited)
    assert interval.steps == 1
    assert stopped / 1000 == pytest.approx(0.01, rel=0.01)


def test_first_saves_to_both_files_do_not_count() -> None:
    interval = Interval(None, lambda own: own)
    interval.record_step(1.0)
    for stall in (5.0, 5.0, 0.001):
        interval.record_save(stall, 0.0)
    assert interval.steps == 1


def test_first_measured_save_sets_the_interval() -> None:
    interval = Interval(None, lambda own: own)
    interval.record_step(1.0)
    for stall in (0.0, 0.0, 0.05):
        interval.record_save(stall, 0.0)
    assert interval.steps == 5


def test_contended_cpu_counts_as_a_stall() -> None:
    interval = Interval(None, lambda own: own)
    interval.record_step(1.0)
    for _ in range(3):
        interval.record_save(0.001, 0.0, 0.029)
    assert interval.steps == 3
