"""Rows of metrics over time in the status."""

import csv
from datetime import timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddp_cli.local.folder import COLUMNS as OF_A_RUN
from ddp_operator.api.status import CheckpointStatus, Progress, Restarts, Status
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.points import COLUMNS, FEATURE, MAX_ROWS, extend_points
from tests.support.builders import NOW, page
from tests.support.fake_cluster import ReconcilerHarness


def at(step: int | None, status: Status | None = None, **fields: object) -> Status:
    progress = None if step is None else Progress(step=step, loss=f"{1 / (step + 1):.4g}")
    return replace(status or Status(phase="Running"), progress=progress, **fields)


def rows_of(status: Status) -> list[dict[str, str]]:
    return list(csv.DictReader(status.points))


def train(gaps: list[float]) -> tuple[Status, list[float]]:
    status = Status(phase="Running")
    seconds = 0.0
    times = []
    for step, gap in enumerate(gaps):
        seconds += gap
        status = extend_points(at(step, status), NOW + timedelta(seconds=seconds))
    times = [float(row["time"]) for row in rows_of(status)]
    return status, times


def test_row_has_columns_of_report() -> None:
    progress = Progress(
        step=7, epoch=1, loss="0.5", throughput="100 samples/s", steps_per_second="2", learning_rate="0.1",
        val_accuracy="0.9", val_loss="0.4",
    )  # fmt: skip
    status = Status(phase="Running", progress=progress, restarts=Restarts(all=2), checkpoint=CheckpointStatus(step=5))
    assert rows_of(extend_points(status, NOW)) == [{
        "time": str(int(NOW.timestamp())), "restarts": "2", "epoch": "1", "step": "7", "loss": "0.5",
        "samples_per_second": "100", "steps_per_second": "2", "learning_rate": "0.1", "validation_accuracy": "0.9",
        "validation_loss": "0.4", "checkpoint_step": "5",
    }]  # fmt: skip


def test_column_names_equal_those_of_metrics_file() -> None:
    assert set(COLUMNS) - {"restarts"} <= set(OF_A_RUN)


def test_no_row_without_steps_or_changed_values() -> None:
    assert extend_points(at(None), NOW).points == ()
    status = extend_points(at(1), NOW)
    assert extend_points(status, NOW + timedelta(hours=1)) is status


def test_long_job_has_few_even_rows() -> None:
    status, times = train([10.0] * 10_000)
    assert MAX_ROWS / 2 <= len(times) <= MAX_ROWS
    assert rows_of(status)[0]["step"] == "0"
    assert times[-1] - NOW.timestamp() > 95_000
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps[:-1]) < 2 * min(gaps)


def test_pause_does_not_reduce_later_rows() -> None:
    _, times = train([10.0] * 20 + [36_000.0] + [10.0] * 20)
    assert len(times) == 41


def test_end_of_job_adds_row_immediately() -> None:
    status, _ = train([10.0] * 200)
    ended = extend_points(at(200, status, phase="Succeeded"), NOW + timedelta(seconds=2_001))
    assert rows_of(ended)[-1]["step"] == "200"


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=300))
def test_rows_are_bounded_and_ordered_by_time(gaps: list[float]) -> None:
    status, times = train(gaps)
    assert len(times) <= MAX_ROWS
    assert times == sorted(times)
    assert rows_of(status)[0]["step"] == "0"


async def test_written_status_has_row() -> None:
    harness = await ReconcilerHarness(hooks=Hooks((FEATURE,))).train(page(step=7, total_steps=10, phase="Running"))
    assert rows_of(harness.status)[-1]["step"] == "7"
