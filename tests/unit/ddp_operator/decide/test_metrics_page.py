"""The metrics page: the values read from a valid one, and the harmlessness of an invalid one."""

import time
import tracemalloc
from datetime import UTC, datetime
from typing import Any

import pytest

from ddp_operator.api.status import Progress
from ddp_operator.decide.metrics_page import (
    STALLED,
    Page,
    PageParser,
    RateMeter,
    Rates,
    average_rates,
    build_checkpoint,
    build_progress,
    parse_page,
)

GOOD = """\
# HELP ddp_loss training loss
# TYPE ddp_loss gauge
ddp_loss{rank="1"} 9
ddp_loss{rank="0"} 0.25
ddp_step{rank="0"} 40 1700000000000
ddp_steps_total{rank="0"} 20
ddp_planned_steps{rank="0"} 100
ddp_samples_total{rank="0"} 640
ddp_world_size{rank="0"} 2
ddp_step_duration_seconds_sum{rank="0"} 20
ddp_epoch{rank="0"} 2
ddp_planned_epochs{rank="0"} 5
ddp_last_step_timestamp_seconds{rank="0"} 1763640000
ddp_checkpoint_step{rank="0"} 30
ddp_step_duration_seconds_bucket{rank="0",le="+Inf"} 7
go_goroutines 12
ddp_launcher_phase{phase="Running"} 1
ddp_launcher_phase{phase="Rendezvous"} 0
ddp_launcher_in_place_restarts_total 3
"""


class TestGoodPage:
    def test_values_of_lowest_rank_are_kept(self) -> None:
        assert parse_page(GOOD).values["ddp_loss"] == 0.25

    def test_only_known_names_are(self) -> None:
        assert "go_goroutines" not in parse_page(GOOD).values
        assert "ddp_step_duration_seconds_bucket" not in parse_page(GOOD).values

    def test_launcher_phase_and_restarts_are_read(self) -> None:
        page = parse_page(GOOD)
        assert (page.launcher_phase, page.in_place_restarts, page.training) == ("Running", 3, True)

    def test_page_with_steps_has_progress(self) -> None:
        progress = build_progress(parse_page(GOOD).values)
        assert progress == Progress(
            epoch=2, epochs=5, step=40, total_steps=100, percent="40.0%", eta="1m00s", eta_seconds=60, loss="0.25",
            samples_per_second="64", steps_per_second="1", throughput="64 samples/s",
            last_step_time=datetime(2025, 11, 20, 12, tzinfo=UTC),
        )  # fmt: skip

    def test_page_with_checkpoint_has_its_step(self) -> None:
        checkpoint = build_checkpoint(parse_page(GOOD).values)
        assert checkpoint is not None
        assert checkpoint.step == 30

    def test_page_without_rank_labels_is_read_too(self) -> None:
        assert parse_page("ddp_loss 2\n").values == {"ddp_loss": 2.0}

    def test_empty_page_has_no_progress(self) -> None:
        assert parse_page("") == Page()
        assert build_progress({}) is None
        assert build_checkpoint({}) is None


