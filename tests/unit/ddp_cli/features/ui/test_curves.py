"""Curves as data: extremes are kept, and what is no number is no point."""

from __future__ import annotations

import math

import pytest

from ddp_cli.features.ui.curves import draw_sparkline, thin
from ddp_cli.features.ui.run import make_run
from ddp_operator.api.status import Status


def test_long_series_keep_their_extremes_and_their_end() -> None:
    points = [(float(n), math.sin(n)) for n in range(100_000)] + [(100_000.0, 50.0), (100_001.0, 0.0)]
    kept = thin(points, 2000)
    assert len(kept) <= 2001
    assert {points[0][0] < 200, points[-1] in kept, (100_000.0, 50.0) in kept} == {True}
    assert kept == sorted(kept)


@pytest.mark.parametrize("points", [[], [(1.0, 2.0)], [(1.0, math.nan), (2.0, math.inf)]])
def test_too_few_points_give_no_sparkline(points: list[tuple[float, float]]) -> None:
    assert draw_sparkline(points) == ""


def test_lost_loss_is_a_gap_and_no_number() -> None:
    from ddp_cli.features.ui.curves import build_curves

    losses = [2.0, 1.0, math.nan, 3.0]
    rows = [{"time": 100.0 + n, "step": float(n), "loss": loss, "steps": float(n)} for n, loss in enumerate(losses)]
    run = make_run({"metadata": {}}, Status(), rows, (), name="x", under_way=True)
    (chart,) = build_curves(run)["charts"]
    (part,) = chart["lines"][0]["parts"]
    assert part == {"t": [0.0, 1.0, 2.0, 3.0], "s": [0.0, 1.0, 2.0, 3.0], "v": [2.0, 1.0, None, 3.0]}
