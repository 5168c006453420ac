"""Read the logs of all pods of a job, or of a run on this machine, as one stream of lines with ranks."""

import heapq
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from ddp_cli.client.api import Api, api_path, get_job, list_pods
from ddp_cli.client.errors import ApiError, ClientError, NotFound
from ddp_cli.client.runs import read_job
from ddp_cli.local.folder import RunFolder
from ddp_cli.local.screen import LogFile, Tail, find_logs, split_rank
from ddp_operator.api import constants
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.kubeobjects import find_trainer
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.status import ENDED_PHASES
from ddp_operator.features import SCHEMA
from ddp_operator.manifests.template import resolve_template
from ddp_pod.contract.numbers import parse_count
from ddp_pod.contract.plain_files import open_plain
from ddp_pod.contract.plan import decode_plan

_POLL_SECONDS: Final = 1.0
_WATCH_DELAY: Final = 0.2
_FILE_SECONDS: Final = 0.2
_FOLLOW_SECONDS: Final = 3600.0  # silence of a rank after which the stream is reopened
_END_SECONDS: Final = 15.0  # silence of an ended job's pods, whose nodes may be lost, after which no line is awaited
TAIL_BYTES: Final = 8 << 20
"""Of a log whose last lines are read, at most this much is read."""


@dataclass(frozen=True, slots=True)
class LogPod:
    """A pod whose log can be read. ``launcher``: the words that start its launcher; none for a run on this machine."""

    name: str
    container: str
    attempt: int
    node: int
    nproc: int
    launcher: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log, with the kubelet's time (RFC 3339 in UTC). ``run``: of `ddp dev`."""

    time: str
    prefix: str
    text: str
    run: int = 0
    attempt: int = 1

    def __str__(self) -> str:
        return f"[{self.prefix}] {self.text}"

    @property
    def order(self) -> str:
        """The time without Z, which sorts after digits; fractions have no trailing zeros."""
        return self.time.removesuffix("Z")


@dataclass(frozen=True)
class PodLogs:
    """The logs of a job in a cluster. ``since``: read only lines of the last seconds, and future ones.

    ``silence_seconds``: the silence of a followed pod after which its stream is opened again. ``watched`` returns the
    pods, if a watch of the reader has them. ``left``: set by a reader who needs no more lines.
    """

    api: Api
    name: str
    node: int | None
    attempt: int | None
    tail: int | None
    since: int | None = None
    silence_seconds: float = _FOLLOW_SECONDS
    watched: Callable[[], Sequence[Mapping[str, Any]]] | None = None
    left: threading.Event = field(default_factory=threading.Event)

    def pods(self) -> list[LogPod]:
        """Return the pods whose container has started, by attempt and index."""
        started = [log_pod(pod) for pod in self._read_pods() if has_log(pod)]
        selected = [pod for pod in started if self.node in (None, pod.node) and self.attempt in (None, pod.attempt)]
        return sorted(selected, key=lambda pod: (pod.attempt, pod.node, pod.name))

    def is_over(self) -> bool:
        """Return whether the job has ended or was deleted, so that no more pods will start."""
        try:
            return (get_job(self.api, self.name).get("status") or {}).get("phase") in ENDED_PHASES
        except NotFound:
            return True

    def lines(self, pod: LogPod, *, follow: bool) -> Iterator[Line]:
        """Yield the lines of a pod, none if it was deleted; ``follow``: also future ones. Raises: ClientError.

        If the stream breaks while the pod runs, reading resumes after the last line.
        """
        query = {"container": pod.container, "timestamps": "true", "follow": str(follow).lower()}
        if self.tail is not None:
            query["tailLines"] = str(self.tail)
            if not follow:
                query["limitBytes"] = str(TAIL_BYTES)
        if self.since is not None:
            query["sinceSeconds"] = str(self.since)
        path = api_path("v1", "pods", self.api.namespace, pod.name, "log")
        last = ""
        while True:
            is_broken = False
            try:
                for text in self.api.lines(path, query, timeout=self.silence_seconds if follow else 30.0):
                    line = split_line(text, pod)
                    if line.order > last:
                        last = line.order
                        yield line
            except ApiError as error:
                if error.status in (400, 404):  # not started yet, or already deleted
                    return
                if not follow or not _may_recover(error):
                    raise
                is_broken = True
            if not follow or not self._continues(pod, is_broken=is_broken):
                return
            if last:
                query = {name: value for name, value in query.items() if name not in ("tailLines", "sinceSeconds")}
                query["sinceTime"] = f"{last[:19]}Z"

    def _continues(self, pod: LogPod, *, is_broken: bool) -> bool:
        """Return whether a pod may write more lines. A pod on a lost node seems to run until it is deleted."""
        if self.left.is_set() or (is_broken and self.is_over()):
            return False
        if is_broken:
            time.sleep(_POLL_SECONDS)
        elif self.watched is not None:
            self.left.wait(_WATCH_DELAY)  # a watch tells of an end later than the stream
        return self._is_running(pod)

    def _is_running(self, pod: LogPod) -> bool:
        return any(
            entry["metadata"]["name"] == pod.name and (entry.get("status") or {}).get("phase") == "Running"
            for entry in self._read_pods()
        )

    def _read_pods(self) -> Sequence[Mapping[str, Any]]:
        return list_pods(self.api, self.name) if self.watched is None else self.watched()


