"""Records of ended jobs: find the newest one at a place that the user names, and read it as a job of a cluster."""

import base64
import heapq
import importlib
import os
import shlex
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from ddp_cli.client.api import Api, Object, api_path, job_path
from ddp_cli.client.claim import run_on_claim
from ddp_cli.client.cluster_backend import ClusterBackend
from ddp_cli.client.errors import ApiError, ClientError, NotFound
from ddp_cli.client.job import Job
from ddp_cli.client.logs import Line, LogPod, PodLogs, split_line
from ddp_operator.api.record import MAX_STORED, Record, build_pattern, decode_record
from ddp_pod.contract.plain_files import open_plain

READER_IMAGE: Final = "docker.io/library/busybox:1.37"
"""The default image of the temporary pod that reads a claim: sh, head and base64."""
_CLAIM: Final = "claim/"
_MOST_OF_CLAIM: Final = 4
"""A kubelet keeps the last 10 MiB of a log by default: so many records of the largest size pass it."""
# Prints the newest files first: the output is cut at its end.
_SHOW: Final = """
cd "$1" || exit 0
limit=$3
most=$4
set -- $2
place=$#
while [ "$place" -gt 0 ] && [ "$most" -gt 0 ]; do
    eval "file=\\${$place}"
    if [ -f "$file" ]; then echo "$file:"; head -c "$limit" "$file" | base64; fi
    place=$((place - 1))
    most=$((most - 1))
done
"""


class StoredRecord(NamedTuple):
    """The file of a record. ``problem``: why it cannot be read."""

    path: str
    data: bytes = b""
    problem: str = ""

    def decode(self) -> Record:
        """Return the record. Raises: ClientError."""
        try:
            if self.problem:
                raise ValueError(self.problem)
            return decode_record(self.data)
        except ValueError as error:
            raise ClientError(f"the record {self.path} cannot be read: {error}") from None


def open_record(place: str, name: str, namespace: str, connect: Callable[[], Api], *, image: str = READER_IMAGE) -> Job:
    """Return the newest job of this name as its record states it. An empty namespace stands for all.

    ``place``: a URL, a folder, or claim/NAME[/PATH]; ``connect`` is called, and ``image`` used, for a claim only.
    Raises: NotFound, ClientError.
    """
    stored = next(read_records(place, namespace, name, connect, image=image), None)
    if stored is None:
        pattern = build_pattern(namespace, name)
        raise NotFound(f"{place} has no record of {name} ({pattern}); check --history and the namespace")
    record = stored.decode()
    return Job(RecordBackend(record, place), name, record.resource)


def is_claim(place: str) -> bool:
    """Return whether a temporary pod reads this place."""
    return place.startswith(_CLAIM)


def read_records(
    place: str,
    namespace: str,
    name: str,
    connect: Callable[[], Api],
    *,
    image: str = READER_IMAGE,
    most: int = 1,
    known: Container[str] = (),
) -> Iterator[StoredRecord]:
    """Yield the newest records, the newest first, without those of ``known`` paths, as ``open_record`` finds them.

    An empty namespace or name stands for all. Raises: ClientError.
    """
    try:
        pattern = build_pattern(namespace, name)
        if is_claim(place):
            yield from _read_claim(connect(), place, pattern, image, most)
        elif "://" in place.removeprefix("file://"):
            yield from _read_url(place, pattern, most, known)
        else:
            yield from _read_folder(Path(place.removeprefix("file://")), pattern, most, known)
    except (OSError, ValueError) as error:
        raise ClientError(f"{place} cannot be read: {error}") from None


def _read_folder(folder: Path, pattern: str, most: int, known: Container[str]) -> Iterator[StoredRecord]:
    """Yield the newest files. Users of other jobs may write to the folder."""
    for path in heapq.nlargest(most, folder.glob(pattern), key=lambda path: path.name):
        short = str(path.relative_to(folder))
        if short in known:
            continue
        try:
            with open(path, "rb", opener=open_plain) as file:
                yield StoredRecord(short, file.read(MAX_STORED + 1))
        except OSError as error:
            yield StoredRecord(short, problem=error.strerror or str(error))


