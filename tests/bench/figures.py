"""The output of all benchmarks: medians with their spread, and ratios of alternating measurements within one run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence


def table(title: str, rows: Mapping[str, Sequence[float]], unit: str = "s", digits: int = 2) -> str:
    """Return one line per row: median, minimum and maximum."""
    width = max(map(len, rows))
    lines = [f"{title} (median, min … max of {len(next(iter(rows.values())))})"]
    for name, values in rows.items():
        middle, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
        lines.append(f"  {name:{width}}  {middle} {unit}   {low} … {high}")
    return "\n".join(lines)


def ratio(name: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the line with the ratio of medians."""
    return f"  {name}: {statistics.median(ours) / statistics.median(theirs):.3f}"