class TestProgressOfPage:
    def test_ratio_of_trainer_wins_over_steps(self) -> None:
        progress = build_progress({"ddp_step": 1, "ddp_planned_steps": 10, "ddp_progress_ratio": 0.5})
        assert progress is not None
        assert progress.percent == "50.0%"

    def test_last_step_has_no_remaining_time(self) -> None:
        progress = build_progress({**parse_page(GOOD).values, "ddp_step": 100.0})
        assert progress is not None
        assert (progress.eta, progress.percent) == ("0s", "100.0%")

    def test_validation_is_kept_between_validations(self) -> None:
        before = Progress(val_accuracy="0.9", val_loss="0.3")
        progress = build_progress({"ddp_step": 1}, before)
        assert progress is not None
        assert (progress.val_accuracy, progress.val_loss) == ("0.9", "0.3")

    @pytest.mark.parametrize("missing", ["ddp_planned_steps", "ddp_steps_total", "ddp_step_duration_seconds_sum"])
    def test_no_eta_is_guessed(self, missing: str) -> None:
        values = dict(parse_page(GOOD).values)
        del values[missing]
        progress = build_progress(values)
        assert progress is not None
        assert progress.eta is None

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (0.123456, "0.1235"), (12345.6, "12346"), (0.0, "0"), (-1.5, "-1.5"), (1e-9, "1e-09"),
            (float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf"), (1e300, "1000000000000000"),
            (-1e300, "-1000000000000000"),
        ],
    )  # fmt: skip
    def test_numbers_are_short_and_honest(self, value: float, text: str) -> None:
        progress = build_progress({"ddp_loss": value})
        assert progress is not None
        assert progress.loss == text

    @pytest.mark.parametrize("ratio", [float("nan"), float("inf")])
    def test_invalid_percentage_is_ignored(self, ratio: float) -> None:
        progress = build_progress({"ddp_step": 1, "ddp_progress_ratio": ratio})
        assert progress is not None
        assert progress.percent is None

    @pytest.mark.parametrize(("ratio", "percent"), [(-1.0, "0.0%"), (7.0, "100.0%")])
    def test_percentage_is_bounded(self, ratio: float, percent: str) -> None:
        progress = build_progress({"ddp_step": 1, "ddp_progress_ratio": ratio})
        assert progress is not None
        assert progress.percent == percent

    @pytest.mark.parametrize("odd", [-5.0, float("nan"), 1e-320, 1e308, float("inf"), float("-inf")])
    @pytest.mark.parametrize(
        "name", ["ddp_step_duration_seconds_sum", "ddp_steps_total", "ddp_samples_total", "ddp_world_size"]
    )
    def test_eta_and_rates_are_never_negative_nor_endless(self, odd: float, name: str) -> None:
        values = {**parse_page(GOOD).values, name: odd}
        meter = RateMeter()
        for rates in (None, meter.measure(1, parse_page(GOOD).values, 0.0), meter.measure(1, values, 20.0)):
            progress = build_progress(values, None, rates)
            assert progress is not None
            assert progress.eta_seconds is None or 0 <= progress.eta_seconds < 1e9
            for rate in (progress.samples_per_second, progress.steps_per_second):
                assert rate is None or 0 < float(rate) <= 1e15

    def test_rates_are_kept_until_new_ones(self) -> None:
        before = Progress(samples_per_second="64", steps_per_second="2")
        progress = build_progress({"ddp_step": 50, "ddp_planned_steps": 100}, before)
        assert progress is not None
        assert (progress.samples_per_second, progress.steps_per_second, progress.eta_seconds) == ("64", "2", 25)

    def test_logged_rate_is_used_only_without_counted_samples(self) -> None:
        values = {"ddp_step": 50.0, "ddp_global_samples_per_second": 812.5}
        for rates, shown in ((None, "812.5"), (Rates(steps=3.0), "812.5"), (Rates(steps=3.0, samples=700.0), "700")):
            progress = build_progress(values, None, rates)
            assert progress is not None
            assert progress.samples_per_second == shown
            assert progress.throughput == f"{shown} samples/s"

    def test_throughput_is_in_steps_where_samples_are_not_counted(self) -> None:
        progress = build_progress({"ddp_step": 50.0}, None, Rates(steps=3.0))
        assert progress is not None
        assert progress.throughput == "3 steps/s"
        unknown = build_progress({"ddp_step": 50.0})
        assert unknown is not None
        assert unknown.throughput is None


def counters(steps: float, *, samples: float | None = None, **more: float) -> dict[str, float]:
    values = {"ddp_steps_total": steps, "ddp_world_size": 4.0}
    return values | ({} if samples is None else {"ddp_samples_total": samples}) | more