class RunLogs:
    """The logs of a run on this machine. ``left``: set by a reader who needs no more lines."""

    def __init__(self, folder: RunFolder, node: int | None, attempt: int | None, tail: int | None) -> None:
        self._folder = folder
        self._node = node
        self._attempt = attempt
        self._tail = tail
        self._starts: dict[str, int] = {}
        self.left = threading.Event()
        self.nproc = _count_ranks(read_job(folder))

    def pods(self) -> list[LogPod]:
        """Return the pods that have a log, by attempt and index."""
        return [
            LogPod(str(file.path), "", file.attempt, file.node, self.nproc)
            for file in find_logs(self._folder.logs)
            if self._node in (None, file.node) and self._attempt in (None, file.attempt)
        ]

    def skip_written(self) -> None:
        """Leave out the complete lines that the logs have now."""
        self._starts = {pod.name: find_tail(Path(pod.name), 0, self._folder.open_file) for pod in self.pods()}

    def is_over(self) -> bool:
        """Return whether the run has ended, or its reader has left."""
        return self.left.is_set() or not self._folder.in_use

    def lines(self, pod: LogPod, *, follow: bool) -> Iterator[Line]:
        """Yield the lines of a pod; ``follow``: also future ones, until the run has ended."""
        texts: list[str] = []
        file = LogFile(pod.attempt, pod.node, Path(pod.name))
        reader = Tail(lambda: [file], lambda _, line: texts.append(line), self._folder.open_file)
        limit = self._tail  # of the lines written so far
        if limit is not None:
            reader.skip_to(file, find_tail(file.path, limit, self._folder.open_file))
        elif pod.name in self._starts:
            reader.skip_to(file, self._starts[pod.name])
        over = False
        while not over:
            over = not follow or self.is_over()
            has_more = True
            while has_more:
                has_more = reader.read_chunk(file)
                if has_more and limit is not None:
                    continue
                start = 0 if limit is None else max(0, len(texts) - limit)
                yield from (split_line(f" {text}", pod) for text in texts[start:])
                texts.clear()
            limit = None
            if not over:
                time.sleep(_FILE_SECONDS)


class LogSource(Protocol):
    """The logs of a job's pods."""

    def pods(self) -> list[LogPod]:
        """Return the pods that have a log, by attempt and index."""
        ...

    def is_over(self) -> bool:
        """Return whether no more pods will start."""
        ...

    def lines(self, pod: LogPod, *, follow: bool) -> Iterator[Line]:
        """Yield the lines of a pod; ``follow``: also future ones. Raises: ClientError."""
        ...


def read_newest(source: LogSource) -> Iterator[Line]:
    """Yield the lines of the newest attempt so far, in the order of their times. Raises: ClientError."""
    yield from read_pods(source, find_newest(source))


def find_newest(source: LogSource) -> list[LogPod]:
    """Return the pods of the newest attempt that has a log. Raises: ClientError."""
    pods = source.pods()
    last = max((pod.attempt for pod in pods), default=0)
    return [pod for pod in pods if pod.attempt == last]


def read_pods(source: LogSource, pods: Iterable[LogPod]) -> Iterator[Line]:
    """Yield the lines of these pods so far, in the order of their times. Raises: ClientError."""
    streams = [source.lines(pod, follow=False) for pod in pods]
    yield from heapq.merge(*streams, key=lambda line: line.order)


def find_tail(path: Path, lines: int, open_file: Callable[[str, int], int] = open_plain) -> int:
    """Return the offset of a file's last complete lines; 0 if it is not readable. Reads ``TAIL_BYTES`` at most."""
    try:
        with open(path, "rb", opener=open_file) as stream:
            start = max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES)
            stream.seek(start)
            data = stream.read(TAIL_BYTES)
    except OSError:
        return 0
    end = len(data)
    for _ in range(lines + 1):  # the last is the newline before the first of them
        end = data.rfind(b"\n", 0, end)
        if end < 0:
            return start
    return start + end + 1


