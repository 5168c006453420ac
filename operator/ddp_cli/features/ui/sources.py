"""The jobs of the pages: runs in a folder of this machine, by the times of their files, and a cluster's, by watches."""

import os
import shlex
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final, Literal, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from ddp_cli.client.api import Api, Object, api_path, find_lease_renewal, is_about
from ddp_cli.client.cluster_backend import ClusterBackend
from ddp_cli.client.errors import ClientError, NotFound
from ddp_cli.client.follow import Jobs, follow_jobs, follow_objects
from ddp_cli.client.job import Job
from ddp_cli.client.local import LocalBackend
from ddp_cli.client.logs import PodLogs, RunLogs
from ddp_cli.client.runs import read_job as read_run_job
from ddp_cli.features.ui.cluster_job import ClusterData, build_cluster_page, read_job, read_once
from ddp_cli.features.ui.job_page import JobPage
from ddp_cli.features.ui.logs import SILENCE_SECONDS, LogFollower, LogPiece, LogQuery, read_piece
from ddp_cli.features.ui.rows import Row, build_row
from ddp_cli.features.ui.run import RecordedRun, read_run
from ddp_cli.local.folder import STATUS_FILE, RunFolder
from ddp_cli.local.own_files import is_own_folder
from ddp_operator.api import constants
from ddp_operator.api.kubeobjects import utc_now
from ddp_operator.api.status import ENDED_PHASES
from ddp_operator.reading.events import read_event_time

_MOST_RUNS: Final = 1000
_AGE_SECONDS: Final = 15.0
"""After this time the texts of a job that waits are written again: they state for how long."""
_RETRY_SECONDS: Final = 5.0
_VIEW_SECONDS: Final = 60
"""An opened job is watched until it has not been read for this time."""
_MOST_OBJECTS: Final = 2000

Changed = Callable[[], None]


def build_key(*parts: str) -> str:
    """Return the key of a job: a path of an address, whose parts may have any name that a file system allows."""
    return "/".join(quote(os.fsencode(part), safe="") for part in parts)


class Source(ABC):
    """A place with jobs. ``kind``: how their keys begin; ``problem``: why not all are listed."""

    kind: ClassVar[str]
    problem = ""

    @abstractmethod
    def refresh(self) -> Mapping[str, Row]:
        """Return the rows by their keys."""

    @abstractmethod
    def find(self, key: str) -> Job:
        """Return a job: one of those that are here, never a path that a browser names. Raises: ClientError."""

    @abstractmethod
    def sign(self, key: str) -> object:
        """Return what changes with what the page of a job shows."""

    def read_page(self, key: str) -> JobPage:
        """Return the page of a job. Raises: ClientError."""
        job = self.find(key)
        assert isinstance(job.backend, ClusterBackend)
        data = self.read_data(key, job)
        return build_cluster_page(job.backend, read_job(job.resource, data, utc_now()), data, key=key)

    def read_data(self, key: str, job: Job) -> ClusterData:
        """Return what is read of a job beside its resource: of a deleted one once. Raises: ClientError."""
        assert isinstance(job.backend, ClusterBackend)
        return read_once(job.backend.api, job.resource)

    def start(self) -> None:  # noqa: B027
        """Begin to read; what is read while a page is open needs nothing here."""

    def renew(self, key: str) -> None:  # noqa: B027
        """Begin to read what is not watched: a page is opened. Raises: ClientError."""

    def read_log(self, key: str, query: LogQuery, cursor: str = "") -> LogPiece:
        """Return the last lines of a job before a cursor. Raises: ClientError."""
        return read_piece(self.find(key), query, cursor)

    def follow_log(self, key: str) -> LogFollower:
        """Return the reader of the future lines of a job. Raises: NotFound, if there are none; ClientError."""
        raise NotFound(f"{key.rpartition('/')[2][:80]}: a deleted job writes no lines")


class _ReadRun(NamedTuple):
    """A run as it was last read. ``is_quiet``: no process writes it any more."""

    written: int
    is_quiet: bool
    row: Row