class TestRates:
    def test_rates_of_counters_need_two_readings(self) -> None:
        meter = RateMeter()
        assert meter.measure("a", counters(10, samples=320), 100.0) is None
        assert meter.measure("a", counters(30, samples=960), 110.0) == Rates(steps=2.0, samples=256.0)

    def test_are_those_of_time_in_steps_where_that_is_known(self) -> None:
        meter = RateMeter()
        first = counters(10, samples=320, ddp_step_duration_seconds_sum=50.0)
        assert meter.measure("a", first, 100.0) == average_rates(first) == Rates(steps=0.2, samples=25.6)
        # Five of the ten seconds were a validation.
        after = counters(30, samples=960, ddp_step_duration_seconds_sum=55.0)
        assert meter.measure("a", after, 110.0) == Rates(steps=4.0, samples=512.0)

    def test_of_log_are_taken_from_last_step_to_last_step(self) -> None:
        meter = RateMeter()
        meter.measure("a", counters(50, ddp_last_step_timestamp_seconds=1000.0), 1009.0)
        result = meter.measure("a", counters(100, ddp_last_step_timestamp_seconds=1025.0), 1029.0)
        assert result == Rates(steps=2.0)

    def test_rates_are_kept_while_no_step_ends_until_steps_have_stopped(self) -> None:
        meter = RateMeter()
        for now, steps in ((0.0, 10), (10.0, 20), (20.0, 20)):
            result = meter.measure("a", counters(steps), now)
        assert result == Rates(steps=1.0)
        assert meter.measure("a", counters(20), 30.0) == STALLED
        progress = build_progress({"ddp_step": 20, "ddp_planned_steps": 40}, Progress(steps_per_second="1"), STALLED)
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
        assert meter.measure("a", {}, 0.0) is None
        assert meter.measure("a", counters(10, ddp_step_duration_seconds_sum=5.0), 1.0) == Rates(steps=2.0)


class TestBadPage:
    @pytest.mark.parametrize(
        "text",
        [
            "ddp_loss",
            "ddp_loss x",
            "ddp_loss{",
            'ddp_loss{rank="0} 1',
            'ddp_loss{rank="0"',
            "ddp_loss{} {} {}",
            "ddp_loss\x00 1",
            'ddp_loss{rank="\\"} 1',
            "ddp_loss 0x10",
            "ddp_loss " + "9" * 400,
            'ddp_launcher_phase{phase="Nonsense"} 1',
            "ddp_launcher_phase 1",
            "<html>",
            "\ud800",
        ],
    )
    def test_garbage_page_is_empty(self, text: str) -> None:
        assert parse_page(text) == Page()

    @pytest.mark.parametrize(
        ("text", "restarts"),
        [("1e300", 2**31 - 1), ("-4", 0), ("NaN", 0), ("+Inf", 0), ("2", 2)],
    )
    def test_restarts_are_small_number(self, text: str, restarts: int) -> None:
        assert parse_page(f"ddp_launcher_in_place_restarts_total {text}\n").in_place_restarts == restarts

    @pytest.mark.parametrize("rank", ["nan", "-1", "1e3", "x", "٣", "9" * 40, ""])
    def test_rank_that_is_none_never_wins(self, rank: str) -> None:
        text = f'ddp_loss{{rank="{rank}"}} 1\nddp_loss{{rank="5"}} 2\n'
        assert parse_page(text).values == {"ddp_loss": 2.0}

    @pytest.mark.parametrize(
        "name", ["ddp_step", "ddp_checkpoint_step", "ddp_epoch", "ddp_last_step_timestamp_seconds"]
    )
    @pytest.mark.parametrize("value", ["NaN", "+Inf", "1e300", "-1e300"])
    def test_unstorable_numbers_are_ignored(self, name: str, value: str) -> None:
        values = parse_page(f"ddp_loss 1\n{name} {value}\n").values
        progress = build_progress(values)
        assert progress is not None
        assert (progress.step, progress.epoch, progress.last_step_time) == (None, None, None)
        assert build_checkpoint(values) is None

    @pytest.mark.parametrize(
        "text",
        [
            "x" * 2**20,
            "ddp_loss" + " " * 2**20,
            "ddp_loss{" + 'a="b",' * 170_000 + "} 1",
            'ddp_loss{rank="' + "\\" * 2**20,
            "ddp_loss 1\n" * 90_000,
            'ddp_loss{rank="0"} 1\n' * 50_000,
            "\n" * 2**20,
            "ddp_step_duration_seconds_bucket 1\n" * 40_000,
            ('ddp_loss{a="' + '\\"' * 2030 + '"} 1\n') * 256,
        ],
        ids=[
            *("one name", "spaces", "labels", "escapes", "lines", "lines with labels", "empty lines", "other names"),
            "lines with escapes",
        ],
    )  # fmt: skip
    def test_page_of_one_mebibyte_is_parsed_quickly(self, text: str) -> None:
        started = time.process_time()
        parse_page(text)
        assert time.process_time() - started < 2

    def test_text_about_rank_is_plain_and_short(self) -> None:
        place = "rank 1 is in go\U0001f3d6 (train.py:1)\x1b[31m" + "!" * 300
        (rank,) = parse_page(f'ddp_launcher_stalled_rank_info{{rank="1",state="Busy",what="{place}"}} 1\n').stalled
        assert rank.what.startswith("rank 1 is in go (train.py:1)!!!")
        assert len(rank.what) <= 200

    def test_malformed_line_is_ignored(self) -> None:
        long = f'ddp_loss{{rank="0",note="{"x" * 5000}"}} 9\n'
        assert parse_page(f'{long}ddp_step{{rank="0"}} 4\n').values == {"ddp_step": 4.0}

    @pytest.mark.parametrize("labels", ['a="\\""', 'rank="0",a="b\\n"', ",".join(f'a{n}="b"' for n in range(9))])
    def test_number_with_escapes_or_many_labels_is_ignored(self, labels: str) -> None:
        assert parse_page(f"ddp_loss{{{labels}}} 1\nddp_step 4\n").values == {"ddp_step": 4.0}

    def test_escapes_in_free_text_of_launcher_are_read(self) -> None:
        line = 'ddp_launcher_stalled_rank_info{rank="1",state="Busy",what="in \\"f\\" (a\\\\b.py)"} 1\n'
        assert [rank.what for rank in parse_page(line).stalled] == ['in "f" (a\\b.py)']

    @pytest.mark.parametrize("size", [1, 7, 4096])
    def test_page_in_pieces_equals_whole_page(self, size: int) -> None:
        text = (
            f'{GOOD}ddp_launcher_stalled_rank_info{{rank="1",state="Busy",what="ä"}} 1\n'
            '# ddp_launcher_last_failure {"a":1}\n'
        )
        data = text.encode()
        parser = PageParser()
        for start in range(0, len(data), size):
            parser.feed(data[start : start + size])
        assert parser.finish() == parse_page(text)

    def test_line_longer_than_piece_is_dropped(self) -> None:
        parser = PageParser()
        parser.feed(b"ddp_loss 1\nddp_step ")
        tracemalloc.start()
        for _ in range(64):
            parser.feed(b" " * 2**20)
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        parser.feed(b"5\nddp_epoch 3\n")
        assert parser.finish().values == {"ddp_loss": 1.0, "ddp_epoch": 3.0}
        assert kept < 2**20

    def test_flood_before_values_harms_only_own_job(self) -> None:
        flood: Any = "".join(f'ddp_loss{{rank="{n}"}} {n}\n' for n in range(9000, 0, -1))
        assert len(parse_page(flood).values) == 1


