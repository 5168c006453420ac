"""The process that keeps the checkpoint folder and the store at ``checkpoint.url`` equal.

It is the only process of the launcher that imports fsspec, from the user's image. The launcher sends requests and
receives events over a socket, as lines of JSON; ``checkpoints`` has their types.
"""

import json
import os
import re
import select
import socket
import stat
import time
from contextlib import suppress
from typing import Callable, Iterable, Iterator, Mapping, NamedTuple, Optional, Sequence

from ...contract.names import METRIC_CHECKPOINT_STEP
from ..failures.agent_failure import SUPERSEDED, UNUSABLE
from ..files import log
from ..pod import decode_pod
from ..processes import set_parent_death_signal
from ..progress.metrics import MetricsEndpoint
from .checkpoints import MirrorConfig, MirrorEvent, MirrorRequest, MirrorState
from .snapshots import (
    ChangedFile,
    CheckpointSnapshot,
    FileContent,
    FileIdentity,
    PrefixSuperseded,
    SnapshotStore,
    hash_file,
    identify,
)
from .storage import UnusableStorage, hide_credentials, open_storage

_SECONDS_BETWEEN_SCANS = 1.0
_SECONDS_TO_SETTLE = 2.0  # without a change, and closed, before a file counts as complete
_MOST_SECONDS_TO_WAIT = 30.0  # for a file that always changes, and for a folder that looks half written
_LONGEST_PAUSE = 30.0  # between two attempts
_PROBLEM_LIMIT = 300  # characters
_TRAINER_FOLDER = re.compile(r"(?:.*/)?checkpoint-\d+")  # of Hugging Face's Trainer
_TRAINER_LAST_FILE = "trainer_state.json"  # that it writes last
_STEP = re.compile(r"(?:^|[-_/])(?:checkpoint-|(?:global_)?step[-_=]?)0*(\d{1,15})(?=$|[-_./])")


def main(argv: Sequence[str]) -> int:
    """Serve the launcher. ``argv``: a descriptor, the launcher's pid, a MirrorConfig. Returns the exit code."""
    descriptor, launcher, config = argv
    os.setsid()  # the launcher handles Ctrl-C
    set_parent_death_signal(int(launcher))
    channel = socket.socket(fileno=int(descriptor))

    def report(event: MirrorEvent) -> None:
        channel.sendall(event.encode())

    try:
        Mirror(MirrorConfig(**json.loads(config)), report).serve(channel)
    except PrefixSuperseded as error:
        # A later attempt of this job continues the training. Two jobs with one prefix would supersede each other.
        report(MirrorEvent(end=SUPERSEDED if error.same_job else UNUSABLE, message=str(error)))
    except UnusableStorage as error:
        report(MirrorEvent(end=UNUSABLE, message=str(error)))
    return 0


class _Sighting(NamedTuple):
    """A file's identity and since when it is unchanged."""

    identity: FileIdentity
    since: float


class _HashedFile(NamedTuple):
    """A file's identity when it was hashed, and its digest."""

    identity: FileIdentity
    digest: str


class IncompleteFiles(NamedTuple):
    """Files that are being written, and files whose last change is too recent to be sure."""

    unfinished: set[str]
    recent: set[str]


class CheckpointFolder:
    """The local checkpoint folder: its files, which of them are complete, and their digests."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen: dict[str, _Sighting] = {}
        self._hashed: dict[str, _HashedFile] = {}

    def scan(self, now: float) -> dict[str, FileIdentity]:
        """Return the identities of all files by path. ``now``: monotonic time."""
        files = dict(self._walk())
        for path in set(self._seen) - set(files):
            del self._seen[path]
        for path, identity in files.items():
            if path not in self._seen or self._seen[path].identity != identity:
                self._seen[path] = _Sighting(identity, now)
        return files

    def find_incomplete(self, files: Mapping[str, FileIdentity], now: float) -> IncompleteFiles:
        """Return which of the scanned files are not complete."""
        open_inodes = list_written_files()
        half_written = {
            folder
            for folder in {os.path.dirname(path) for path in files}
            if _TRAINER_FOLDER.fullmatch(folder) and f"{folder}/{_TRAINER_LAST_FILE}" not in files
        }
        unfinished = set()
        recent = set()
        for path, identity in files.items():
            age = now - self._seen[path].since
            is_half_written = os.path.dirname(path) in half_written and age < _MOST_SECONDS_TO_WAIT
            if identity.inode in open_inodes or is_half_written:
                unfinished.add(path)
            elif age < _SECONDS_TO_SETTLE:
                recent.add(path)
        return IncompleteFiles(unfinished, recent)

    def digest(self, path: str, identity: FileIdentity) -> FileContent:
        """Return a file's SHA-256 and size. Raises: ChangedFile."""
        hashed = self._hashed.get(path)
        if hashed is None or hashed.identity != identity:
            whole = os.path.join(self.path, path)
            try:
                hashed = _HashedFile(identity, hash_file(whole))
                if identify(whole) != identity:
                    raise ChangedFile(f"{whole} was changed while it was read")
            except FileNotFoundError:
                raise ChangedFile(f"{path} was removed while it was read") from None
            self._hashed[path] = hashed
        return FileContent(hashed.digest, identity.size)

    def adopt(self, snapshot: CheckpointSnapshot) -> None:
        """Take the digests of a snapshot that was just fetched into the folder."""
        for path, content in snapshot.files.items():
            with suppress(OSError):  # the script has removed it already
                self._hashed[path] = _HashedFile(identify(os.path.join(self.path, path)), content.digest)

    def _walk(self) -> Iterator[tuple[str, FileIdentity]]:
        for parent, folders, names in os.walk(self.path):
            folders[:] = [name for name in folders if not name.startswith((".", "tmp-"))]
            for name in names:
                path = os.path.join(parent, name)
                if name.startswith(".") or name.endswith(".tmp") or not os.path.isfile(path):
                    continue
                with suppress(OSError):  # the script has removed it meanwhile
                    yield os.path.relpath(path, self.path), identify(path)


