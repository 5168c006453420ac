"""The jobs of the pages: runs in a folder of this machine, by the times of their files, and a cluster's, by watches."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from ddp_cli.client.api import Api, Object, api_path, find_lease_renewal, is_about
from ddp_cli.client.cluster_backend import ClusterBackend
from ddp_cli.client.errors import ApiError, ClientError, NotFound
from ddp_cli.client.follow import Jobs, follow_jobs, follow_objects
from ddp_cli.client.job import Job
from ddp_cli.client.local import LocalBackend
from ddp_cli.client.logs import RunLogs, has_log, log_pod
from ddp_cli.client.points import read_pod_page, read_pod_points
from ddp_cli.client.runs import read_job as read_run_job
from ddp_cli.features.ui.cluster_job import read_job
from ddp_cli.features.ui.job_page import JobPage, PodFacts, build_job_page
from ddp_cli.features.ui.logs import (
    LogPiece,
    LogQuery,
    PodFollower,
    RunFollower,
    read_pod_piece,
    read_run_piece,
    read_tail,
)
from ddp_cli.features.ui.records import RecordedJobs
from ddp_cli.features.ui.rows import Row, build_row
from ddp_cli.features.ui.run import RecordedRun, read_run
from ddp_cli.local.folder import STATUS_FILE, RunFolder
from ddp_cli.local.own_files import is_own_folder
from ddp_cli.view.why import LeaseRenewal, explain_why
from ddp_operator.api import constants
from ddp_operator.api.kubeobjects import utc_now
from ddp_operator.api.status import ENDED_PHASES
from ddp_operator.decide.report import Page
from ddp_operator.reading.events import read_event_time
from ddp_operator.reading.objects import view_pod
from ddp_operator.reading.pages import decode_report
from ddp_pod.contract.report import REPORT_LIMIT

_MOST_RUNS: Final = 1000
_MOST_REPORTS: Final = 16
_AGE_SECONDS: Final = 15.0
"""After this time the texts of a job that waits are written again: they state for how long."""
_RETRY_SECONDS: Final = 5.0
_VIEW_SECONDS: Final = 60
"""An opened job is watched until it has not been read for this time."""
_MOST_OBJECTS: Final = 2000

Changed = Callable[[], None]
LogFollower = RunFollower | PodFollower


class _ReadRun(NamedTuple):
    """A run as it was last read. ``is_quiet``: no process writes it any more."""

    written: int
    is_quiet: bool
    row: Row


class LocalRuns:
    """The runs in a folder. A run is read again when its status has changed, or its process has ended."""

    kind: ClassVar = "run"

    def __init__(self, runs: Path) -> None:
        self.problem = ""
        self._runs = runs
        self._read: dict[str, _ReadRun] = {}
        self._rows: Mapping[str, Row] = {}

    def start(self) -> None:
        """Do nothing: the files are read while a page is open."""

    def refresh(self) -> Mapping[str, Row]:
        """Return the rows of the newest runs; the same object as before if nothing has changed."""
        self.problem = f"{self._runs} is a link; name its target with --runs-dir" if self._runs.is_symlink() else ""
        written = {name: time for name in self._list_names() if (time := _find_mtime(self._runs / name / STATUS_FILE))}
        newest = sorted(written, key=written.__getitem__, reverse=True)
        if len(newest) > _MOST_RUNS:
            self.problem = f"only the newest {_MOST_RUNS} of {len(newest)} runs are listed"
        read = {name: self._read_again(name, written[name]) for name in newest[:_MOST_RUNS]}
        if read != self._read:
            self._rows = {run.row.key: run.row for run in read.values()}
        self._read = read
        return self._rows

    def _list_names(self) -> list[str]:
        """Return the names of the folders that may be runs."""
        if self._runs.is_symlink():
            return []
        with suppress(OSError), os.scandir(self._runs) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return []

    def _read_again(self, name: str, written: int) -> _ReadRun:
        before = self._read.get(name)
        is_same = before is not None and before.written == written
        if before is not None and is_same and before.is_quiet:
            return before
        in_use = RunFolder(self._runs / name).in_use
        if before is not None and is_same and in_use:
            return before
        row = _read_row(name, self._runs / name)
        return _ReadRun(written, row.phase in ENDED_PHASES or not in_use, row)

    def find_folder(self, key: str) -> RunFolder:
        """Return the folder of a run: one of those that exist, never a path that a browser names. Raises: NotFound."""
        name = key.removeprefix("run/")
        folder = RunFolder(self._runs / name)
        if name not in self._list_names() or not folder.status.exists() or not is_own_folder(folder.path):
            raise NotFound(f"run {name[:80]} does not exist in {self._runs}; it may have been deleted")
        return folder

    def read_run(self, key: str) -> RecordedRun:
        """Return what the run's folder has. Raises: ClientError."""
        try:
            return read_run(self.find_folder(key).path)
        except (ValueError, OSError) as error:
            raise ClientError(str(error)) from None

    def read_page(self, key: str) -> JobPage:
        """Return the page of a run. Raises: ClientError."""
        return build_run_page(self.read_run(key), self.find_folder(key), key=key)

    def sign(self, key: str) -> object:
        """Return the times of the files of a run."""
        try:
            folder = self.find_folder(key)
        except NotFound:
            return None
        paths = [folder.status, folder.metrics, folder.events, folder.summary, *folder.reports.glob("*.json")]
        return tuple(map(_find_mtime, paths)), folder.in_use

    def read_log(self, key: str, query: LogQuery, cursor: str) -> LogPiece:
        """Return a piece of the log of a run. Raises: ClientError."""
        folder = self.find_folder(key)
        return read_run_piece(folder, count_ranks(folder), query, cursor)

    def follow_log(self, key: str) -> LogFollower:
        """Return the reader of the future lines of a run. Raises: ClientError."""
        folder = self.find_folder(key)
        return RunFollower(folder, count_ranks(folder))

    def renew(self, key: str) -> None:
        """Do nothing: all is read from files."""


