"""The points of charts of a job in a cluster: few in its status, and up to thousands in its running pod 0."""

import csv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from ddp_cli.client.api import Api, Object, api_path
from ddp_cli.local.folder import list_values
from ddp_operator.api.resources import find_metrics_port
from ddp_operator.decide.pace import RateMeter
from ddp_pod.contract.points import POINT_COLUMNS
from ddp_pod.contract.progress import RankProgress
from ddp_pod.contract.thinning import MOST_ROWS, is_new_process

Row = Mapping[str, float]

_POINTS_LIMIT: Final = 2 << 20
_PAGE_SECONDS: Final = 10.0


def read_points(lines: Sequence[str]) -> list[dict[str, float]]:
    """Return the rows of status.points, or of a page of pod 0, without values that are not numbers."""
    rows: list[dict[str, float]] = []
    for line in csv.DictReader(lines):
        row = {}
        for name, text in line.items():
            with suppress(TypeError, ValueError):
                row[name] = float(text)
        if "time" in row:
            rows.append(row)
    return rows


def read_pod_page(api: Api, resource: Object, pod: str, page: str, limit: int) -> bytes:
    """Return a page of a job's pod through the API server, which needs the right pods/proxy. Raises: ClientError."""
    namespace = resource["metadata"]["namespace"]
    address = f"{pod}:{find_metrics_port(resource)}"
    return api.read(api_path("v1", "pods", namespace, address, f"proxy/{page}"), limit, _PAGE_SECONDS)


def read_pod_points(api: Api, resource: Object, pod: str, attempt: int) -> list[dict[str, float]]:
    """Return the rows that pod 0 of an attempt keeps, with the columns of metrics.csv. Raises: ClientError."""
    text = read_pod_page(api, resource, pod, "points", _POINTS_LIMIT).decode("utf-8", "replace")
    meter = RateMeter()
    rows = []
    with suppress(csv.Error):
        for values in read_points(text.splitlines()[: 2 * MOST_ROWS + 1]):
            progress = RankProgress()
            progress.update({name: values[name] for name in POINT_COLUMNS if name in values})
            rates = meter.measure(attempt, progress, values["time"])
            row = list_values(values["time"], attempt, progress, rates)
            rows.append({name: value for name, value in row.items() if value is not None})
    return rows


def join_points(stored: Sequence[Row], points: Sequence[Row]) -> list[Row]:
    """Return the rows of the status before and after those of pod 0, which belong to one attempt.

    The rows of a status know restarts only, so those of pod 0 get their number too.
    """
    if not points:
        return list(stored)
    first = points[0]["time"]
    last = points[-1]["time"]
    earlier = [row for row in stored if row["time"] < first]
    restarts = earlier[-1].get("restarts", 0.0) + 1 if earlier else 0.0
    joined: list[Row] = list(earlier)
    before = points[0]
    for row in points:
        restarts += is_new_process(before, row)
        joined.append({**row, "restarts": restarts})
        before = row
    return [*joined, *(row for row in stored if row["time"] > last)]
