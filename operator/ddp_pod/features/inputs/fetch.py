"""The subcommand ``fetch``: download a job's inputs to a claim or a node cache before the pods with GPUs start.

Each input has a folder ``ddp-inputs/KEY`` there, with its files in ``data`` and their metadata in ``record.json``. The
folder is filled under a temporary name and then renamed, so a folder with that name is always complete and never
fetched again. The next fetch resumes an interrupted one. With a lock, one pod fetches while its peers wait.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, BinaryIO

from ...base.files import log, read_json, write_json
from ...contract.failure_table import UNKNOWN, USER_ERROR
from ...contract.names import (
    ENV_COMPLETION_INDEX,
    ENV_INPUTS,
    ENV_METRICS_PORT,
    ENV_PORT_FILE,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_RETRYABLE,
    EXIT_USER_ERROR,
    INPUTS_FOLDER,
)
from ...contract.pod_end import PodEnd
from ...contract.processes import STOP_SIGNALS
from ...contract.progress import RankProgress
from ...contract.report import PodReport
from ...failures.termination import finish
from ...progress.metrics import MetricsEndpoint
from ...progress.rank_progress import RankReader
from ...transfer.sources import FetchError, File, InputSource, InputState, explain, hide_query, open_source

_PARALLEL = 8
_CHUNK = 1 << 20
_MOST_FAILURES = 8
"""Attempts in a row without progress, over about two minutes, after which the pod exits. Its Job starts another."""
_LONGEST_PAUSE = 30.0
_SPARE_BYTES = 16 << 20  # for records and folders
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REPORT_SECONDS = 10.0
_LOCK_SECONDS = 1.0  # between two attempts to lock


def main(signals: list[int]) -> int:
    """Fetch the inputs in the environment. ``signals``: those received so far. Returns the exit code."""
    if signals:
        return EXIT_PREEMPTED
    os.umask(0o002)  # users of other jobs share the claim
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(EXIT_PREEMPTED))  # the next fetch resumes

    inputs = [InputState(**fields) for fields in json.loads(os.environ[ENV_INPUTS])]
    _serve_progress(inputs)
    index = os.environ.get(ENV_COMPLETION_INDEX, "")
    end = PodEnd(pod_index=int(index) if index.isdigit() else 0, exit_code=EXIT_OK, time=time.time())
    failed = _fetch_all(inputs)
    if failed is not None:
        item, error = failed
        item.phase = "Failed"
        item.reason = error.reason
        item.message = str(error)
        code = EXIT_RETRYABLE if error.retryable else EXIT_USER_ERROR
        end = dataclasses.replace(
            end,
            category=UNKNOWN.name if error.retryable else USER_ERROR.name,
            container_exit_code=code,
            exit_code=code,
            message=f"input {item.name}: {error}",
            remedy=error.hint,
        )
    return finish(dataclasses.replace(end, inputs=tuple(item.report() for item in inputs)))


def _serve_progress(inputs: Sequence[InputState]) -> None:
    """Serve the progress of the inputs on the pod's metrics port; without the port, fetch without a report."""

    def build_report(ranks: Sequence[RankProgress]) -> PodReport:
        return PodReport(inputs=tuple(item.report() for item in inputs))

    endpoint = MetricsEndpoint(RankReader(""), build_report)
    with contextlib.suppress(OSError):
        port = endpoint.serve(int(os.environ.get(ENV_METRICS_PORT) or 0))
        if os.environ.get(ENV_PORT_FILE):
            write_json(os.environ[ENV_PORT_FILE], port)


def _fetch_all(inputs: Sequence[InputState]) -> tuple[InputState, FetchError] | None:
    """Fetch all inputs. Returns the first that failed, with its error."""
    fetches = [Fetch(item) for item in inputs]
    # List all inputs first: a missing or forbidden one fails the pod before any download takes hours.
    work: list[tuple[Fetch, Callable[[], None]]] = [(fetch, fetch.find) for fetch in fetches]
    work += [(fetch, fetch.run) for fetch in fetches]
    for fetch, step in work:
        try:
            step()
        except Exception as error:  # each fsspec plug-in raises different types; explain() describes any
            return fetch.item, explain(error, fetch.item.url)
    return None


