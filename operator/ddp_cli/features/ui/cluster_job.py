"""Read a job of a cluster, the same way for its live and its saved page: optionally with metrics of a Prometheus."""

import json
import math
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from ddp_cli.client.api import Api, Object, find_lease_renewal, list_pods
from ddp_cli.client.cluster_backend import ClusterBackend, find_events
from ddp_cli.client.errors import ApiError, ClientError
from ddp_cli.client.points import join_points, read_pod_page, read_pod_points, read_points
from ddp_cli.client.records import RecordBackend
from ddp_cli.features.ui.job_page import JobPage
from ddp_cli.features.ui.run import LoggedEvent, PodFacts, RecordedRun, Row
from ddp_cli.local.folder import COLUMNS
from ddp_cli.view.why import LeaseRenewal, explain_why
from ddp_operator.api import constants
from ddp_operator.api.kubeobjects import find_trainer, parse_time, utc_now
from ddp_operator.api.parse import parse_status
from ddp_operator.decide.report import Page
from ddp_operator.decide.views import PodView
from ddp_operator.reading.events import read_event_time
from ddp_operator.reading.objects import view_pod
from ddp_operator.reading.pages import decode_report
from ddp_pod.contract.progress import RankProgress
from ddp_pod.contract.run_report import REPORT_LIMIT
from ddp_pod.contract.series import (
    FIELDS,
    METRIC_COMPUTE_SECONDS,
    METRIC_DATA_SECONDS,
    METRIC_SAMPLES,
    METRIC_STEP_SECONDS,
    METRIC_STEPS,
    SERIES,
)

_MOST_REPORTS: Final = 16
_TIMEOUT_SECONDS: Final = 30
_POINTS: Final = 500
_LEAST_STEP: Final = 15  # seconds between two points, about Prometheus' scrape interval
_RANK_SERIES: Final = (METRIC_STEPS, METRIC_STEP_SECONDS, METRIC_DATA_SECONDS, METRIC_COMPUTE_SECONDS)


@dataclass
class ClusterData:
    """What is read of a job beside its resource: by watches for a live page, once for a saved one."""

    events: Sequence[Object] = ()
    """Those about the job and its children, oldest first."""

    pods: Sequence[Object] = ()
    reports: dict[str, Page] = field(default_factory=dict)
    """Of pods, by their uid."""

    points: Sequence[Row] = ()
    """Of pod 0, when it was last read; the status has newer ones."""

    lease: LeaseRenewal | None = None
    problems: dict[str, str] = field(default_factory=dict)
    """Why something cannot be read."""

    def read_reports(self, api: Api, resource: Object) -> None:
        """Read what running pods report, and the points of pod 0, as far as the user may."""
        running = [view for view in map(view_pod, list(self.pods)) if view.phase == "Running"]
        running.sort(key=lambda view: view.index)

        def read(pod: PodView) -> str:
            try:
                self.reports[pod.uid] = decode_report(read_pod_page(api, resource, pod.name, "report", REPORT_LIMIT))
            except ClientError as error:
                return f"The ranks of some pods cannot be read: {error}"
            if pod.index == 0:
                with suppress(ClientError):  # a launcher of an older release has none
                    self.points = read_pod_points(api, resource, pod.name, pod.attempt)
            return ""

        with ThreadPoolExecutor(_MOST_REPORTS) as readers:
            problems = list(filter(None, readers.map(read, running[:_MOST_REPORTS])))
        if len(running) > _MOST_REPORTS:
            problems.append(f"The ranks of the first {_MOST_REPORTS} of {len(running)} pods")
        self.problems["reports"] = problems[0] if problems else ""


def read_once(api: Api, resource: Object) -> ClusterData:
    """Return what can be read of a job now. Raises: ClientError."""
    data = ClusterData(find_events(api, resource), lease=find_lease_renewal(api))
    try:
        data.pods = list_pods(api, resource["metadata"]["name"])
    except ApiError as error:
        if error.status != 404:  # of a deleted job
            data.problems["pods"] = f"The pods of this job cannot be read: {error}"
    data.read_reports(api, resource)
    return data


def build_cluster_page(backend: ClusterBackend, run: RecordedRun, data: ClusterData, *, key: str = "") -> JobPage:
    """Return the page of a job that exists, or of a deleted one from its record."""
    metadata = run.resource["metadata"]
    now = utc_now()
    deleted = isinstance(backend, RecordBackend)
    return JobPage(
        run,
        now,
        key=key,
        place=f"{metadata['namespace']}{', record' if deleted else ''}",
        why=explain_why(run.resource, data.events, now, option=backend.api.option, lease=data.lease),
        ranks_note=" ".join(filter(None, data.problems.values())),
        argument=backend.argument(metadata["name"]),
        deleted=deleted,
    )