def _read_url(place: str, pattern: str, most: int, known: Container[str]) -> Iterator[StoredRecord]:
    try:
        system, root = importlib.import_module("fsspec").core.url_to_fs(place)
        root = root.rstrip("/")
        for url in heapq.nlargest(most, system.glob(f"{root}/{pattern}"), key=os.path.basename):
            short = url.removeprefix(f"{root}/")
            if short not in known:
                yield StoredRecord(short, bytes(system.cat_file(url, start=0, end=MAX_STORED + 1)))
    except ImportError as error:
        raise ClientError(f"{place} needs the Python package fsspec and its plug-in ({error}); install them") from None
    except Exception as error:  # each plug-in raises different types
        raise ClientError(f"{place} cannot be read: {type(error).__name__}: {error}") from None


def _read_claim(api: Api, place: str, pattern: str, image: str, most: int) -> Iterator[StoredRecord]:
    """Yield the newest files on a claim. Raises: ClientError, ValueError."""
    claim, _, folder = place.removeprefix(_CLAIM).partition("/")
    command = ["sh", "-c", _SHOW, "sh", f"./{folder}", pattern, str(MAX_STORED + 1), str(most)]
    limit = 2 * MAX_STORED * min(most, _MOST_OF_CLAIM)
    path = ""
    lines: list[str] = []
    for line in (*run_on_claim(api, claim, image, command, limit), ":"):
        if not line.endswith(":"):
            lines.append(line)
            continue
        if path:
            yield _decode_output(path, "".join(lines))
        path = line.removesuffix(":")
        lines = []


def _decode_output(path: str, text: str) -> StoredRecord:
    try:
        return StoredRecord(path, base64.b64decode(text))
    except ValueError:
        return StoredRecord(path, problem="the output of the pod that reads the claim was cut")


class RecordApi(Api):
    """Responds to reading calls as the API server did when the job ended."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.namespace = self.home = str(record.resource["metadata"]["namespace"])

    def request(
        self,
        method: str,
        path: str,
        query: Any = None,
        body: Any = None,
        content_type: str = "",
    ) -> Object:
        """Return the resource or its Events. Raises: ApiError for all else."""
        name = self._record.resource["metadata"]["name"]
        if (method, path) == ("GET", job_path(self.namespace, name)):
            return self._record.resource
        if path == api_path("v1", "events", self.namespace):
            return {"items": list(self._record.events)}
        raise ApiError(f"{name} was deleted, and its record has no {path}", 404)


class RecordBackend(ClusterBackend):
    """One job, from its record at the place that the user named."""

    def __init__(self, record: Record, place: str) -> None:
        super().__init__(RecordApi(record))
        self._record = record
        self._place = place

    def argument(self, name: str) -> str:
        """Return the name with the options that find the record."""
        return f"{name} -n {self.api.namespace} --history {shlex.quote(self._place)}"

    def logs(self, name: str, *, node: int | None, attempt: int | None, tail: int | None) -> PodLogs:
        """Return the last lines of its pods."""
        return RecordLogs(self.api, name, node, attempt, tail, record=self._record)


@dataclass(frozen=True, kw_only=True)
class RecordLogs(PodLogs):
    """The last lines of a job in its record."""

    record: Record

    def pods(self) -> list[LogPod]:
        """Return the pods with lines. Raises: NotFound with the reason, if there are none."""
        if not self.record.logs:
            raise NotFound(
                f"the record of {self.name} has no lines of a log: {self.record.note or 'no pod had started'}"
            )
        pods = [LogPod(log.pod, "", log.attempt, log.node, log.nproc) for log in self.record.logs]
        return [pod for pod in pods if self.node in (None, pod.node) and self.attempt in (None, pod.attempt)]

    def is_over(self) -> bool:
        """Return True: the job has ended."""
        return True

    def lines(self, pod: LogPod, *, follow: bool) -> Iterator[Line]:
        """Yield the lines of a pod."""
        texts = [text for log in self.record.logs if log.pod == pod.name for text in log.text.splitlines()]
        start = 0 if self.tail is None else max(0, len(texts) - self.tail)
        yield from (split_line(text, pod) for text in texts[start:])