def count_ranks(folder: RunFolder) -> int:
    """Return the number of ranks in each pod of a run. Raises: ClientError."""
    return RunLogs(folder, None, None, None).nproc


def build_run_page(run: RecordedRun, folder: RunFolder, *, key: str = "") -> JobPage:
    """Return the page of a run on this machine."""
    state = "" if run.under_way else "ended"
    pods = [PodFacts(number, node="this machine", state=state, report=page) for number, page in run.reports]
    argument = LocalBackend(folder.path.parent).argument(folder.path.name)
    return build_job_page(run, utc_now(), key=key, place="this machine", pods=pods, argument=argument)


def _find_mtime(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def _read_row(name: str, path: Path) -> Row:
    """Return the row of a run; one that cannot be read has a row with the reason."""
    key = f"run/{name}"
    if not is_own_folder(path):
        return Row(key, name, "this machine", reason="This folder belongs to another user, and is not read.")
    try:
        resource = read_run_job(RunFolder(path))
    except ClientError as error:
        return Row(key, name, "this machine", reason=str(error))
    named = {**resource, "metadata": {**resource["metadata"], "name": name}}
    return build_row(named, utc_now(), key=key, place="this machine")


@dataclass
class _Watched:
    """What is watched of an opened job."""

    pods: Jobs = field(default_factory=dict)
    events: Jobs = field(default_factory=dict)
    reports: dict[str, Page] = field(default_factory=dict)
    points: Sequence[Mapping[str, float]] = ()
    """Of pod 0, when it was last read; the status has newer ones."""

    note: str = ""
    lease: LeaseRenewal | None = None
    read_at: float = 0.0
    version: int = 0


class ClusterJobs:
    """The jobs of a namespace, or of all, by watches: of the jobs always, of Events and pods of opened jobs."""

    kind: ClassVar = "job"

    def __init__(self, api: Api, *, everywhere: bool, on_change: Changed = lambda: None) -> None:
        self.problem = ""
        self._api = api
        self._namespace = None if everywhere else api.namespace
        self._on_change = on_change
        self._lock = threading.Lock()
        self._jobs: Jobs = {}
        self._entries: dict[str, tuple[str, float, Row]] = {}
        self._rows: Mapping[str, Row] = {}
        self._watched: dict[str, _Watched] = {}

    def start(self) -> None:
        """Watch the jobs until the process ends."""
        threading.Thread(target=self._watch_jobs, daemon=True).start()

    def _watch_jobs(self) -> None:
        while True:
            try:
                for jobs in follow_jobs(self._api, self._namespace):
                    self.problem = ""
                    self._jobs = jobs
                    self._on_change()
            except ClientError as error:
                self.problem = str(error)
            except Exception as error:  # a response of a foreign server; the page shows it, and the watch goes on
                self.problem = f"{self._api.host}: {type(error).__name__}: {error}"
            self._on_change()
            time.sleep(_RETRY_SECONDS)

    def refresh(self) -> Mapping[str, Row]:
        """Return the rows of the jobs; the same object as before if nothing has changed."""
        now = time.monotonic()
        jobs = {f"job/{namespace}/{name}": job for (namespace, name), job in self._jobs.items()}
        entries = {}
        for key, job in jobs.items():
            version = str(job["metadata"].get("resourceVersion"))
            entry = self._entries.get(key)
            if entry is None or entry[0] != version or now - entry[1] > _AGE_SECONDS:
                entry = version, now, build_row(job, utc_now(), key=key)
            entries[key] = entry
        if entries != self._entries:
            self._rows = {key: row for key, (_, _, row) in entries.items()}
        self._entries = entries
        return self._rows

    def find(self, key: str) -> Job:
        """Return a job. Raises: NotFound."""
        _, namespace, name = key.split("/", 2)
        resource = self._jobs.get((namespace, name))
        if resource is None:
            raise NotFound(f"job {name[:80]} does not exist in namespace {namespace[:80]}; it may have been deleted")
        return Job(ClusterBackend(self._within(namespace)), name, resource)

    def _within(self, namespace: str) -> Api:
        """Return the API of the namespace of a job that the API server has listed."""
        same = namespace == self._api.namespace
        return self._api if same else Api(self._api.client, namespace, self._api.home)

    def read_run(self, key: str) -> RecordedRun:
        """Return what the status and the Events have. Raises: ClientError."""
        job = self.find(key)
        watched = self._watch(key, job)
        return read_job(job.resource, self._sort_events(watched), utc_now(), points=watched.points)

    def read_page(self, key: str) -> JobPage:
        """Return the page of a job. Raises: ClientError."""
        job = self.find(key)
        watched = self._watch(key, job)
        events = self._sort_events(watched)
        now = utc_now()
        argument = job.backend.argument(job.name)
        api = self._within(job.resource["metadata"]["namespace"])
        why = explain_why(job.resource, events, now, option=api.option, lease=watched.lease)
        run = read_job(job.resource, events, now, points=watched.points)
        pods = list(_list_pods(run.status.attempt, watched))
        place = job.resource["metadata"]["namespace"]
        return build_job_page(
            run, now, key=key, place=place, why=why, pods=pods, ranks_note=watched.note, argument=argument
        )

    def sign(self, key: str) -> object:
        """Return the versions of a job, its pods and its Events."""
        _, namespace, name = key.split("/", 2)
        job = self._jobs.get((namespace, name))
        watched = self._watched.get(key)
        if watched is not None:
            watched.read_at = time.monotonic()
        version = job["metadata"].get("resourceVersion") if job else None
        return version, watched.version if watched else 0, time.monotonic() // _AGE_SECONDS

    def read_log(self, key: str, query: LogQuery, cursor: str) -> LogPiece:
        """Return the last lines of the pods that exist. Raises: ClientError."""
        job = self.find(key)
        source = job.backend.logs(job.name, node=None, attempt=None, tail=read_tail(cursor))
        return read_pod_piece(source, query, cursor)

    def follow_log(self, key: str) -> LogFollower:
        """Return the reader of the future lines of a job's pods. Raises: ClientError."""
        job = self.find(key)
        watched = self._watch(key, job)
        api = self._within(job.resource["metadata"]["namespace"])
        return PodFollower(api, job.name, lambda: [log_pod(pod) for pod in list(watched.pods.values()) if has_log(pod)])

    def renew(self, key: str) -> None:
        """Read the reports of the job's pods once, through the API server, as far as the user may."""
        watched = self._watched.get(key)
        if watched is not None:
            self._read_reports(watched, self.find(key).resource)

    def _sort_events(self, watched: _Watched) -> list[Object]:
        return sorted(watched.events.values(), key=read_event_time)

    def _watch(self, key: str, job: Job) -> _Watched:
        """Return what is watched of a job; start the watches at its first reading. Raises: ClientError."""
        with self._lock:
            watched = self._watched.get(key)
            if watched is not None:
                watched.read_at = time.monotonic()
                return watched
            watched = self._watched[key] = _Watched(read_at=time.monotonic())
        metadata = job.resource["metadata"]
        api = self._within(metadata["namespace"])
        watched.lease = find_lease_renewal(api)
        labels = {"labelSelector": f"{constants.LABEL_JOB_NAME}={job.name}"}

        def is_ours(event: Object) -> bool:
            return is_about(event, job.name, metadata["uid"])

        for attribute, path, query, keep in (
            ("pods", api_path("v1", "pods", api.namespace), labels, lambda item: True),
            ("events", api_path("v1", "events", api.namespace), {}, is_ours),
        ):
            ready = threading.Event()
            arguments = (key, watched, attribute, api, path, query, keep, ready)
            threading.Thread(target=self._follow, args=arguments, daemon=True).start()
            ready.wait(1.0)
        if (job.resource.get("status") or {}).get("phase") not in ENDED_PHASES:
            threading.Thread(target=self._read_reports, args=(watched, job.resource), daemon=True).start()
        return watched

    def _follow(
        self,
        key: str,
        watched: _Watched,
        attribute: str,
        api: Api,
        path: str,
        query: Mapping[str, str],
        keep: Callable[[Object], bool],
        ready: threading.Event,
    ) -> None:
        """Watch the objects of an opened job, until nobody has read it for a minute."""
        while time.monotonic() - watched.read_at < _VIEW_SECONDS:
            until = time.monotonic() + _VIEW_SECONDS
            try:
                objects = follow_objects(
                    api, path, query, lambda: api.request("GET", path, query), keep=keep, until=until
                )
                for found in objects:
                    setattr(watched, attribute, dict(list(found.items())[-_MOST_OBJECTS:]))
                    watched.version += 1
                    ready.set()
                    self._on_change()
            except (ClientError, ValueError, LookupError, TypeError) as error:
                watched.note = watched.note or f"The {attribute} of this job cannot be read: {error}"
                ready.set()
                time.sleep(_RETRY_SECONDS)
        self._watched.pop(key, None)

    def _read_reports(self, watched: _Watched, job: Object) -> None:
        problem = ""
        pods = [pod for pod in map(view_pod, list(watched.pods.values())) if pod.phase == "Running"]
        for pod in sorted(pods, key=lambda pod: pod.index)[:_MOST_REPORTS]:
            try:
                data = read_pod_page(self._api, job, pod.name, "report", REPORT_LIMIT)
                watched.reports[pod.uid] = decode_report(data)
                if pod.index == 0:
                    with suppress(ClientError):  # a launcher of an older release has none
                        watched.points = read_pod_points(self._api, job, pod.name, pod.attempt)
            except ClientError as error:
                problem = f"The ranks of some pods cannot be read: {error}"
                if isinstance(error, ApiError) and error.status == 403:
                    break
        if len(pods) > _MOST_REPORTS:
            problem = problem or f"The ranks of the first {_MOST_REPORTS} of {len(pods)} pods"
        watched.note = problem
        watched.version += 1
        self._on_change()


def _list_pods(attempt: int, watched: _Watched) -> Iterator[PodFacts]:
    """Yield the facts of the newest pods of an attempt."""
    views = [view for view in map(view_pod, list(watched.pods.values())) if view.attempt == attempt]
    newest = {view.index: view for view in sorted(views, key=lambda view: view.created)}
    for index, view in sorted(newest.items()):
        state = view.waiting_reason or ("being deleted" if view.deleting else view.phase.lower())
        yield PodFacts(index, view.name, view.node_name, state, watched.reports.get(view.uid))


Source = LocalRuns | ClusterJobs | RecordedJobs