class LocalRuns(Source):
    """The runs in a folder. A run is read again when its status has changed, or its process has ended."""

    kind: ClassVar = "run"

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._read: dict[str, _ReadRun] = {}

    def refresh(self) -> Mapping[str, Row]:
        """Return the rows of the newest runs."""
        written: Mapping[str, int] = {}
        self.problem = ""
        try:
            written = self._list_written()
        except FileNotFoundError:
            pass  # no run has been started here
        except OSError as error:
            self.problem = f"{self._runs}: {error.strerror or error}; name the folder of runs itself with --runs-dir"
        newest = sorted(written, key=written.__getitem__, reverse=True)
        if len(newest) > _MOST_RUNS:
            self.problem = f"only the newest {_MOST_RUNS} of {len(newest)} runs are listed"
        self._read = {name: self._read_again(name, written[name]) for name in newest[:_MOST_RUNS]}
        return {run.row.key: run.row for run in self._read.values()}

    def _list_written(self) -> dict[str, int]:
        """Return the folders of runs by their names, and when the status of each was written. Raises: OSError."""
        written: dict[str, int] = {}
        if self._runs.is_symlink():
            raise OSError("this is a link")
        with os.scandir(self._runs) as entries:
            for entry in entries:
                with suppress(OSError):  # no run, or deleted meanwhile
                    if entry.is_dir(follow_symlinks=False):
                        written[entry.name] = os.lstat(f"{entry.path}/{STATUS_FILE}").st_mtime_ns
        return written

    def _read_again(self, name: str, written: int) -> _ReadRun:
        before = self._read.get(name)
        is_same = before is not None and before.written == written
        if before is not None and is_same and before.is_quiet:
            return before
        in_use = RunFolder(self._runs / name).in_use
        if before is not None and is_same and in_use:
            return before
        row = _read_row(name, self._runs / name, in_use=in_use)
        return _ReadRun(written, row.phase in ENDED_PHASES or not in_use, row)

    def find(self, key: str) -> Job:
        """Return a run: one of those that exist. Raises: NotFound."""
        return Job(LocalBackend(self._runs), str(self._find_folder(key).path), {})

    def _find_folder(self, key: str) -> RunFolder:
        name = os.fsdecode(unquote_to_bytes(key.removeprefix("run/")))
        folder = RunFolder(self._runs / name)
        is_listed = False
        with suppress(OSError):
            is_listed = name in self._list_written()
        if not is_listed or not is_own_folder(folder.path):
            raise NotFound(f"run {name[:80]} does not exist in {self._runs}; it may have been deleted")
        return folder

    def read_page(self, key: str) -> JobPage:
        """Return the page of a run. Raises: ClientError."""
        path = self._find_folder(key).path
        try:
            return build_run_page(read_run(path), path, key=key)
        except (ValueError, OSError) as error:
            raise ClientError(str(error)) from None

    def sign(self, key: str) -> object:
        """Return the times of the files of a run."""
        try:
            folder = self._find_folder(key)
        except NotFound:
            return None
        paths = [folder.status, folder.metrics, folder.events, folder.summary, *folder.reports.glob("*.json")]
        return tuple(map(_find_mtime, paths)), folder.in_use

    def follow_log(self, key: str) -> LogFollower:
        """Return the reader of the future lines of a run. Raises: ClientError."""
        source = RunLogs(self._find_folder(key), None, None, None)
        source.skip_written()
        return LogFollower(source)


def build_run_page(run: RecordedRun, path: Path, *, key: str = "") -> JobPage:
    """Return the page of the run in a folder of this machine."""
    return JobPage(run, utc_now(), key=key, place="this machine", argument=shlex.quote(str(path)))


