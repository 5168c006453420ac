"""The pace of training: rates of successive reports, throughput, remaining time."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api.status import Progress
from ddp_operator.decide.pace import (
    STALLED,
    RateMeter,
    Rates,
    average_rates,
    build_paced_progress,
    estimate_seconds_left,
)
from ddp_pod.contract.progress import RankProgress
from tests.support.decisions import present
from tests.unit.ddp_operator.decide.test_report import GOOD


def progress_of(progress: RankProgress, before: Progress | None = None, rates: Rates | None = None) -> Progress:
    return present(build_paced_progress(progress, before, rates))


class TestPace:
    def test_all_numbers_are_shown(self) -> None:
        shown = progress_of(GOOD)
        assert (shown.eta, estimate_seconds_left(shown), shown.samples_per_second) == ("1m00s", 60, "64")
        assert (shown.steps_per_second, shown.throughput) == ("1", "64 samples/s")
        assert build_paced_progress(RankProgress()) is None

    @pytest.mark.parametrize("missing", ["total_steps", "steps", "step_seconds"])
    def test_no_eta_is_guessed(self, missing: str) -> None:
        progress = RankProgress(**{**vars(GOOD), missing: None})
        assert progress_of(progress).eta is None

    @pytest.mark.parametrize("odd", [-5.0, 1e-320, 1e308])
    @pytest.mark.parametrize("name", ["step_seconds", "steps", "samples", "world_size"])
    def test_eta_and_rates_are_never_negative_nor_endless(self, odd: float, name: str) -> None:
        progress = RankProgress(**{**vars(GOOD), name: odd})
        meter = RateMeter()
        for rates in (None, meter.measure(1, GOOD, 0.0), meter.measure(1, progress, 20.0)):
            shown = progress_of(progress, None, rates)
            left = estimate_seconds_left(shown)
            assert left is None or 0 <= left < 1e9
            for rate in (shown.samples_per_second, shown.steps_per_second):
                assert rate is None or 0 < float(rate) <= 1e15

    def test_rates_are_kept_until_new_ones(self) -> None:
        before = Progress(throughput="64 samples/s", steps_per_second="2")
        shown = progress_of(RankProgress(step=50, total_steps=100), before)
        assert (shown.samples_per_second, shown.steps_per_second, shown.eta) == ("64", "2", "25s")

    @pytest.mark.parametrize(
        ("stated", "rates", "throughput"),
        [
            (812.5, None, "812.5 samples/s"),
            (812.5, Rates(steps=3.0), "812.5 samples/s"),
            (812.5, Rates(steps=3.0, samples=700.0), "700 samples/s"),
            (None, Rates(steps=3.0), "3 steps/s"),
            (None, None, None),
        ],
    )
    def test_throughput_is_counted_stated_or_in_steps(
        self, stated: float | None, rates: Rates | None, throughput: str | None
    ) -> None:
        assert progress_of(RankProgress(step=50.0, samples_per_second=stated), None, rates).throughput == throughput

    @pytest.mark.parametrize(
        ("numbers", "percent", "eta"),
        [
            ({"step": 5, "total_steps": 10}, "50.0%", 5),
            ({"step": 12, "total_steps": 10}, "100.0%", 0),
            ({"step": 5, "total_steps": 10, "share": 0.25}, "25.0%", 5),
            ({"step": 5, "total_steps": 10, "share": -1}, "0.0%", 5),
            ({"step": 5, "total_steps": 10, "share": 7}, "100.0%", 5),
            ({"step": 0, "total_steps": 10}, "0.0%", None),
            ({"step": 5}, None, None),
            ({"step": 5, "total_steps": 1e12}, "0.0%", None),
        ],
    )
    def test_remaining_time_follows_from_steps_and_rate(
        self, numbers: Any, percent: str | None, eta: int | None
    ) -> None:
        shown = progress_of(RankProgress(**numbers), rates=Rates(steps=1.0))
        assert (shown.percent, estimate_seconds_left(shown)) == (percent, eta)

    def test_stored_zero_rate_gives_no_remaining_time(self) -> None:
        shown = progress_of(RankProgress(step=5, total_steps=10), Progress(steps_per_second="0"), Rates())
        assert (estimate_seconds_left(shown), shown.eta) == (None, None)


def counters(steps: float, **more: float) -> RankProgress:
    progress = RankProgress(steps=steps, world_size=4.0)
    progress.update(more)
    return progress


class TestRates:
    def test_rates_of_counters_need_two_readings(self) -> None:
        meter = RateMeter()
        assert meter.measure("a", counters(10, samples=320), 100.0) is None
        assert meter.measure("a", counters(30, samples=960), 110.0) == Rates(steps=2.0, samples=256.0)

    def test_are_those_of_time_in_steps_where_that_is_known(self) -> None:
        meter = RateMeter()
        first = counters(10, samples=320, step_seconds=50.0)
        assert meter.measure("a", first, 100.0) == average_rates(first) == Rates(steps=0.2, samples=25.6)
        # Five of the ten seconds were a validation.
        after = counters(30, samples=960, step_seconds=55.0)
        assert meter.measure("a", after, 110.0) == Rates(steps=4.0, samples=512.0)

    def test_of_log_are_taken_from_last_step_to_last_step(self) -> None:
        meter = RateMeter()
        meter.measure("a", counters(50, last_step_time=1000.0), 1009.0)
        result = meter.measure("a", counters(100, last_step_time=1025.0), 1029.0)
        assert result == Rates(steps=2.0)

    def test_rates_are_kept_while_no_step_ends_until_steps_have_stopped(self) -> None:
        meter = RateMeter()
        for now, steps in ((0.0, 10), (10.0, 20), (20.0, 20)):
            result = meter.measure("a", counters(steps), now)
        assert result == Rates(steps=1.0)
        assert meter.measure("a", counters(20), 30.0) == STALLED
        progress = build_paced_progress(RankProgress(step=20, total_steps=40), Progress(steps_per_second="1"), STALLED)
        assert progress is not None
        assert (progress.throughput, progress.eta, progress.steps_per_second) == (None, None, "1")
        assert meter.measure("a", counters(21), 40.0) == Rates(steps=1 / 30)

    def test_are_of_last_seconds_where_readings_are_many(self) -> None:
        meter = RateMeter()
        for second in range(100):
            result = meter.measure("a", counters(second if second < 50 else 50 + 5 * (second - 50)), float(second))
        assert result == Rates(steps=5.0)

    @pytest.mark.parametrize(("process", "steps"), [("a", 5), ("b", 40)])
    def test_never_span_two_processes(self, process: str, steps: float) -> None:
        meter = RateMeter()
        meter.measure("a", counters(10), 0.0)
        meter.measure("a", counters(30), 10.0)
        assert meter.measure(process, counters(steps), 20.0) is None
        assert meter.measure(process, counters(steps + 10), 30.0) == Rates(steps=1.0)

    @pytest.mark.parametrize(("steps", "known"), [(0, False), (9e14, True), (1e15, False), (1.5e15, False)])
    def test_are_those_that_can_be(self, steps: float, known: bool) -> None:
        meter = RateMeter()
        meter.measure("a", counters(0), 0.0)
        assert (meter.measure("a", counters(steps), 1.0) is not None) == known

    def test_rates_wait_for_first_counters(self) -> None:
        meter = RateMeter()
        assert meter.measure("a", RankProgress(), 0.0) is None
        assert meter.measure("a", counters(10, step_seconds=5.0), 1.0) == Rates(steps=2.0)
