"""Read the points of charts that the status of a job in a cluster has."""

import csv
from contextlib import suppress

from ddp_operator.api.status import History


def read_points(history: History | None) -> list[dict[str, float]]:
    """Return the rows of a status with the columns of metrics.csv, without values that are not numbers."""
    rows: list[dict[str, float]] = []
    for line in csv.DictReader([history.columns, *history.rows]) if history is not None else ():
        row = {}
        for name, text in line.items():
            with suppress(TypeError, ValueError):
                row[name] = float(text)
        if "time" in row:
            rows.append(row)
    return rows
