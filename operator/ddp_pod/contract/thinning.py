"""Keep the rows of a growing run bounded: the extremes of what is drawn and the last row of each span. Pure."""

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Final

Row = Mapping[str, float]

MOST_ROWS: Final = 2000
_DRAWN: Final = ("loss", "samples_per_second", "steps_per_second")
_ROWS_OF_BUCKET: Final = 2 * len(_DRAWN) + 1


def thin_rows(rows: Sequence[Row], most: int = MOST_ROWS) -> list[Row]:
    """Return at most about ``most`` rows in their order, which also have the first and last row of each process.

    The spans have equal lengths, so that rows which were thinned before do not get rarer than new ones.
    """
    if len(rows) <= most:
        return list(rows)
    start = rows[0]["time"]
    span = (rows[-1]["time"] - start) / (most // _ROWS_OF_BUCKET) or 1.0
    numbered = list(enumerate(rows))
    kept = {0, len(rows) - 1}
    for (before, old), (after, new) in pairwise(numbered):
        if is_new_process(old, new):
            kept |= {before, after}
    for _, bucket in groupby(numbered, key=lambda item: int((item[1]["time"] - start) // span)):
        kept |= _choose(list(bucket))
    return [rows[number] for number in sorted(kept)]


def _choose(bucket: Sequence[tuple[int, Row]]) -> set[int]:
    """Return the numbers of the last row, and of those with the least and the largest value of each column."""
    chosen = {bucket[-1][0]}
    for column in _DRAWN:
        values = [(row[column], number) for number, row in bucket if column in row]
        if values:
            chosen |= {min(values)[1], max(values)[1]}
    return chosen


def is_new_process(before: Row, after: Row) -> bool:
    """Return whether rank 0 was started again between two rows: its attempt grows, or its step counter decreases."""
    has_grown = any(after[name] > before[name] for name in ("attempt", "restarts") if name in before and name in after)
    return has_grown or after.get("steps", 0.0) < before.get("steps", 0.0)
