"""The jobs that were deleted, from their records at the place that the user names (``--history``)."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import PurePath
from typing import ClassVar, Final

from ddp_cli.client.api import Api
from ddp_cli.client.errors import ClientError, NotFound
from ddp_cli.client.job import Job
from ddp_cli.client.records import RecordBackend, StoredRecord, is_claim, read_records
from ddp_cli.features.ui.rows import Attention, Row, build_row
from ddp_cli.features.ui.sources import Source, build_key
from ddp_operator.api.kubeobjects import utc_now

_MOST_RECORDS: Final = 200
_MOST_BYTES: Final = 8 << 20
"""Of all records together, compressed; the oldest beyond it are left out."""
_AGAIN_SECONDS: Final = 60.0


class RecordedJobs(Source):
    """The deleted jobs of a namespace, or of all (empty). A claim is read once, because a temporary pod reads it."""

    kind: ClassVar = "record"

    def __init__(
        self, place: str, namespace: str, connect: Callable[[], Api], image: str, on_change: Callable[[], None]
    ) -> None:
        self._place = place
        self._namespace = namespace
        self._connect = connect
        self._image = image
        self._on_change = on_change
        self._stored: dict[str, StoredRecord] = {}
        self._rows: dict[str, Row] = {}

    def start(self) -> None:
        """Read the records until the process ends."""
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        self.read()
        while not is_claim(self._place):
            time.sleep(_AGAIN_SECONDS)
            self.read()

    def read(self) -> None:
        """Read the records that are new."""
        known = {record.path for record in self._stored.values()}
        stored = dict(self._stored)
        size = 0
        try:
            for record in read_records(
                self._place, self._namespace, "", self._connect, image=self._image, most=_MOST_RECORDS, known=known
            ):
                stored[_find_key(record.path)] = record
                size += len(record.data)
                if size > _MOST_BYTES:
                    break
            self.problem = ""
        except ClientError as error:
            self.problem = f"Records of deleted jobs: {error}"
        newest = sorted(stored, key=lambda key: key.rpartition("/")[2], reverse=True)[:_MOST_RECORDS]
        sizes = accumulate(len(stored[key].data) for key in newest)
        self._stored = {key: stored[key] for key, size in zip(newest, sizes, strict=True) if size <= _MOST_BYTES}
        self._rows = {key: self._rows.get(key) or self._build_row(key, record) for key, record in self._stored.items()}
        self._on_change()

    def refresh(self) -> Mapping[str, Row]:
        """Return the rows of the records."""
        return self._rows

    def _build_row(self, key: str, record: StoredRecord) -> Row:
        try:
            row = build_row(record.decode().resource, utc_now(), key=key)
        except ClientError as error:
            path = PurePath(record.path)
            row = Row(key, path.name, path.parent.name, reason=str(error))
        return replace(row, place=f"{row.place}, record", attention=Attention.DELETED)

    def find(self, key: str) -> Job:
        """Return a deleted job as its record states it. Raises: ClientError."""
        stored = self._stored.get(key)
        if stored is None:
            raise NotFound(f"{self._place} has no record {key.rpartition('/')[2][:80]}")
        record = stored.decode()
        return Job(RecordBackend(record, self._place), record.resource["metadata"]["name"], record.resource)

    def sign(self, key: str) -> object:
        """Return what never changes: a record does not."""
        return key in self._stored


def _find_key(path: str) -> str:
    """Return the key of a row: its namespace and the name of its file."""
    file = PurePath(path)
    return build_key("record", file.parent.name, file.name.removesuffix(".json.gz"))