class Follower:
    """Reads the logs of all pods into one queue: a thread for each pod, and one that looks for new pods."""

    def __init__(self, source: LogSource, sleep: Callable[[float], None] = time.sleep) -> None:
        self._source = source
        self._sleep = sleep
        self._readers: dict[str, threading.Thread] = {}
        self._lines: queue.Queue[Line | BaseException | None] = queue.Queue(maxsize=10_000)
        self._last_line = time.monotonic()

    def lines(self) -> Iterator[Line]:
        """Yield the lines of all pods, also of pods that start later, until the job has ended. Raises: ClientError."""
        threading.Thread(target=self._watch, daemon=True).start()
        while (line := self._lines.get()) is not None:
            if isinstance(line, BaseException):
                raise line
            yield line

    def _watch(self) -> None:
        """Start readers until the job has ended and all of them have; then end the stream."""
        try:
            over = False
            while not over:
                over = self._source.is_over()  # read before the pods: the last one may start meanwhile
                self._start_readers()
                if not over:
                    self._sleep(_POLL_SECONDS)
            self._wait_for_readers()
            self._lines.put(None)
        except BaseException as error:
            self._lines.put(error)

    def _wait_for_readers(self) -> None:
        """Wait until the readers have ended, or none has read a line for some seconds: that of a lost node may hang."""
        self._last_line = time.monotonic()
        for reader in self._readers.values():
            while reader.is_alive() and time.monotonic() - self._last_line < _END_SECONDS:
                reader.join(_POLL_SECONDS)

    def _start_readers(self) -> None:
        for pod in self._source.pods():
            if pod.name not in self._readers:
                reader = threading.Thread(target=self._read, args=(pod,), daemon=True)
                self._readers[pod.name] = reader
                reader.start()

    def _read(self, pod: LogPod) -> None:
        try:
            for line in self._source.lines(pod, follow=True):
                self._lines.put(line)
                self._last_line = time.monotonic()
        except ClientError as error:
            self._lines.put(error)


def _may_recover(error: ApiError) -> bool:
    """Return whether the stream broke, or the API server does not reach the pod's node."""
    return error.status is None or error.status >= 500


def list_running_pods(api: Api, name: str) -> list[LogPod]:
    """Return the pods of a job that run and are not being deleted, by attempt and index. Raises: ClientError."""
    alive = [pod for pod in list_pods(api, name) if "deletionTimestamp" not in pod["metadata"]]
    pods = [log_pod(pod) for pod in alive if (pod.get("status") or {}).get("phase") == "Running"]
    return sorted(pods, key=lambda pod: (pod.attempt, pod.node))


def log_pod(pod: Mapping[str, Any]) -> LogPod:
    """Return what identifies a pod's log."""
    metadata = pod["metadata"]
    trainer = find_trainer(pod)
    env = {entry["name"]: entry.get("value", "") for entry in trainer.get("env") or ()}
    try:
        nproc = decode_plan(env.get(constants.ENV_LAUNCHER_CONFIG)).nproc_per_node
    except ValueError:
        nproc = 1  # another version of the operator created the pod
    return LogPod(
        name=metadata["name"],
        container=trainer["name"],
        attempt=_number((metadata.get("labels") or {}).get(constants.LABEL_ATTEMPT), 1),
        node=_number((metadata.get("annotations") or {}).get(constants.ANNOTATION_COMPLETION_INDEX), 0),
        nproc=nproc,
        launcher=tuple(trainer.get("command") or ())[:-1],  # the last word is the subcommand
    )


def _count_ranks(job: Mapping[str, Any]) -> int:
    """Return the number of ranks in each pod of a run."""
    try:
        return resolve_template(parse_resource(job, SCHEMA)).nproc
    except InvalidManifest:
        return 1  # another version of ddp ran it, with other rules


def split_line(text: str, pod: LogPod) -> Line:
    """Return a line of a pod's log with the rank that wrote it, or with all ranks of the pod."""
    moment, _, message = text.partition(" ")
    rank, content = split_rank(message, pod.node, pod.nproc)
    if rank is not None:
        return Line(moment, f"rank {rank}", content, attempt=pod.attempt)
    first = pod.node * pod.nproc
    return Line(moment, f"ranks {first}-{first + pod.nproc - 1}", content, attempt=pod.attempt)


def has_log(pod: Mapping[str, Any]) -> bool:
    """Return whether a container of a pod has started."""
    states = [status.get("state") or {} for status in (pod.get("status") or {}).get("containerStatuses") or ()]
    return any("running" in state or "terminated" in state for state in states)


def _number(text: Any, default: int) -> int:
    number = parse_count(text)
    return default if number is None else number
