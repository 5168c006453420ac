"""Records of ended jobs: find the newest one at a place that the user names, and read it as a job of a cluster."""

import base64
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ddp_cli.client.api import Api, Object, api_path, job_path
from ddp_cli.client.claim import run_on_claim
from ddp_cli.client.cluster_backend import ClusterBackend
from ddp_cli.client.errors import ApiError, ClientError, NotFound
from ddp_cli.client.job import Job
from ddp_cli.client.logs import Line, LogPod, PodLogs, split_line
from ddp_operator.api.record import MAX_STORED, Record, build_pattern, decode_record

READER_IMAGE: Final = "docker.io/library/busybox:1.37"
"""The default image of the temporary pod that reads a claim: sh, head and base64."""
_CLAIM: Final = "claim/"
_SHOW: Final = (
    'cd "$1" && for file in $2; do last=$file; done; if [ -f "$last" ]; then head -c "$3" "$last" | base64; fi'
)


def open_record(place: str, name: str, namespace: str, connect: Callable[[], Api], *, image: str = READER_IMAGE) -> Job:
    """Return the newest job of this name as its record states it. An empty namespace stands for all.

    ``place``: a URL, a folder, or claim/NAME[/PATH]; ``connect`` is called, and ``image`` used, for a claim only.
    Raises: NotFound, ClientError.
    """
    try:
        pattern = build_pattern(namespace, name)
        data = (
            _read_claim(connect(), place, pattern, image) if place.startswith(_CLAIM) else _read_newest(place, pattern)
        )
        if not data:
            raise NotFound(f"{place} has no record of {name} ({pattern}); check --history and the namespace")
        record = decode_record(data)
    except (OSError, ValueError) as error:
        raise ClientError(f"{place}: the record of {name} cannot be read: {error}") from None
    return Job(RecordBackend(record), name, record.resource)


def _read_newest(place: str, pattern: str) -> bytes:
    """Return the bytes of the newest file, empty if there is none. Raises: ClientError, OSError."""
    folder = place.removeprefix("file://")
    if "://" not in folder:
        paths = sorted(Path(folder).glob(pattern), key=lambda path: path.name)
        if not paths:
            return b""
        with paths[-1].open("rb") as file:
            return file.read(MAX_STORED + 1)
    try:
        system, root = importlib.import_module("fsspec").core.url_to_fs(place)
        urls = sorted(system.glob(f"{root.rstrip('/')}/{pattern}"), key=os.path.basename)
        return bytes(system.cat_file(urls[-1], start=0, end=MAX_STORED + 1)) if urls else b""
    except ImportError as error:
        raise ClientError(f"{place} needs the Python package fsspec and its plug-in ({error}); install them") from None
    except Exception as error:  # each plug-in raises different types
        raise ClientError(f"{place} cannot be read: {type(error).__name__}: {error}") from None


def _read_claim(api: Api, place: str, pattern: str, image: str) -> bytes:
    """Return the bytes of the newest file on a claim, empty if there is none. Raises: ClientError, ValueError."""
    claim, _, folder = place.removeprefix(_CLAIM).partition("/")
    command = ["sh", "-c", _SHOW, "sh", f"./{folder}", pattern, str(MAX_STORED + 1)]
    return base64.b64decode(run_on_claim(api, claim, image, command, 2 * MAX_STORED))


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
    """One job, from its record."""

    def __init__(self, record: Record) -> None:
        super().__init__(RecordApi(record))
        self._record = record

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