def read_job(resource: Object, data: ClusterData, now: datetime, prometheus: str | None = None) -> RecordedRun:
    """Return the run with the metrics of the status and the points of pod 0, or of the Prometheus at this URL.

    Raises: ValueError, if a response of Prometheus cannot be read; OSError.
    """
    metadata = resource["metadata"]
    status = parse_status(resource)
    rows: Sequence[Row] = join_points(read_points(status.points), data.points)
    pods = list(_list_pods(status.attempt, data))
    if prometheus:
        start_time = status.start_time or parse_time(metadata.get("creationTimestamp")) or now
        source = _Prometheus(prometheus, f'namespace="{metadata["namespace"]}",ddp_job="{metadata["name"]}"')
        start = start_time.timestamp()
        end = (status.completion_time or now).timestamp()
        rows = source.read_rows(start, end) or rows
        if not any(pod.report for pod in pods):
            pods = [PodFacts(None, report=source.read_ranks(status.attempt, start, end))]
    candidates = [_read_event(event, metadata["name"]) for event in data.events]
    return RecordedRun(
        resource,
        status,
        rows,
        [event for event in candidates if event is not None],
        name=metadata["name"],
        under_way=True,  # a job in a cluster cannot be interrupted like a `ddp run`
        facts=_facts(resource),
        pods=pods,
    )


def _list_pods(attempt: int, data: ClusterData) -> Iterator[PodFacts]:
    """Yield the newest pods of an attempt."""
    views = [view for view in map(view_pod, list(data.pods)) if view.attempt == attempt]
    newest = {view.index: view for view in sorted(views, key=lambda view: view.created)}
    for index, view in sorted(newest.items()):
        state = view.waiting_reason or ("being deleted" if view.deleting else view.phase.lower())
        yield PodFacts(index, view.name, view.node_name, state, data.reports.get(view.uid))


def _read_event(event: Mapping[str, Any], name: str) -> LoggedEvent | None:
    """Return an Event about the job, or a warning about its Jobs and pods; None for all others."""
    involved = event.get("involvedObject") or {}
    time = parse_time(read_event_time(event))
    kind = str(event.get("type") or "Normal")
    is_about_job = involved.get("kind") == constants.KIND
    if time is None or not (is_about_job or kind == "Warning"):
        return None
    message = " ".join(str(event.get("message") or "").split())
    where = "" if is_about_job else f"{involved.get('kind')} {involved.get('name')}: "
    return LoggedEvent(time.timestamp(), kind, str(event.get("reason") or ""), where + message)


def _facts(resource: Mapping[str, Any]) -> dict[str, str]:
    trainer = find_trainer(resource["spec"]["template"])
    metadata = resource["metadata"]
    return {
        "namespace": str(metadata["namespace"]),
        "uid": str(metadata.get("uid") or ""),
        "image": str(trainer.get("image") or ""),
        "command": " ".join(map(str, [*(trainer.get("command") or ()), *(trainer.get("args") or ())])),
    }


class _Prometheus:
    """The series of one job in a Prometheus, through its HTTP API."""

    def __init__(self, url: str, labels: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--prometheus: {url} is not a URL; write for example http://127.0.0.1:9090")
        self._url = url.rstrip("/")
        self._labels = labels

    def read_rows(self, start: float, end: float) -> list[Row]:
        """Return rank 0's metrics as the rows of a metrics.csv."""
        step = max(_LEAST_STEP, math.ceil((end - start) / _POINTS))
        rank_0 = f'{{{self._labels},rank="0"}}'
        rate = f"[{max(60, 4 * step)}s]"
        queries = {name: f"{SERIES[field]}{rank_0}" for name, field in COLUMNS.items() if field}
        queries["samples_per_second"] = f"sum by (ddp_attempt) (rate({METRIC_SAMPLES}{{{self._labels}}}{rate}))"
        queries["steps_per_second"] = f"rate({METRIC_STEPS}{rank_0}{rate})"
        rows: dict[tuple[float, float], dict[str, float]] = {}
        for name, query in queries.items():
            maximum = f"max by (ddp_attempt) ({query})"
            for series in self._query("query_range", query=maximum, start=start, end=end, step=step):
                attempt = float(series["metric"].get("ddp_attempt") or 1)
                for time, text in series["values"]:
                    if math.isfinite(value := float(text)):
                        row = rows.setdefault((float(time), attempt), {"time": float(time), "attempt": attempt})
                        row[name] = value
        return [row for _, row in sorted(rows.items()) if "step" in row or "loss" in row]

    def read_ranks(self, attempt: int, start: float, end: float) -> Page:
        """Return the counters of each rank of an attempt."""
        names = "|".join(_RANK_SERIES)
        series = f'{{__name__=~"{names}",{self._labels},ddp_attempt="{attempt}"}}'
        window = f"[{max(60, math.ceil(end - start))}s]"
        ranks: dict[int, RankProgress] = {}
        for result in self._query("query", query=f"last_over_time({series}{window})", time=end):
            metric = result["metric"]
            with suppress(KeyError, ValueError):
                rank = int(metric["rank"])
                values = {FIELDS[metric["__name__"]]: float(result["value"][1])}
                ranks.setdefault(rank, RankProgress(rank)).update(values)
        return Page(ranks=tuple(ranks[number] for number in sorted(ranks)))

    def _query(self, kind: str, **parameters: object) -> list[dict[str, Any]]:
        url = f"{self._url}/api/v1/{kind}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310 # nosec B310
                result: list[dict[str, Any]] = json.load(response)["data"]["result"]
        except OSError as error:
            raise ValueError(f"{self._url}: Prometheus does not respond ({error}); check --prometheus") from None
        except (ValueError, LookupError, TypeError):
            raise ValueError(f"{self._url}: not the HTTP API of a Prometheus; check --prometheus") from None
        return result