def _find_mtime(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def _read_row(name: str, path: Path, *, in_use: bool) -> Row:
    """Return the row of a run; one that cannot be read has a row with the reason."""
    key = build_key("run", name)
    if not is_own_folder(path):
        return Row(key, name, "this machine", reason="This folder belongs to another user, and is not read.")
    try:
        resource = read_run_job(RunFolder(path))
    except ClientError as error:
        return Row(key, name, "this machine", reason=str(error))
    named = {**resource, "metadata": {**resource["metadata"], "name": name}}
    command = RunFolder(path).command_line
    return build_row(named, utc_now(), key=key, place="this machine", command=command, under_way=in_use)


@dataclass
class _OpenedJob(ClusterData):
    """What is watched of an opened job. ``read_at``: when a page last needed it."""

    read_at: float = 0.0
    version: int = 0


class ClusterJobs(Source):
    """The jobs of a namespace, or of all, by watches: of the jobs always, of Events and pods of opened jobs."""

    kind: ClassVar = "job"

    def __init__(self, api: Api, *, everywhere: bool, on_change: Changed = lambda: None) -> None:
        self._api = api
        self._namespace = None if everywhere else api.namespace
        self._on_change = on_change
        self._lock = threading.Lock()
        self._jobs: Jobs = {}
        self._entries: dict[str, tuple[object, Row]] = {}
        self._opened: dict[str, _OpenedJob] = {}

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
        """Return the rows of the jobs."""
        before = self._entries
        self._entries = {}
        for (namespace, name), job in self._jobs.items():
            key = f"job/{namespace}/{name}"
            stamp = job["metadata"].get("resourceVersion"), time.monotonic() // _AGE_SECONDS
            entry = before.get(key)
            if entry is None or entry[0] != stamp:
                entry = stamp, build_row(job, utc_now(), key=key)
            self._entries[key] = entry
        return {key: row for key, (_, row) in self._entries.items()}

    def find(self, key: str) -> Job:
        """Return a job that the API server has listed. Raises: NotFound."""
        _, namespace, name = key.split("/", 2)
        resource = self._jobs.get((namespace, name))
        if resource is None:
            raise NotFound(f"job {name[:80]} does not exist in namespace {namespace[:80]}; it may have been deleted")
        return Job(ClusterBackend(self._api.within(namespace)), name, resource)

    def read_data(self, key: str, job: Job) -> ClusterData:
        """Return what the watches of a job have read. Raises: ClientError."""
        return self._open(key, job)

    def sign(self, key: str) -> object:
        """Return the versions of a job, its pods and its Events."""
        _, namespace, name = key.split("/", 2)
        job = self._jobs.get((namespace, name))
        opened = self._opened.get(key)
        if opened is not None:
            opened.read_at = time.monotonic()
        version = job["metadata"].get("resourceVersion") if job else None
        return version, opened.version if opened else 0, time.monotonic() // _AGE_SECONDS

    def renew(self, key: str) -> None:
        """Read the reports of the job's pods once, through the API server, as far as the user may."""
        job = self.find(key)
        opened = self._open(key, job)

        def read() -> None:
            opened.read_reports(self._api, job.resource)
            self._note_change(opened)

        threading.Thread(target=read, daemon=True).start()

    def follow_log(self, key: str) -> LogFollower:
        """Return the reader of the future lines of a job's pods. Raises: ClientError."""
        job = self.find(key)
        opened = self._open(key, job)
        api = self._api.within(job.resource["metadata"]["namespace"])
        source = PodLogs(api, job.name, None, None, None, since=1, silence_seconds=SILENCE_SECONDS)
        return LogFollower(replace(source, watched=lambda: opened.pods))

    def _note_change(self, opened: _OpenedJob) -> None:
        opened.version += 1
        self._on_change()

    def _open(self, key: str, job: Job) -> _OpenedJob:
        """Return what is watched of a job; start the watches at its first reading. Raises: ClientError."""
        with self._lock:
            opened = self._opened.get(key)
            if opened is not None:
                opened.read_at = time.monotonic()
                return opened
            opened = self._opened[key] = _OpenedJob(read_at=time.monotonic())
        opened.lease = find_lease_renewal(self._api)
        for kind in ("pods", "events"):
            ready = threading.Event()
            threading.Thread(target=self._follow, args=(key, opened, job, kind, ready), daemon=True).start()
            ready.wait(1.0)
        return opened

    def _follow(
        self, key: str, opened: _OpenedJob, job: Job, kind: Literal["pods", "events"], ready: threading.Event
    ) -> None:
        """Watch the pods or the Events of an opened job, until nobody has read it for a minute."""
        metadata = job.resource["metadata"]
        api = self._api.within(metadata["namespace"])
        path = api_path("v1", kind, api.namespace)
        query = {"labelSelector": f"{constants.LABEL_JOB_NAME}={job.name}"} if kind == "pods" else {}

        def is_ours(item: Object) -> bool:
            return kind == "pods" or is_about(item, metadata)

        while time.monotonic() - opened.read_at < _VIEW_SECONDS:
            until = time.monotonic() + _VIEW_SECONDS
            try:
                for found in follow_objects(
                    api, path, query, lambda: api.request("GET", path, query), keep=is_ours, until=until
                ):
                    items = list(found.values())[-_MOST_OBJECTS:]
                    if kind == "pods":
                        opened.pods = items
                    else:
                        opened.events = sorted(items, key=read_event_time)
                    opened.problems[kind] = ""
                    ready.set()
                    self._note_change(opened)
            except (ClientError, ValueError, LookupError, TypeError) as error:
                opened.problems[kind] = f"The {kind} of this job cannot be read: {error}"
                ready.set()
                self._note_change(opened)
                time.sleep(_RETRY_SECONDS)
        self._opened.pop(key, None)
