"""Curves as data: extremes are kept, and what is no number is no point."""

from __future__ import annotations

import math

import pytest

from ddp_cli.features.ui.curves import build_curves, draw_sparkline
from ddp_cli.features.ui.run import RecordedRun
from ddp_operator.api.status import Status


def test_long_series_keep_their_peak_and_their_end() -> None:
    rows = [{"time": float(n), "step": float(n), "loss": 50.0 if n == 9999 else 1.0} for n in range(20_000)]
    run = RecordedRun({"metadata": {}}, Status(), rows, (), name="x", under_way=True)
    (part,) = build_curves(run)["charts"][0]["lines"][0]["parts"]
    assert len(part["v"]) <= 2010
    assert max(part["v"]) == 50.0
    assert part["t"][-1] == 19_999.0


@pytest.mark.parametrize("points", [[], [(1.0, 2.0)], [(1.0, math.nan), (2.0, math.inf)]])
def test_too_few_points_give_no_sparkline(points: list[tuple[float, float]]) -> None:
    assert draw_sparkline(points) == ""


def test_lost_loss_is_a_gap_and_no_number() -> None:
    losses = [2.0, 1.0, math.nan, 3.0]
    rows = [{"time": 100.0 + n, "step": float(n), "loss": loss, "steps": float(n)} for n, loss in enumerate(losses)]
    run = RecordedRun({"metadata": {}}, Status(), rows, (), name="x", under_way=True)
    (chart,) = build_curves(run)["charts"]
    (part,) = chart["lines"][0]["parts"]
    assert part == {"t": [0.0, 1.0, 2.0, 3.0], "s": [0.0, 1.0, 2.0, 3.0], "v": [2.0, 1.0, None, 3.0]}