def test_process_that_starts_to_report_step_time_keeps_rate() -> None:
    meter = RateMeter()
    assert meter.measure("p", counters(10), 0.0) is None
    assert meter.measure("p", counters(20, ddp_step_duration_seconds_sum=4.0), 5.0) == Rates(steps=2.0)


@pytest.mark.parametrize(
    ("text", "began"),
    [
        ("ddp_step 10\nddp_steps_total 4\n", 6),
        ("ddp_step 1\nddp_steps_total 1\n", 0),
        ("ddp_step 3\nddp_steps_total 4\n", 0),
        ("ddp_step 10\nddp_steps_total 0\n", None),
        ("ddp_step 10\n", None),
        ("ddp_steps_total 4\n", None),
        ('ddp_step 10\nddp_steps_total 4\nddp_launcher_phase{phase="Rendezvous"} 1\n', None),
    ],
)
def test_first_step_of_workers_is_known_after_one_step(text: str, began: int | None) -> None:
    assert parse_page(text).began_at == began


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (['state="Busy",rank="1"', 'state="Behind",rank="2"'], [2, 1]),
        (['state="Lazy",rank="1"'], []),
        (['state="Busy",rank="x"'], []),
        ([f'state="Busy",rank="{rank}"' for rank in range(9)], list(range(8))),
    ],
)
def test_stalled_ranks_of_launcher_are_few_and_known(lines: list[str], expected: list[int]) -> None:
    text = "".join(f'ddp_launcher_stalled_rank_info{{{line},what="{"w" * 300}"}} 1\n' for line in lines)
    result = parse_page(text).stalled
    assert [item.rank for item in result] == expected
    assert all(item.what == "w" * 200 for item in result)


