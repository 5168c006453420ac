"""A job of a cluster as the run of a report: what its resource, its Events and perhaps a Prometheus still know."""

import csv
import json
import math
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

import msgspec

from ddp_operator import constants
from ddp_operator.api.status import History, Status
from ddp_operator.kubeobjects import parse_time
from ddp_operator.local.folder import COLUMNS
from ddp_operator.report.run import Event, RankTime, Row, Run, make_run, measure_ranks
from ddp_operator.status.scheduling import event_time

_TIMEOUT_SECONDS: Final = 30
_POINTS: Final = 500
_LEAST_STEP: Final = 15  # seconds between two points: about what Prometheus itself has
_RANK_SERIES: Final = (
    *("ddp_step_duration_seconds_count", constants.METRIC_STEP_SECONDS),
    *(constants.METRIC_DATA_SECONDS, constants.METRIC_COMPUTE_SECONDS),
)


def read_job(
    resource: Mapping[str, Any], events: Iterable[Mapping[str, Any]], now: datetime, prometheus: str | None = None
) -> Run:
    """Return the run: its figures are those of the status, or of a Prometheus at this URL, where one is given.

    Raises: ValueError, where the status or an answer of Prometheus cannot be read; OSError.
    """
    metadata = resource["metadata"]
    try:
        status = msgspec.convert(resource.get("status") or {}, Status)
    except msgspec.ValidationError as error:
        raise ValueError(f"{metadata['name']} has a status that this version of ddp cannot read ({error})") from None
    rows: Sequence[Row] = read_history(status.history)
    ranks: Sequence[RankTime] = ()
    if prometheus:
        began = status.start_time or parse_time(metadata.get("creationTimestamp")) or now
        source = _Prometheus(prometheus, f'namespace="{metadata["namespace"]}",ddp_job="{metadata["name"]}"')
        span = (began.timestamp(), (status.completion_time or now).timestamp())
        rows = source.read_rows(*span) or rows
        ranks = source.read_ranks(status.attempt, *span)
    return make_run(
        resource,
        status,
        rows,
        [found for event in events if (found := _read_event(event, metadata["name"])) is not None],
        name=metadata["name"],
        under_way=True,  # a cluster has no run that nobody looks after any more
        facts=_facts(resource),
        ranks=ranks,
    )


def read_history(history: History | None) -> list[dict[str, float]]:
    """Return the rows of a status; figures that are no number are left out."""
    rows: list[dict[str, float]] = []
    for line in csv.DictReader([history.columns, *history.rows]) if history is not None else ():
        row = {}
        for name, text in line.items():
            with suppress(TypeError, ValueError):
                row[name] = float(text)
        if "time" in row:
            rows.append(row)
    return rows


def _read_event(event: Mapping[str, Any], name: str) -> Event | None:
    """Return an Event about the job, or a warning about its Jobs and pods, as a report has them."""
    about = event.get("involvedObject") or {}
    time, kind = parse_time(event_time(event)), str(event.get("type") or "Normal")
    own = about.get("kind") == constants.KIND
    if time is None or not (own or kind == "Warning"):
        return None
    message = " ".join(str(event.get("message") or "").split())
    where = "" if own else f"{about.get('kind')} {about.get('name')}: "
    return Event(time.timestamp(), kind, str(event.get("reason") or ""), where + message)


def _facts(resource: Mapping[str, Any]) -> dict[str, str]:
    containers = resource["spec"]["template"]["spec"].get("containers") or [{}]
    trainer = next((one for one in containers if one.get("name") == constants.TRAINER_CONTAINER), containers[0])
    metadata = resource["metadata"]
    return {
        "namespace": str(metadata["namespace"]),
        "uid": str(metadata.get("uid") or ""),
        "image": str(trainer.get("image") or ""),
        "command": " ".join(map(str, [*(trainer.get("command") or ()), *(trainer.get("args") or ())])),
    }


class _Prometheus:
    """The HTTP API of a Prometheus, about one job."""

    def __init__(self, url: str, labels: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--prometheus: {url} is not a URL; write it such as http://127.0.0.1:9090")
        self._url = url.rstrip("/")
        self._labels = labels

    def read_rows(self, start: float, end: float) -> list[Row]:
        """Return rank 0's figures as the rows of a metrics.csv."""
        step = max(_LEAST_STEP, math.ceil((end - start) / _POINTS))
        rank_0, rate = f'{{{self._labels},rank="0"}}', f"[{max(60, 4 * step)}s]"
        queries = {name: f"{metric}{rank_0}" for name, metric in COLUMNS.items() if metric}
        queries["samples_per_second"] = (
            f"sum by (ddp_attempt) (rate({constants.METRIC_SAMPLES}{{{self._labels}}}{rate}))"
        )
        queries["steps_per_second"] = f"rate({constants.METRIC_STEPS}{rank_0}{rate})"
        rows: dict[tuple[float, float], dict[str, float]] = {}
        for name, query in queries.items():
            over = f"max by (ddp_attempt) ({query})"
            for series in self._ask("query_range", query=over, start=start, end=end, step=step):
                attempt = float(series["metric"].get("ddp_attempt") or 1)
                for time, text in series["values"]:
                    if math.isfinite(value := float(text)):
                        row = rows.setdefault((float(time), attempt), {"time": float(time), "attempt": attempt})
                        row[name] = value
        return [row for _, row in sorted(rows.items()) if "step" in row or "loss" in row]

    def read_ranks(self, attempt: int, start: float, end: float) -> list[RankTime]:
        """Return the mean step of each rank of an attempt."""
        names = "|".join(_RANK_SERIES)
        series = f'{{__name__=~"{names}",{self._labels},ddp_attempt="{attempt}"}}'
        window = f"[{max(60, math.ceil(end - start))}s]"
        ranks: dict[int, dict[str, float]] = {}
        for found in self._ask("query", query=f"last_over_time({series}{window})", time=end):
            metric = found["metric"]
            with suppress(KeyError, ValueError):
                ranks.setdefault(int(metric["rank"]), {})[metric["__name__"]] = float(found["value"][1])
        return measure_ranks(ranks)

    def _ask(self, kind: str, **parameters: object) -> list[dict[str, Any]]:
        url = f"{self._url}/api/v1/{kind}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310 # nosec B310
                result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except OSError as error:
            raise ValueError(f"{self._url}: Prometheus does not answer ({error}); check --prometheus") from None
        except (ValueError, LookupError, TypeError):
            raise ValueError(f"{self._url}: this is not the HTTP API of a Prometheus; check --prometheus") from None
        return result
