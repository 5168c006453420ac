"""The process beside the launcher that keeps the folder of checkpoints in a store: ``checkpoint.url``.

Of the launcher's processes it alone imports fsspec, from the user's image. What it is asked comes over a socket, and
so does what it reports, as lines of JSON:

    {"claim": true}       claim the prefix for this attempt, and upload what changes from now on
    {"fetch": name}       bring this snapshot into the folder, the newest whole one for null
    {"flush": true}       upload the folder as it is; the workers have ended
    -> {"done": name}     the snapshot that the folder then is as, "" where there is none; with the request's number
    -> {"state": {...}}   what is in the store
    -> {"end": kind, "message": ...}  it is of no use to go on
"""

import json
import os
import re
import select
import socket
import stat
import time
from contextlib import suppress
from typing import Any, Callable, Iterable, Iterator, Optional, Sequence

from .agent_failure import SUPERSEDED, UNUSABLE
from .contract import METRIC_CHECKPOINT_STEP
from .files import log
from .metrics import MetricsEndpoint
from .pod import decode_pod
from .processes import set_parent_death_signal
from .snapshots import Changed, CheckpointSnapshot, PrefixSuperseded, SnapshotStore, hash_file, identify
from .storage import UnusableStorage, hide_credentials, open_storage

_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_SETTLE = 2.0  # without a change, and closed, before a file counts as complete
_SECONDS_OF_PATIENCE = 30.0  # for a folder in which something always changes, and for what looks half-written
_LONGEST_PAUSE = 30.0  # between two tries
_HALF_WRITTEN = re.compile(r"(?:.*/)?checkpoint-\d+")  # without the file that Hugging Face's Trainer writes last
_LAST_WRITTEN = "trainer_state.json"
_STEP = re.compile(r"(?:^|[-_/])(?:checkpoint-|(?:global_)?step[-_=]?)0*(\d{1,15})(?=$|[-_./])")
Identity = tuple[int, int, int, int]


def mirror_main(words: Sequence[str]) -> int:
    """``mirror <descriptor> <launcher> <what Mirror is given>``. Returns the exit code."""
    os.setsid()  # Ctrl-C is the launcher's
    set_parent_death_signal(int(words[1]))
    channel = socket.socket(fileno=int(words[0]))

    def report(event: dict[str, Any]) -> None:
        channel.sendall(json.dumps(event).encode() + b"\n")

    try:
        Mirror(json.loads(words[2]), report).serve(channel)
    except PrefixSuperseded as error:
        # Another attempt goes on from here; another job would be overtaken in its turn, and so on.
        report({"end": SUPERSEDED if error.same_job else UNUSABLE, "message": str(error)})
    except UnusableStorage as error:
        report({"end": UNUSABLE, "message": str(error)})
    return 0


class Folder:
    """The folder of checkpoints, and which of its files are complete."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen: dict[str, tuple[Identity, float]] = {}  # and since when it is so
        self._digests: dict[str, tuple[Identity, str]] = {}

    def look(self, now: float) -> dict[str, Identity]:
        """Return what is there. ``now`` is of a monotonic clock."""
        found = dict(self._walk())
        for path in [path for path in self._seen if path not in found]:
            del self._seen[path]
        for path, identity in found.items():
            if self._seen.get(path, (None, 0.0))[0] != identity:
                self._seen[path] = identity, now
        return found

    def find_incomplete(self, found: dict[str, Identity], now: float) -> tuple[set[str], set[str]]:
        """Return which of these are being written, and which others have changed so lately that they may be."""
        written = list_written_files()
        parents = {os.path.dirname(path) for path in found}
        halves = {one for one in parents if _HALF_WRITTEN.fullmatch(one) and f"{one}/{_LAST_WRITTEN}" not in found}
        unfinished = {path for path, identity in found.items() if identity[3] in written}
        for path in found:
            if os.path.dirname(path) in halves and now - self._seen[path][1] < _SECONDS_OF_PATIENCE:
                unfinished.add(path)
        late = {path for path in found if now - self._seen[path][1] < _SECONDS_TO_SETTLE}
        return unfinished, late - unfinished

    def digest(self, path: str, identity: Identity) -> tuple[str, int]:
        """Return a file's SHA-256 and size. Raises: Changed."""
        known = self._digests.get(path)
        if known is None or known[0] != identity:
            try:
                whole = os.path.join(self.path, path)
                known = identity, hash_file(whole)
                if identify(whole) != identity:
                    raise Changed(f"{whole} was changed while it was read")
            except FileNotFoundError:
                raise Changed(f"{path} was removed while it was read") from None
            self._digests[path] = known
        return known[1], identity[0]

    def take(self, snapshot: CheckpointSnapshot) -> None:
        """Take in that the files of a snapshot were just fetched or found the same."""
        for path, (digest, _) in snapshot.files.items():
            with suppress(OSError):
                self._digests[path] = identify(os.path.join(self.path, path)), digest

    def _walk(self) -> Iterator[tuple[str, Identity]]:
        for parent, folders, names in os.walk(self.path):
            folders[:] = [name for name in folders if not name.startswith((".", "tmp-"))]
            for name in names:
                path = os.path.join(parent, name)
                if not name.startswith(".") and not name.endswith(".tmp") and os.path.isfile(path):
                    with suppress(OSError):
                        yield os.path.relpath(path, self.path), identify(path)


