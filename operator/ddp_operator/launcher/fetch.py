"""The subcommand ``fetch``: brings a job's inputs to a claim or a node cache, before there are pods with GPUs.

Each input has a folder ``ddp-inputs/KEY`` there, with its files in ``data`` and what is known of them in
``record.json``. It is made under another name and renamed when it is whole, so that whoever finds it finds all of it,
and it is not fetched again. What was cut is continued by the next fetch. A lock lets one pod fetch and others wait.
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
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, BinaryIO, Iterator, Optional

from .contract import (
    COMMENT_INPUTS,
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
from .failure_record import Failure
from .failure_table import UNKNOWN, USER_ERROR
from .files import log, read_json, write_json
from .metrics import MetricsEndpoint
from .sources import FetchError, File, InputSource, InputState, explain, hide_query, open_source
from .termination import finish

_PARALLEL = 8
_CHUNK = 1 << 20
_MOST_FAILURES = 8
"""Tries in a row that bring nothing, about two minutes of them, after which the pod ends; its Job makes another."""
_LONGEST_PAUSE = 30.0
_SPARE_BYTES = 16 << 20  # records, folders
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REPORT_SECONDS = 10.0


def fetch_main(signals: list[int]) -> int:
    """Fetch what the environment names. Returns the exit code. ``signals``: those that have come already."""
    if signals:
        return EXIT_PREEMPTED
    os.umask(0o002)  # other jobs' users share the claim
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda *_: os._exit(EXIT_PREEMPTED))  # what is there is continued by the next one
    inputs = [InputState(**one) for one in json.loads(os.environ[ENV_INPUTS])]
    page = MetricsEndpoint("", lambda: "")
    page.comments = lambda: f"{COMMENT_INPUTS}{json.dumps([one.describe() for one in inputs])}\n"
    with contextlib.suppress(OSError):
        port = page.serve(int(os.environ.get(ENV_METRICS_PORT) or 0))
        if os.environ.get(ENV_PORT_FILE):
            write_json(os.environ[ENV_PORT_FILE], port)
    index = os.environ.get(ENV_COMPLETION_INDEX, "")
    end = Failure(pod_index=int(index) if index.isdigit() else 0, exit_code=EXIT_OK, time=time.time())
    fetches = [Fetch(item) for item in inputs]
    # What is missing or forbidden is known before anything takes hours.
    for one, work in [(one, one.find) for one in fetches] + [(one, one.run) for one in fetches]:
        try:
            work()
        except Exception as error:
            item = one.item
            problem = explain(error, item.url)
            item.phase = "Failed"
            item.reason = problem.reason
            item.message = str(problem)
            code = EXIT_RETRYABLE if problem.retryable else EXIT_USER_ERROR
            end = dataclasses.replace(
                end,
                category=UNKNOWN.name if problem.retryable else USER_ERROR.name,
                container_exit_code=code,
                exit_code=code,
                message=f"input {item.name}: {problem}",
                remedy=problem.hint,
            )
            break
    return finish(end, {"inputs": [item.describe() for item in inputs]})


class Fetch:
    """One input on its way."""

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
        """Look what there is to fetch, unless it is there. Raises: FetchError."""
        item = self.item
        with self._writing():
            os.makedirs(self._base, exist_ok=True)
        if self._is_there():
            return
        with _credentials(item.secret):
            self._retry(self._list)
        if not self._files:
            raise FetchError("NotFound", f"{hide_query(item.url)}: the folder is empty", "correct the URL")
        if item.checksum and len(self._files) != 1:
            what = "a checksum is of one file, and the URL names several"
            raise FetchError("Unsupported", what, "remove spec.inputs[].checksum")
        item.total = _sum(file.size for file in self._files)

    def run(self) -> None:
        """Fetch what was found. Raises: FetchError."""
        if self.item.phase == "Fetched":
            return
        with self._lock():
            if not self._is_there():
                with _credentials(self.item.secret):
                    self._fetch()

    def _is_there(self) -> bool:
        item, record = self.item, read_json(os.path.join(self._target, "record.json"))
        if not record:
            return False
        item.phase, item.bytes, item.total = "Fetched", record["bytes"], record["bytes"]
        item.etag, item.reason, item.message = record["etag"], "", ""
        log(f"input {item.name}: {_size(item.bytes)} in {self._target}")
        return True

    def _list(self) -> None:
        self._source = open_source(self.item.url)
        self._files = self._source.list()

    def _fetch(self) -> None:
        item, files = self.item, self._files
        item.phase, item.etag = "Fetching", files[0].token if len(files) == 1 else ""
        state = os.path.join(self._part, "state.json")
        with self._writing():
            listing = hashlib.sha256(json.dumps(files).encode()).hexdigest()
            resumable = item.checksum or all(file.token for file in files)
            if not resumable or read_json(state).get("listing") != listing:
                shutil.rmtree(self._part, ignore_errors=True)
                os.makedirs(self._part)
                write_json(state, {"listing": listing})
        item.bytes = sum(map(self._present, files))
        self._check_space()
        log(f"input {item.name}: fetching {_size(item.total)} to {self._target}, {_size(item.bytes)} are there")
        with ThreadPoolExecutor(_PARALLEL) as pool:
            pending = [pool.submit(self._retry, self._copy, file) for file in files]
            try:
                for one in as_completed(pending):
                    one.result()
            except BaseException:
                self._stop.set()
                for one in pending:
                    one.cancel()
                raise
        self._verify(files[0])
        with self._writing():
            record = {"url": hide_query(item.url), "bytes": item.bytes, "etag": item.etag}
            record.update(checksum=item.checksum, files=len(files), fetched=time.time())
            write_json(os.path.join(self._part, "record.json"), record)
            for folder, _, _ in os.walk(self._part):
                _sync(folder)
            if os.path.isdir(self._target):  # without a record: nobody's
                shutil.rmtree(self._target)
            os.rename(self._part, self._target)
            _sync(self._base)
        self._is_there()

    def _retry(self, work: Any, *arguments: Any) -> Any:
        """Do it until it succeeds, or nothing has been brought several times in a row."""
        failures, item = 0, self.item
        while True:
            before = item.bytes
            try:
                return work(*arguments)
            except Exception as error:
                failure = explain(error, item.url)
            failures = 1 if item.bytes > before else failures + 1
            if not failure.retryable or failures >= _MOST_FAILURES or self._stop.is_set():
                raise failure
            pause = min(_LONGEST_PAUSE, 2.0 ** (failures - 1))
            item.reason, item.message = failure.reason, f"{failure}; trying again in {pause:.0f} s"
            log(f"input {item.name}: {item.message}")
            self._stop.wait(pause)

    def _copy(self, file: File) -> None:
        """Bring what is missing of a file."""
        place, present = self._place(file), self._present(file)
        if file.size is not None and present == file.size and os.path.exists(place):
            return
        stream, offset = self._source.open(file, present if file.token or self.item.checksum else 0)
        with stream:
            with self._writing():
                os.makedirs(os.path.dirname(place), exist_ok=True)
                target = open(place, "r+b" if offset else "wb", buffering=0)  # noqa: SIM115
            with target:
                target.seek(offset)
                self._advance(offset - present)
                while chunk := stream.read(_CHUNK):
                    if self._stop.is_set():
                        return
                    self._write(target, chunk)
                with self._writing():
                    os.fsync(target.fileno())
                    size = target.tell()
        if file.size is not None and size != file.size:
            over = size > file.size
            if over:
                self._forget(file)
            what = f"{file.path}: {size} of {file.size} bytes came"
            raise FetchError("FetchFailed" if over else "Unreachable", what, "look at the server", retryable=True)

    def _write(self, target: BinaryIO, chunk: bytes) -> None:
        rest = memoryview(chunk)
        while rest:
            with self._writing():
                written = target.write(rest)
            self._advance(written)
            rest = rest[written:]

    def _advance(self, size: int) -> None:
        item = self.item
        with self._count:
            item.bytes += size
            if size > 0:
                item.reason = item.message = ""
            if time.monotonic() - self._reported >= _REPORT_SECONDS:
                self._reported = time.monotonic()
                log(f"input {item.name}: {_size(item.bytes)} of {_size(item.total)}")

    def _verify(self, file: File) -> None:
        item = self.item
        if not item.checksum:
            return
        found = hashlib.sha256()
        with self._writing(), open(self._place(file), "rb") as stream:
            while chunk := stream.read(_CHUNK):
                found.update(chunk)
        if f"sha256:{found.hexdigest()}" != item.checksum:
            self._forget(file)  # else the next try would find it, and fail alike
            what = f"{hide_query(item.url)} has sha256:{found.hexdigest()}, and not {item.checksum}"
            raise FetchError("ChecksumMismatch", what, "correct spec.inputs[].checksum, or look who changed the file")

    def _check_space(self) -> None:
        missing = max(0, (self.item.total or 0) - self.item.bytes)
        with self._writing():
            free = shutil.disk_usage(self._base).free
        if missing + _SPARE_BYTES > free:
            raise self._no_space(f"{_size(missing)} are missing, and {_size(free)} are free")

    def _no_space(self, what: str) -> FetchError:
        return FetchError("NoSpace", f"no space for it: {what}", "enlarge the claim or the disk, or delete from it")

    def _forget(self, file: File) -> None:
        with self._count:
            self.item.bytes -= self._present(file)
        with self._writing():
            os.unlink(self._place(file))

    def _present(self, file: File) -> int:
        try:
            return os.path.getsize(self._place(file))
        except OSError:
            return 0

    def _place(self, file: File) -> str:
        data = os.path.join(self._part, "data")
        place = os.path.normpath(os.path.join(data, file.path))
        if not place.startswith(data + os.sep):
            raise FetchError("Unsupported", f"{file.path} leaves its folder", "correct what the URL names")
        return place

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an error of the claim or cache into one that says so."""
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise self._no_space(error.strerror or "") from None
            what = f"cannot write there: {error.strerror}"
            hint = "let the pod's user write to it, such as by template.spec.securityContext.fsGroup"
            raise FetchError("NotWritable", what, hint) from None

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Wait until no other process fetches the same; where files cannot be locked, fetch beside it."""
        with self._writing():
            descriptor = os.open(f"{self._target}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not self.item.message:
                        self.item.message = "another pod is fetching it"
                        log(f"input {self.item.name}: {self.item.message}")
                    time.sleep(1.0)
                except OSError:
                    self._part = f"{self._target}.{socket.gethostname()}.part"
                    break
            self.item.message = ""
            yield
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _credentials(prefix: str) -> Iterator[None]:
    """Give a Secret's variables their own names while its input is fetched."""
    before = dict(os.environ)
    os.environ.update(
        {name[len(prefix) :]: text for name, text in before.items() if prefix and name.startswith(prefix)}
    )
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


def _sum(sizes: Iterator[Optional[int]]) -> Optional[int]:
    known = list(sizes)
    return None if None in known else sum(size or 0 for size in known)


def _size(number: Optional[int]) -> str:
    return "an unknown size" if number is None else f"{number / 1e6:.1f} MB"