class Mirror:
    """The process: it executes requests, and uploads the folder while the training runs. Raises: UnusableStorage."""

    def __init__(self, config: MirrorConfig, report: Callable[[MirrorEvent], None]) -> None:
        pod = decode_pod(config.pod)
        assert pod.checkpoint is not None
        self._url = pod.checkpoint.url
        self._report = report
        self._folder = CheckpointFolder(config.folder)
        self._metrics = MetricsEndpoint(pod.runtime, lambda: "")
        system, root = open_storage(self._url)
        self._store = SnapshotStore(system, root, config.attempt, config.run_id, pod.checkpoint.keep)
        self._uploads = False
        self._last: Optional[CheckpointSnapshot] = None
        self._uploaded: dict[str, FileIdentity] = {}  # the complete files at the last upload
        self._waits: dict[str, float] = {}  # incomplete files, and since when
        self._pending = False  # whether the store lacks a complete file
        self._problem = ""
        self._failures = 0
        self._next_attempt = 0.0

    def serve(self, channel: socket.socket) -> None:
        """Execute requests until the launcher closes its end. Raises: PrefixSuperseded, UnusableStorage."""
        unread = b""
        while True:
            if select.select([channel], [], [], _SECONDS_BETWEEN_SCANS if self._uploads else None)[0]:
                data = channel.recv(65536)
                if not data:
                    return
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    self._execute(MirrorRequest(**json.loads(line)))
            if self._uploads:
                self._upload_changes(final=False)

    # -- requests

    def _execute(self, request: MirrorRequest) -> None:
        if request.claim:
            self._retry_until_done(self._claim)
        if request.fetch is not None:
            snapshot = request.fetch
            self._retry_until_done(lambda: self._fetch(snapshot))
        if request.flush:
            while not self._upload_changes(final=True):
                time.sleep(max(0.0, self._next_attempt - time.monotonic()))
        self._report(MirrorEvent(done=self._last.name if self._last else "", number=request.number))

    def _claim(self) -> None:
        # Pruning starts with this attempt's first snapshot: the newest one in the store may turn out damaged.
        self._last = self._store.claim()
        self._uploads = True

    def _fetch(self, name: str) -> None:
        os.makedirs(self._folder.path, exist_ok=True)
        if name:
            self._last = self._store.fetch(name, self._folder.path)
        else:
            self._last = self._store.fetch_newest(self._folder.path)
        if self._last is not None:
            self._folder.adopt(self._last)
            log(f"restored the checkpoints of snapshot {_describe(self._last)} in {self._folder.path}")
        self._report_state()

    def _retry_until_done(self, action: Callable[[], None]) -> None:
        """Repeat an action that the training needs before it starts.

        Raises: PrefixSuperseded; UnusableStorage if the error will not go away.
        """
        while True:
            try:
                action()
            except (PrefixSuperseded, UnusableStorage):
                raise
            except Exception as error:  # each fsspec plug-in raises different types
                is_lasting = isinstance(error, (PermissionError, FileNotFoundError))
                if is_lasting or type(error).__name__ == "NoCredentialsError":
                    raise UnusableStorage(f"{self._url} cannot be used: {_describe_error(error)}") from None
                self._note_failure(_describe_error(error))
                time.sleep(max(0.0, self._next_attempt - time.monotonic()))
            else:
                self._note_success()
                return

    # -- uploads

    def _upload_changes(self, *, final: bool) -> bool:
        """Upload the folder if it has changed and is complete. Returns whether the store now equals it.

        ``final``: all files are complete. A failure is reported and retried later. Raises: PrefixSuperseded.
        """
        now = time.monotonic()
        if now < self._next_attempt and not final:
            return False
        # Read the step before the scan: a file saved in between belongs to a later step.
        step = self._metrics.progress().get(METRIC_CHECKPOINT_STEP) if final or self._pending else None
        files = self._folder.scan(now)
        changed = {path for path in {*files, *self._uploaded} if files.get(path) != self._uploaded.get(path)}
        incomplete = IncompleteFiles(set(), set())
        if changed and not final:
            incomplete = self._folder.find_incomplete(files, now)
        awaited = self._find_awaited(incomplete, now)
        excluded = incomplete.unfinished | awaited

        pending = bool(changed - (excluded - awaited))
        if pending != self._pending:
            self._pending = pending
            self._report_state()
        if awaited or not pending:
            return not pending
        if not self._try_save(files, excluded, step):
            return False
        self._waits = {path: since for path, since in self._waits.items() if path in incomplete.unfinished}
        self._note_success()
        return True

    def _find_awaited(self, incomplete: IncompleteFiles, now: float) -> set[str]:
        """Return the incomplete files for which the upload waits.

        After a while a file that is never closed, such as a log, is left out, and one that is always replaced is read.
        """
        paths = incomplete.unfinished | incomplete.recent
        self._waits = {path: self._waits.get(path, now) for path in paths}
        return {path for path, since in self._waits.items() if now - since < _MOST_SECONDS_TO_WAIT}

    def _try_save(self, files: Mapping[str, FileIdentity], excluded: set[str], step: Optional[float]) -> bool:
        """Write a snapshot. Returns whether that succeeded. Raises: PrefixSuperseded."""
        try:
            self._save(files, excluded, step)
        except PrefixSuperseded:
            raise
        except ChangedFile as error:
            log(f"{error}: scanning the folder again")
            return False
        except Exception as error:  # each fsspec plug-in raises different types; the problem is reported
            self._note_failure(_describe_error(error))
            return False
        return True

    def _save(self, files: Mapping[str, FileIdentity], excluded: set[str], step: Optional[float]) -> None:
        """Write a snapshot. Of excluded files it has the content in the last snapshot, if any."""
        newest_first = sorted(files, key=lambda path: files[path].modified, reverse=True)
        complete = {path: self._folder.digest(path, files[path]) for path in newest_first if path not in excluded}
        before = self._last.files if self._last else {}
        contents = {**complete, **{path: before[path] for path in excluded if path in before}}
        if contents and contents != before:
            self._store.upload(self._folder.path, complete)
            reached = int(step) if step and not excluded else find_step(contents)
            self._last = self._store.write(contents, reached)
            log(f"uploaded the checkpoints: snapshot {_describe(self._last)}")
            self._store.prune()
        self._uploaded = {path: identity for path, identity in files.items() if path not in excluded}
        self._pending = False

    # -- reports

    def _note_failure(self, problem: str) -> None:
        """Schedule the next attempt, and log a problem that is new."""
        self._failures += 1
        self._next_attempt = time.monotonic() + min(_LONGEST_PAUSE, 0.5 * 2 ** min(self._failures, 10))
        if problem != self._problem:
            log(hide_credentials(f"{self._url} failed, retrying: {problem}"))
        self._problem = problem
        self._report_state()

    def _note_success(self) -> None:
        if self._problem:
            log(hide_credentials(f"{self._url} is available again"))
        self._failures = 0
        self._next_attempt = 0.0
        self._problem = ""
        self._report_state()

    def _report_state(self) -> None:
        state = MirrorState(
            step=self._last.step if self._last else None,
            time=self._last.time if self._last else None,
            bytes=self._store.bytes,
            failures=self._failures,
            problem=self._problem,
            pending=self._pending,
        )
        self._report(MirrorEvent(state=state))


