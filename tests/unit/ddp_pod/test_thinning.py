"""The rows of a growing run stay bounded and keep what is drawn."""

from __future__ import annotations

import math

from ddp_pod.contract.thinning import MOST_ROWS, thin_rows


def make_rows(count: int, start: int = 0) -> list[dict[str, float]]:
    return [
        {"time": float(n), "attempt": 1.0, "loss": math.sin(n), "steps": float(n % 5000)}
        for n in range(start, start + count)
    ]


def test_few_rows_are_kept() -> None:
    assert thin_rows(make_rows(MOST_ROWS)) == make_rows(MOST_ROWS)


def test_many_rows_keep_extremes_ends_and_processes() -> None:
    rows = make_rows(20_000)
    rows[7777]["loss"] = 50.0
    kept = thin_rows(rows)
    assert len(kept) <= MOST_ROWS + 10
    assert rows[7777] in kept
    assert [kept[0], kept[-1]] == [rows[0], rows[-1]]
    assert all(row in kept for place in (5000, 10_000, 15_000) for row in rows[place - 1 : place + 1])
    assert kept == sorted(kept, key=lambda row: row["time"])


def test_rows_that_are_thinned_again_and_again_have_equal_distances() -> None:
    rows: list[dict[str, float]] = []
    for start in range(0, 50_000, 2000):
        rows = [dict(row) for row in thin_rows([*rows, *make_rows(2000, start)])]
    old = sum(row["time"] < 10_000 for row in rows)
    new = sum(row["time"] >= 40_000 for row in rows)
    assert 0.5 < old / new < 2
