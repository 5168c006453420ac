"""The record of an ended job, which outlives it: its resource, its Events and the last lines of its ranks.

Whoever may write to the place of the records controls their content, so a reader bounds and checks all of it.
"""

import base64
import gzip
import re
import zlib
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.nesting import limit_nesting

MAX_ARGUMENT: Final = 120 << 10
"""Characters of an encoded record. It is an argument of a container, and Linux starts no program with 128 KiB."""
MAX_TEXT: Final = 512 << 10
"""Characters of the log lines of all pods together."""
MAX_STORED: Final = 1 << 20
"""Bytes of a record that a reader accepts, and a sixteenth of the JSON in it."""
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,62}[a-z0-9])?")
_FOLDER: Final = "ddp-history"  # has a folder of records for each namespace


class PodLog(msgspec.Struct, frozen=True, kw_only=True):
    """The last lines of one pod, each after the kubelet's time."""

    pod: str
    attempt: int
    node: int
    nproc: int
    text: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """``note``: why lines of some pods are missing; empty if none are."""

    resource: dict[str, Any]
    events: tuple[dict[str, Any], ...] = ()
    logs: tuple[PodLog, ...] = ()
    note: str = ""


def name_record(job: DDPTrainingJob) -> str:
    """Return the path of an ended job's record in its place."""
    assert job.status.completion_time is not None
    ended = re.sub("[-:]", "", format_time(job.status.completion_time))  # so that the names sort by time
    return f"{_FOLDER}/{job.namespace}/{ended}-{job.name}-{job.uid[:8]}.json.gz"


def build_pattern(namespace: str, name: str) -> str:
    """Return the pattern of the paths of records. An empty namespace or name stands for all. Raises: ValueError."""
    if any(text and not _NAME.fullmatch(text) for text in (name, namespace)):
        raise ValueError(f"{name}: not the name of a job; records have those of metadata.name and metadata.namespace")
    return f"{_FOLDER}/{namespace or '*'}/{'?' * 8}T{'?' * 6}Z-{name or '*'}-{'?' * 8}.json.gz"


def encode_record(record: Record) -> str:
    """Return a record for the argument of a container, with as many of the last lines as fit. Raises: InvalidManifest.

    Logs compress to about a sixth, so few records lose lines.
    """
    share = max((len(log.text) for log in record.logs), default=0)
    while True:
        data = base64.b64encode(gzip.compress(msgspec.json.encode(record), mtime=0)).decode()
        if len(data) <= MAX_ARGUMENT:
            return data
        if not share and not record.events:
            message = "spec and status are too large for a record; shorten spec.template"
            raise InvalidManifest([FieldError("spec", message)])
        share //= 2
        logs = tuple(msgspec.structs.replace(log, text=keep_end(log.text.splitlines(), share)) for log in record.logs)
        note = record.note or "the record had no room for more lines"
        record = msgspec.structs.replace(
            record, logs=logs if share else (), events=record.events if share else (), note=note
        )


def keep_end(lines: Iterable[str], limit: int) -> str:
    """Return the last whole lines with at most ``limit`` characters."""
    kept: list[str] = []
    for line in reversed(list(lines)):
        limit -= len(line) + 1
        if limit < 0:
            break
        kept.append(line)
    return "\n".join(reversed(kept))


def decode_record(data: bytes) -> Record:
    """Return the record in the bytes of a file. Raises: ValueError."""
    limit = 16 * MAX_STORED
    try:
        stream = zlib.decompressobj(wbits=31)
        text = stream.decompress(data[: MAX_STORED + 1], limit)
        if len(data) > MAX_STORED or stream.unconsumed_tail:
            raise ValueError("it is too large")
        record = msgspec.json.decode(limit_nesting(text), type=Record)
        metadata = record.resource["metadata"]
        if not isinstance(record.resource["spec"]["template"]["spec"], dict):
            raise ValueError("its resource has no pod template")
        if not all(map(_NAME.fullmatch, (metadata["namespace"], metadata["name"]))):
            raise ValueError("its names are none of Kubernetes")
        str(metadata["uid"])
    except (zlib.error, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return record