def find_step(paths: Iterable[str]) -> Optional[int]:
    """Return the highest step in the names of checkpoint files and folders."""
    steps = []
    for path in paths:
        steps += [int(match[1]) for match in _STEP.finditer(path)]
    return max(steps, default=None)


def list_written_files() -> set[int]:
    """Return the inodes of the files that a process of this pod has open for writing (Linux)."""
    inodes: set[int] = set()
    if not os.path.isdir("/proc/self"):
        return inodes
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # the process has ended, or belongs to another user
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError, ValueError, StopIteration):  # the descriptor was closed
                    status = os.stat(f"/proc/{pid}/fd/{descriptor}")
                    if stat.S_ISREG(status.st_mode) and _is_open_for_writing(pid, descriptor):
                        inodes.add(status.st_ino)
    return inodes


def _is_open_for_writing(pid: str, descriptor: str) -> bool:
    """Read the flags of a descriptor, see proc(5). Raises: OSError, ValueError, StopIteration."""
    with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii") as file:
        flags = next(line.split()[1] for line in file if line.startswith("flags:"))
    return bool(int(flags, 8) & (os.O_WRONLY | os.O_RDWR))


def _describe(snapshot: CheckpointSnapshot) -> str:
    return snapshot.name + (f" (step {snapshot.step})" if snapshot.step is not None else "")


def _describe_error(error: BaseException) -> str:
    text = " ".join(str(error).split())[:_PROBLEM_LIMIT]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