class Mirror:
    """What the process does. ``given``: the pod, as ``encode_config`` made it, the folder, attempt and run id.

    Raises: UnusableStorage.
    """

    def __init__(self, given: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
        pod = decode_pod(given["pod"])
        assert pod.checkpoint is not None
        self._url = pod.checkpoint.url
        self._report = report
        self._folder = Folder(given["folder"])
        self._metrics = MetricsEndpoint(pod.runtime, lambda: "")
        system, root = open_storage(self._url)
        self._store = SnapshotStore(system, root, given["attempt"], given["runId"], pod.checkpoint.keep)
        self._uploads = False
        self._last: Optional[CheckpointSnapshot] = None
        self._tried: dict[str, Identity] = {}  # the folder at the last snapshot, as far as it was complete
        self._waits: dict[str, float] = {}  # since when a file is not
        self._pending = False  # whether there is anything that the store does not have
        self._problem = ""
        self._failures = 0
        self._next_try = 0.0

    def serve(self, channel: socket.socket) -> None:
        """Do what is asked until the launcher has closed its end. Raises: PrefixSuperseded, UnusableStorage."""
        unread = b""
        while True:
            if select.select([channel], [], [], _SECONDS_BETWEEN_LOOKS if self._uploads else None)[0]:
                data = channel.recv(65536)
                if not data:
                    return
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    self._answer(json.loads(line))
            if self._uploads:
                self._look(final=False)

    def _answer(self, asked: dict[str, Any]) -> None:
        if "claim" in asked:
            self._insist(self._claim)
        if "fetch" in asked:
            self._insist(lambda: self._fetch(asked["fetch"]))
        if "flush" in asked:
            while not self._look(final=True):
                time.sleep(max(0.0, self._next_try - time.monotonic()))
        self._report({"done": self._last.name if self._last else "", "number": asked["number"]})

    def _claim(self) -> None:
        # Nothing is pruned before this attempt's own first snapshot: the newest that is there may turn out damaged.
        self._last = self._store.claim()
        self._uploads = True

    def _fetch(self, name: Optional[str]) -> None:
        os.makedirs(self._folder.path, exist_ok=True)
        if name:
            self._last = self._store.fetch(name, self._folder.path)
        else:
            self._last = self._store.fetch_newest(self._folder.path)
        if self._last is not None:
            self._folder.take(self._last)
            log(f"checkpoints of snapshot {_describe(self._last)} are in {self._folder.path}")
        self._tell()

    def _insist(self, action: Any) -> None:
        """Try until it is done: nothing can begin without. Raises: UnusableStorage, where no try can help."""
        while True:
            try:
                action()
                self._note("")
                return
            except (PrefixSuperseded, UnusableStorage):
                raise
            except Exception as error:
                lasting = isinstance(error, (PermissionError, FileNotFoundError))
                if lasting or type(error).__name__ == "NoCredentialsError":
                    raise UnusableStorage(f"{self._url} cannot be used: {_name(error)}") from None
                self._note(_name(error))
                time.sleep(max(0.0, self._next_try - time.monotonic()))

    def _look(self, *, final: bool) -> bool:
        """Upload the folder if it has changed and is complete. Returns whether it is now as in the store.

        ``final``: whatever is there is complete. A failure is reported and retried later. Raises: PrefixSuperseded.
        """
        now = time.monotonic()
        if now < self._next_try and not final:
            return False
        step = self._metrics.progress().get(METRIC_CHECKPOINT_STEP) if final or self._pending else None
        found = self._folder.look(now)
        changed = {path for path in {*found, *self._tried} if found.get(path) != self._tried.get(path)}
        unfinished, late = self._folder.find_incomplete(found, now) if changed and not final else (set(), set())
        self._waits = {path: self._waits.get(path, now) for path in unfinished | late}
        # One that is never closed, such as a log, is not waited for any more; one that is always replaced is read.
        awaited = {path for path, since in self._waits.items() if now - since < _SECONDS_OF_PATIENCE}
        incomplete = unfinished | awaited
        pending = bool(changed - (incomplete - awaited))
        if pending != self._pending:
            self._pending = pending
            self._tell()
        if awaited or not pending:
            return not pending
        try:
            self._save(found, incomplete, step)
        except PrefixSuperseded:
            raise
        except Changed as error:
            log(f"{error}: the folder is looked at again")
            return False
        except Exception as error:
            self._note(_name(error))
            return False
        self._waits = {path: since for path, since in self._waits.items() if path in unfinished}
        self._note("")
        return True

    def _save(self, found: dict[str, Identity], incomplete: set[str], step: Optional[float]) -> None:
        """Make a snapshot, with files that are not complete as they were in the last one, if they were."""
        newest_first = sorted(found, key=lambda path: found[path][1], reverse=True)
        files = {path: self._folder.digest(path, found[path]) for path in newest_first if path not in incomplete}
        before = self._last.files if self._last else {}
        files.update((path, before[path]) for path in incomplete if path in before)
        if files != before and files:
            self._store.upload(self._folder.path, {path: files[path] for path in files if path not in incomplete})
            reached = int(step) if step and not incomplete else find_step(files)
            self._last = self._store.write(files, reached)
            log(f"checkpoints are in the store: snapshot {_describe(self._last)}")
            self._store.prune()
        self._tried = {path: identity for path, identity in found.items() if path not in incomplete}
        self._pending = False

    def _note(self, problem: str) -> None:
        """Take in how the last try has ended, and say so if it is news."""
        if problem:
            self._failures += 1
            self._next_try = time.monotonic() + min(_LONGEST_PAUSE, 0.5 * 2 ** min(self._failures, 10))
            if problem != self._problem:
                log(hide_credentials(f"{self._url} fails, and is tried again: {problem}"))
        elif self._problem:
            log(hide_credentials(f"{self._url} answers again"))
        if not problem:
            self._failures, self._next_try = 0, 0.0
        self._problem = problem
        self._tell()

    def _tell(self) -> None:
        last = self._last
        state = {
            "step": last.step if last else None,
            "time": last.time if last else None,
            "bytes": self._store.bytes,
            "failures": self._failures,
            "problem": self._problem,
            "pending": self._pending,
        }
        self._report({"state": state})


def find_step(paths: Iterable[str]) -> Optional[int]:
    """Return the highest step that a file or a folder of a checkpoint is named after."""
    return max((int(found[1]) for path in paths for found in _STEP.finditer(path)), default=None)


def list_written_files() -> set[int]:
    """Return the inodes of the files that a process of this pod has open for writing (Linux)."""
    written: set[int] = set()
    for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc/self") else ()):
        with suppress(OSError):  # it has ended, or is somebody else's
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError, ValueError, StopIteration):
                    about = os.stat(f"/proc/{pid}/fd/{descriptor}")
                    if not stat.S_ISREG(about.st_mode):
                        continue
                    with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii") as file:
                        flags = next(line.split()[1] for line in file if line.startswith("flags:"))
                    if int(flags, 8) & (os.O_WRONLY | os.O_RDWR):
                        written.add(about.st_ino)
    return written


def _describe(snapshot: CheckpointSnapshot) -> str:
    return snapshot.name + (f" (step {snapshot.step})" if snapshot.step is not None else "")


def _name(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
