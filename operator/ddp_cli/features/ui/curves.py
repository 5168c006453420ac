"""The curves of a run as data for the browser, and a small one as the points of an SVG polyline. Pure."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ddp_cli.features.ui.run import Mark, Point, RecordedRun, Row, split_processes, split_step_time
from ddp_cli.local.folder import choose_rate
from ddp_pod.contract.thinning import thin_rows

SPARK_WIDTH: Final = 96
SPARK_HEIGHT: Final = 24
_STEP_PARTS: Final = {"data": "data", "compute": "compute", "waiting and other": "wait"}


def draw_sparkline(points: Sequence[Point]) -> str:
    """Return the points of a polyline; empty for fewer than two finite ones."""
    drawn = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(drawn) < 2:
        return ""
    left = drawn[0][0]
    width = (drawn[-1][0] - left) or 1.0
    low = min(y for _, y in drawn)
    height = (max(y for _, y in drawn) - low) or 1.0
    return " ".join(
        f"{(x - left) / width * SPARK_WIDTH:.1f},{1 + (1 - (y - low) / height) * (SPARK_HEIGHT - 2):.1f}"
        for x, y in drawn
    )


def build_curves(run: RecordedRun, name: str = "", rate_of: tuple[str, str] | None = None) -> dict[str, Any]:
    """Return the charts of a run with their marks.

    ``name``: of its lines beside those of other runs. ``rate_of``: the column and unit of the throughput.
    """
    rows = [{**row, "time": row["time"] - run.start} for row in thin_rows(run.rows)]
    rate, unit = rate_of or choose_rate(rows)
    charts = [
        _build_chart(rows, "loss", "Loss", "", {name or "training": "loss", "validation": "validation_loss"}),
        _build_chart(rows, "rate", "Throughput", unit, {name or unit: rate}),
        _build_chart(rows, "accuracy", "Validation accuracy", "", {name or "accuracy": "validation_accuracy"}),
        _build_chart(split_step_time(rows), "step-time", "Time of a step on rank 0", "ms", _STEP_PARTS),
        _build_chart(rows, "learning-rate", "Learning rate", "", {name or "learning rate": "learning_rate"}),
    ]
    return {
        "clock": "the job's start",
        "charts": [chart for chart in charts if chart["lines"]],
        "marks": [_build_mark(rows, number, mark) for number, mark in enumerate(run.marks, 1)],
        "checkpoints": [{"t": time, "s": step} for time, step in run.checkpoints],
    }


def _build_mark(rows: Sequence[Row], number: int, mark: Mark) -> dict[str, Any]:
    """Return a mark with its step, its number in the timeline, and the attempt that begins with it."""
    place = bisect_right(rows, mark.time, key=lambda row: row["time"])
    text = f"{number} attempt {mark.attempt}" if mark.attempt else str(number)
    return {"t": mark.time, "s": rows[place - 1].get("step") if place else None, "text": text}


def _build_chart(rows: Sequence[Row], key: str, title: str, unit: str, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a chart with a line for each column that has two points or more.

    Each process of a run is a part of a line: its times ``t`` since the start, its steps ``s`` and its values ``v``.
    """
    lines = []
    for name, column in columns.items():
        shown = [[row for row in part if column in row] for part in split_processes(rows)]
        if sum(map(len, shown)) > 1:
            lines.append({"name": name, "parts": [_build_part(part, column) for part in shown if part]})
    return {"id": key, "title": title, "unit": unit, "lines": lines}


def _build_part(rows: Sequence[Row], column: str) -> dict[str, list[float | None]]:
    return {
        "t": [round(row["time"], 3) for row in rows],
        "s": [row.get("step") for row in rows],
        "v": [row[column] if math.isfinite(row[column]) else None for row in rows],
    }