@pytest.mark.parametrize(
    ("values", "percent", "eta"),
    [
        ({"ddp_step": 5, "ddp_planned_steps": 10}, "50.0%", 5),
        ({"ddp_step": 12, "ddp_planned_steps": 10}, "100.0%", 0),
        ({"ddp_step": 5, "ddp_planned_steps": 10, "ddp_progress_ratio": 0.25}, "25.0%", 5),
        ({"ddp_step": 5, "ddp_planned_steps": 10, "ddp_progress_ratio": -1}, "0.0%", 5),
        ({"ddp_step": 5, "ddp_planned_steps": 10, "ddp_progress_ratio": float("nan")}, None, 5),
        ({"ddp_step": 0, "ddp_planned_steps": 10}, "0.0%", None),
        ({"ddp_step": 5}, None, None),
        ({"ddp_step": 5, "ddp_planned_steps": 1e12}, "0.0%", None),
    ],
)
def test_remaining_time_follows_from_steps_and_rate(
    values: dict[str, float], percent: str | None, eta: int | None
) -> None:
    progress = build_progress(values, rates=Rates(steps=1.0))
    assert progress is not None
    assert (progress.percent, progress.eta_seconds) == (percent, eta)


def test_stored_zero_rate_gives_no_remaining_time() -> None:
    progress = build_progress({"ddp_step": 5, "ddp_planned_steps": 10}, Progress(steps_per_second="0"), Rates())
    assert progress is not None
    assert (progress.eta_seconds, progress.eta) == (None, None)


@pytest.mark.parametrize(
    ("seconds", "known"), [(-1, False), (0, False), (1, True), (3.9e9, True), (4e9, False), (5e9, False)]
)
def test_last_step_was_at_time_that_can_be(seconds: float, known: bool) -> None:
    progress = build_progress({"ddp_step": 5, "ddp_last_step_timestamp_seconds": seconds})
    assert progress is not None
    assert (progress.last_step_time is not None) == known


@pytest.mark.parametrize("epoch", [1e15, -1e15, 1.5e15])
def test_whole_numbers_are_those_that_every_reader_keeps(epoch: float) -> None:
    progress = build_progress({"ddp_step": 5, "ddp_epoch": epoch})
    assert progress is not None
    assert progress.epoch == (int(epoch) if abs(epoch) <= 1e15 else None)


def test_first_ranks_of_large_page_are_followed() -> None:
    text = "".join(f'ddp_step{{rank="{rank}"}} {rank}\n' for rank in range(300))
    ranks = parse_page(text + 'ddp_steps_total{rank="3"} 9\nddp_steps_total{rank="299"} 9\n').ranks
    assert sorted(ranks) == list(range(256))
    assert (ranks[3].step, ranks[3].steps) == (3, 9)


def test_preflight_measurements_are_read_with_their_units() -> None:
    seconds = "".join(
        f'ddp_launcher_preflight_duration_seconds{{check="{check}"}} {value}\n'
        for check, value in (("dns", 0.002), ("tcp", 0.03), ("allreduce", 0.4))
    )
    passed = "".join(
        f'ddp_launcher_preflight_passed{{check="{check}"}} {value}\n'
        for check, value in (("dns", 1), ("tcp", 0), ("allreduce", 0), ("other", 0))
    )
    result = parse_page(f"{seconds}{passed}ddp_launcher_all_reduce_bytes_per_second 5e6\n").preflight
    assert result is not None
    assert result.failed == ("tcp", "allreduce")
    assert (result.dns_milliseconds, result.tcp_milliseconds, result.all_reduce_milliseconds) == ("2", "30", "400")
    assert result.all_reduce_megabytes_per_second == "5"


@pytest.mark.parametrize("value", ["1", "-2.5", "+3e4", "1e-7", "1.", ".5", "e", "--1", "1e999", "NaN", "9" * 40])
def test_plain_line_equals_general_parser(value: str) -> None:
    simple = parse_page(f'ddp_loss{{rank="0"}} {value}\n')
    assert repr(simple) == repr(parse_page(f'ddp_loss{{rank="0",}} {value}\n'))
    assert repr(simple) == repr(parse_page(f"ddp_loss {value}\n"))
