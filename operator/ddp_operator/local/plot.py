"""Draws plot.png from metrics.csv: loss, throughput, validation accuracy. A program of its own, for two reasons.

Matplotlib takes a second to import and as long for its first picture: `ddp run` starts this before the run ends, at the
lowest priority; it draws what there is, for practice, and waits on its standard input for the word to draw in earnest.
And a plot that fails must not fail the run.

    python -m ddp_operator.local.plot <run folder>
"""

from __future__ import annotations

import io
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from ddp_operator.local.folder import RunFolder, choose_rate, read_rows


def draw(folder: RunFolder, figure: Any) -> None:
    """Draw the run's panels on a matplotlib figure."""
    rows = read_rows(folder.metrics)
    start = rows[0]["time"] if rows else 0.0
    panels = (("loss", "loss"), choose_rate(rows), ("validation_accuracy", "validation accuracy"))
    axes = figure.subplots(len(panels), 1, sharex=True)
    for axis, (column, title) in zip(axes, panels, strict=True):
        points = [(row["time"] - start, row[column]) for row in rows if column in row and "time" in row]
        axis.plot([x for x, _ in points], [y for _, y in points], marker=".", linewidth=1)
        axis.set_ylabel(title)
        axis.grid(visible=True, alpha=0.3)
        for attempt_start in _attempt_starts(rows):
            axis.axvline(attempt_start - start, linestyle="--", linewidth=0.8, color="0.5")
    axes[-1].set_xlabel("seconds since the first step seen")
    figure.suptitle(folder.path.name)


def _attempt_starts(rows: list[dict[str, float]]) -> list[float]:
    """Return the times at which a later attempt was first seen."""
    pairs = pairwise(rows)
    return [after["time"] for before, after in pairs if after.get("attempt") != before.get("attempt")]


def main(path: str) -> None:
    """Import, wait for the word, draw."""
    os.nice(19)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    folder = RunFolder(Path(path))
    temporary = folder.plot.with_suffix(".tmp")

    def save(target: Any) -> None:
        figure = Figure(figsize=(8, 8), layout="constrained")
        draw(folder, figure)
        figure.savefig(target, dpi=100, format="png")

    if folder.metrics.exists():
        save(io.BytesIO())
    if sys.stdin.read(1) == "":
        return
    save(temporary)
    os.replace(temporary, folder.plot)


if __name__ == "__main__":
    main(sys.argv[1])