class Fetch:
    """The download of one input."""

    def __init__(self, item: InputState) -> None:
        self.item = item
        self._base = os.path.join(item.root, INPUTS_FOLDER)
        self._target = os.path.join(self._base, item.key)
        self._part = f"{self._target}.part"
        self._source = InputSource("")
        self._files: list[File] = []
        self._stop = threading.Event()
        self._count = threading.Lock()
        self._reported = time.monotonic()

    def find(self) -> None:
        """List the input's files, unless the input was fetched before. Raises: FetchError."""
        item = self.item
        with self._writing():
            os.makedirs(self._base, exist_ok=True)
        if self._is_fetched():
            return
        with _credentials(item.secret):
            self._retry(self._list)
        if not self._files:
            raise FetchError("NotFound", f"{hide_query(item.url)}: the folder is empty", "correct the URL")
        if item.checksum and len(self._files) != 1:
            message = f"{hide_query(item.url)}: a checksum applies to one file, but the URL has {len(self._files)}"
            raise FetchError("Unsupported", message, "remove spec.inputs[].checksum")
        is_known = all(file.size is not None for file in self._files)
        item.total = sum(file.size or 0 for file in self._files) if is_known else None

    def run(self) -> None:
        """Fetch the files that ``find`` listed. Raises: FetchError."""
        if self.item.phase == "Fetched":
            return
        with self._lock():
            if not self._is_fetched():
                with _credentials(self.item.secret):
                    self._fetch()

    def _is_fetched(self) -> bool:
        """Return whether the input's folder exists and, if so, take its metadata."""
        record = read_json(os.path.join(self._target, "record.json"))
        if not record:
            return False
        item = self.item
        item.phase = "Fetched"
        item.bytes = record["bytes"]
        item.total = record["bytes"]
        item.etag = record["etag"]
        item.reason = ""
        item.message = ""
        log(f"input {item.name}: {_format_size(item.bytes)} in {self._target}")
        return True

    def _list(self) -> None:
        self._source = open_source(self.item.url)
        self._files = self._source.list()

    def _fetch(self) -> None:
        item = self.item
        item.phase = "Fetching"
        item.etag = self._files[0].token if len(self._files) == 1 else ""
        self._prepare_folder()
        item.bytes = sum(map(self._size_on_disk, self._files))
        self._check_space()
        log(
            f"input {item.name}: fetching {_format_size(item.total)} to {self._target}, "
            f"of which {_format_size(item.bytes)} were fetched before"
        )
        self._copy_files()
        self._verify(self._files[0])
        self._publish_folder()
        self._is_fetched()

    def _prepare_folder(self) -> None:
        """Keep the folder of an interrupted fetch if it can be resumed; otherwise start with an empty one."""
        state = os.path.join(self._part, "state.json")
        with self._writing():
            listing = hashlib.sha256(json.dumps(self._files).encode()).hexdigest()
            resumable = self.item.checksum or all(file.token for file in self._files)
            if resumable and read_json(state).get("listing") == listing:
                return
            shutil.rmtree(self._part, ignore_errors=True)
            os.makedirs(self._part)
            write_json(state, {"listing": listing})

    def _copy_files(self) -> None:
        with ThreadPoolExecutor(_PARALLEL) as pool:
            pending = [pool.submit(self._retry, self._copy, file) for file in self._files]
            try:
                for future in as_completed(pending):
                    future.result()
            except BaseException:
                self._stop.set()
                for future in pending:
                    future.cancel()
                raise

    def _publish_folder(self) -> None:
        """Write the record, sync everything and rename the folder to its final name."""
        item = self.item
        record = {
            "url": hide_query(item.url),
            "bytes": item.bytes,
            "etag": item.etag,
            "checksum": item.checksum,
            "files": len(self._files),
            "fetched": time.time(),
        }
        with self._writing():
            write_json(os.path.join(self._part, "record.json"), record)
            for folder, _, _ in os.walk(self._part):
                _sync(folder)
            if self._is_fetched():  # by another pod, without file locks; a running job may have it open
                shutil.rmtree(self._part, ignore_errors=True)
                return
            if os.path.isdir(self._target):  # a folder without a record, which no fetch has completed
                shutil.rmtree(self._target)
            os.rename(self._part, self._target)
            _sync(self._base)

    def _retry(self, work: Callable[..., None], *arguments: Any) -> None:
        """Repeat the work until it succeeds. Raises: FetchError, after several attempts in a row without progress."""
        item = self.item
        failures = 0
        while True:
            before = item.bytes
            try:
                return work(*arguments)
            except Exception as error:  # each fsspec plug-in raises different types; explain() describes any
                failure = explain(error, item.url)
            failures = 1 if item.bytes > before else failures + 1
            if not failure.retryable or failures >= _MOST_FAILURES or self._stop.is_set():
                raise failure
            pause = min(_LONGEST_PAUSE, 2.0 ** (failures - 1))
            item.reason = failure.reason
            item.message = f"{failure}; retrying in {pause:.0f} s"
            log(f"input {item.name}: {item.message}")
            self._stop.wait(pause)

    def _copy(self, file: File) -> None:
        """Fetch the missing part of a file."""
        path = self._path_of(file)
        present = self._size_on_disk(file)
        if file.size is not None and present == file.size and os.path.exists(path):
            return
        stream, offset = self._source.open(file, present if file.token or self.item.checksum else 0)
        with stream:
            size = self._write_stream(stream, path, offset, present)
        if size is None or file.size is None or size == file.size:
            return

        message = f"{file.path}: received {size} of {file.size} bytes"
        if size > file.size:
            self._forget(file)
            raise FetchError("FetchFailed", message, "check the server", retryable=True)
        raise FetchError("Unreachable", message, "check the server", retryable=True)

    def _write_stream(self, stream: BinaryIO, path: str, offset: int, present: int) -> int | None:
        """Write a stream into a file from ``offset`` on. Returns the file's size; None if another file has failed."""
        with self._writing():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            target = open(path, "r+b" if offset else "wb", buffering=0)  # noqa: SIM115
        with target:
            target.seek(offset)
            self._advance(offset - present)
            while chunk := stream.read(_CHUNK):
                if self._stop.is_set():
                    return None
                self._write(target, chunk)
            with self._writing():
                os.fsync(target.fileno())
                return target.tell()

    def _write(self, target: Any, chunk: bytes) -> None:
        rest = memoryview(chunk)
        while rest:
            with self._writing():
                written = target.write(rest)
            self._advance(written)
            rest = rest[written:]

    def _advance(self, size: int) -> None:
        """Count bytes, negative for those that are fetched again, and log the progress now and then."""
        item = self.item
        with self._count:
            item.bytes += size
            if size > 0:
                item.reason = ""
                item.message = ""
            if time.monotonic() - self._reported >= _REPORT_SECONDS:
                self._reported = time.monotonic()
                log(f"input {item.name}: {_format_size(item.bytes)} of {_format_size(item.total)}")

    def _verify(self, file: File) -> None:
        item = self.item
        if not item.checksum:
            return
        digest = hashlib.sha256()
        with self._writing(), open(self._path_of(file), "rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        checksum = f"sha256:{digest.hexdigest()}"
        if checksum != item.checksum:
            self._forget(file)  # otherwise the next attempt would keep it and fail alike
            message = f"{hide_query(item.url)} has {checksum}, but spec.inputs[].checksum is {item.checksum}"
            raise FetchError("ChecksumMismatch", message, "correct the checksum, or find out who changed the file")

    def _check_space(self) -> None:
        missing = max(0, (self.item.total or 0) - self.item.bytes)
        with self._writing():
            free = shutil.disk_usage(self._base).free
        if missing + _SPARE_BYTES > free:
            raise self._no_space(f"{_format_size(missing)} to fetch, {_format_size(free)} free")

    def _no_space(self, details: str) -> FetchError:
        message = f"no space in {self._base}: {details}"
        return FetchError("NoSpace", message, "enlarge the claim or the disk, or delete files from it")

    def _forget(self, file: File) -> None:
        with self._count:
            self.item.bytes -= self._size_on_disk(file)
        with self._writing():
            os.unlink(self._path_of(file))

    def _size_on_disk(self, file: File) -> int:
        try:
            return os.path.getsize(self._path_of(file))
        except OSError:
            return 0

    def _path_of(self, file: File) -> str:
        data = os.path.join(self._part, "data")
        path = os.path.normpath(os.path.join(data, file.path))
        if not path.startswith(data + os.sep):
            raise FetchError(
                "Unsupported", f"{file.path} is outside of the input's folder", "correct the URL's content"
            )
        return path

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Convert an OSError of the claim or cache to a FetchError."""
        try:
            yield
        except OSError as error:
            if error.errno in _DISK_FULL:
                raise self._no_space(error.strerror or "") from None
            message = f"cannot write to {self._base}: {error.strerror}"
            hint = "give the pod's user write access, for example by template.spec.securityContext.fsGroup"
            raise FetchError("NotWritable", message, hint) from None

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Wait until no other process fetches this input; without file locks, fetch into a folder of this host."""
        with self._writing():
            descriptor = os.open(f"{self._target}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not self.item.message:
                        self.item.message = "another pod fetches this input"
                        log(f"input {self.item.name}: {self.item.message}")
                    time.sleep(_LOCK_SECONDS)
                except OSError:
                    self._part = f"{self._target}.{socket.gethostname()}.part"
                    break
            self.item.message = ""
            yield
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _credentials(prefix: str) -> Iterator[None]:
    """Set the variables of an input's Secret without their prefix while the input is fetched."""
    before = dict(os.environ)
    if prefix:
        os.environ.update({name[len(prefix) :]: text for name, text in before.items() if name.startswith(prefix)})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _format_size(number: int | None) -> str:
    return "an unknown size" if number is None else f"{number / 1e6:.1f} MB"
