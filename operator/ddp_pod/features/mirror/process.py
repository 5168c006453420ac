"""The process that keeps the checkpoint folder and the store at ``checkpoint.url`` equal.

Pod 0 uploads its folder as snapshots. Other pods upload the shards that their ranks write, which pod 0 includes.
It is the only process of the launcher that imports fsspec, from the user's image. The launcher sends requests and
receives events over a socket, as lines of JSON; ``checkpoints`` has their types.
"""

import dataclasses
import json
import math
import os
import re
import select
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ...base.files import log
from ...base.pod_setup import decode_pod
from ...contract.credentials import hide_credentials
from ...contract.processes import set_parent_death_signal
from ...failures.agent_failure import SUPERSEDED, UNUSABLE
from ...progress.rank_progress import RankReader
from ...transfer.sources import UnusableStorage, open_storage
from .checkpoints import MirrorConfig, MirrorEvent, MirrorRequest, MirrorState
from .shards import (
    find_missing_shards,
    is_metadata,
    is_partition,
    is_shard,
    list_checkpoint_folders,
    read_shard_names,
)
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

_SECONDS_BETWEEN_SCANS = 1.0
_SECONDS_TO_SETTLE = 2.0  # without a change, and closed, before a file counts as complete
_MOST_SECONDS_TO_WAIT = 30.0  # for a file that always changes, and for a folder that looks half written
_SECONDS_BETWEEN_FLUSHES = 0.1
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


@dataclasses.dataclass
class _KnownFile:
    """A file that is unchanged since a time of the monotonic clock, with the data that was read of it.

    ``is_fetched``: whether it is one of a snapshot.
    """

    identity: FileIdentity
    since: float
    digest: str = ""
    shard_names: frozenset[str] | None = None
    is_fetched: bool = False


class IncompleteFiles(NamedTuple):
    """Files that are being written, and files whose last change is too recent to be sure."""

    unfinished: set[str]
    recent: set[str]


class ShardedCheckpoints(NamedTuple):
    """The checkpoints of torch.distributed.checkpoint in the folder of pod 0.

    ``incomplete``: folders without their list of shards, or without all shards; ``awaited``: those that only lack
    shards. ``foreign``: shards that are complete in other pods.
    """

    incomplete: set[str]
    awaited: set[str]
    foreign: dict[str, FileContent]


class CheckpointFolder:
    """The local checkpoint folder: its files, which of them are complete, and their digests."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._known: dict[str, _KnownFile] = {}

    def scan(self, now: float) -> dict[str, FileIdentity]:
        """Return the identities of all files by path. ``now``: monotonic time."""
        files = dict(self._walk())
        former = self._known
        self._known = {}
        for path, identity in files.items():
            known = former.get(path)
            if known is None or known.identity != identity:
                known = _KnownFile(identity, now)
            self._known[path] = known
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
            age = now - self._known[path].since
            is_half_written = os.path.dirname(path) in half_written and age < _MOST_SECONDS_TO_WAIT
            if identity.inode in open_inodes or is_half_written:
                unfinished.add(path)
            elif age < _SECONDS_TO_SETTLE:
                recent.add(path)
        return IncompleteFiles(unfinished, recent)

    def digest(self, path: str) -> FileContent:
        """Return a scanned file's SHA-256 and size. Raises: ChangedFile."""
        known = self._known[path]
        if not known.digest:
            whole = os.path.join(self.path, path)
            with _reporting_removal(path):
                digest = hash_file(whole)
                if identify(whole) != known.identity:
                    raise ChangedFile(f"{whole} was changed while it was read")
            known.digest = digest
        return FileContent(known.digest, known.identity.size)

    def adopt(self, snapshot: CheckpointSnapshot) -> None:
        """Take the digests of a snapshot that was just fetched into the folder."""
        for path, content in snapshot.files.items():
            with suppress(OSError):  # the script has removed it already
                identity = identify(os.path.join(self.path, path))
                self._known[path] = _KnownFile(identity, -math.inf, content.digest, is_fetched=True)

    def is_fetched(self, path: str) -> bool:
        """Return whether a scanned file is one of a snapshot, unchanged."""
        return self._known[path].is_fetched

    def read_shard_names(self, path: str) -> frozenset[str]:
        """Return the names of the shards in a scanned metadata file. Raises: ChangedFile."""
        known = self._known[path]
        if known.shard_names is None:
            with _reporting_removal(path):
                known.shard_names = read_shard_names(os.path.join(self.path, path))
        return known.shard_names

    def remove(self, paths: Iterable[str]) -> None:
        """Delete files, and their folders if they are empty."""
        for path in paths:
            whole = os.path.join(self.path, path)
            with suppress(OSError):  # another process has removed it
                os.unlink(whole)
            with suppress(OSError):  # the folder contains other files
                os.rmdir(os.path.dirname(whole))

    def _walk(self) -> Iterator[tuple[str, FileIdentity]]:
        for parent, folders, names in os.walk(self.path):
            folders[:] = [name for name in folders if not name.startswith((".", "tmp-"))]
            for name in names:
                path = os.path.join(parent, name)
                is_hidden = name.startswith(".") and not is_metadata(name)
                if is_hidden or name.endswith(".tmp") or not os.path.isfile(path):
                    continue
                with suppress(OSError):  # the script has removed it meanwhile
                    yield os.path.relpath(path, self.path), identify(path)


@contextmanager
def _reporting_removal(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ChangedFile(f"{path} was removed while it was read") from None


class Mirror:
    """The process: it executes requests, and uploads the folder while the training runs. Raises: UnusableStorage."""

    def __init__(self, config: MirrorConfig, report: Callable[[MirrorEvent], None]) -> None:
        pod = decode_pod(config.pod)
        assert pod.checkpoint is not None
        self._url = pod.checkpoint.url
        self._node = pod.node
        self._is_multi_node = pod.is_multi_node
        self._report = report
        self._folder = CheckpointFolder(config.folder)
        self._ranks = RankReader(pod.runtime)
        system, root = open_storage(self._url)
        self._store = SnapshotStore(system, root, config.attempt, config.run_id, pod.checkpoint.keep)
        self._uploads = False
        self._last: CheckpointSnapshot | None = None
        self._uploaded: dict[str, FileIdentity] = {}  # the complete files at the last upload
        self._announced: dict[str, FileContent] = {}  # shards of this pod since its workers started
        self._metadata: dict[str, FileIdentity] = {}  # the lists of shards, when they were first seen
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
                self._advance(final=False)

    # -- requests

    def _execute(self, request: MirrorRequest) -> None:
        if request.claim:
            self._retry_until_done(self._claim)
        if request.fetch is not None:
            snapshot = request.fetch
            self._retry_until_done(lambda: self._fetch(snapshot))
        if request.flush:
            while not self._advance(final=True, waits_for_shards=not request.align):
                time.sleep(max(_SECONDS_BETWEEN_FLUSHES, self._next_attempt - time.monotonic()))
        if request.align and self._is_multi_node:
            self._retry_until_done(self._align)
        self._report(MirrorEvent(done=self._last.name if self._last else "", number=request.number))

    def _claim(self) -> None:
        if self._node == 0:
            # Pruning starts with this attempt's first snapshot: the newest one in the store may turn out damaged.
            self._last = self._store.claim()
        else:
            self._store.join()
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

    def _align(self) -> None:
        """Make the sharded checkpoints in the folder equal to those of the last snapshot.

        An interrupted checkpoint would otherwise exist in some pods only. Raises: PrefixSuperseded, OSError.
        """
        expected = self._last.files if self._last is not None else {}
        files = self._folder.scan(time.monotonic())
        self._folder.remove(path for path in files if (is_shard(path) or is_metadata(path)) and path not in expected)
        self._announced = {}
        self._metadata = {}
        if self._node != 0:
            return
        if self._last is not None and not set(expected) <= set(files):
            self._store.fetch(self._last.name, self._folder.path, known=files)
            self._folder.adopt(self._last)
        self._store.forget_shards()

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

    def _advance(self, *, final: bool, waits_for_shards: bool = True) -> bool:
        """Upload the changes. Returns whether the store has everything.

        ``final``: all files are complete. ``waits_for_shards``: of other pods; else checkpoints without them are left
        out. A failure is reported and retried later. Raises: PrefixSuperseded, UnusableStorage.
        """
        if time.monotonic() < self._next_attempt and not final:
            return False
        try:
            if self._node == 0:
                return self._upload_changes(final=final, waits_for_shards=waits_for_shards)
            return self._upload_shards(final=final)
        except (PrefixSuperseded, UnusableStorage):
            raise
        except ChangedFile as error:
            log(f"{error}: scanning the folder again")
            return False
        except Exception as error:  # each fsspec plug-in raises different types; the problem is reported
            self._note_failure(_describe_error(error))
            return False

    def _upload_shards(self, *, final: bool) -> bool:
        """Announce and upload the shards that the ranks of this pod have written. Returns whether that is done."""
        now = time.monotonic()
        files = self._folder.scan(now)
        own = {
            path: identity for path, identity in files.items() if is_shard(path) and not self._folder.is_fetched(path)
        }
        incomplete = IncompleteFiles(set(), set()) if final else self._folder.find_incomplete(own, now)
        unsure = incomplete.unfinished | incomplete.recent
        complete = {path: identity for path, identity in own.items() if path not in unsure}
        if complete == self._uploaded:
            return True
        contents = {path: self._folder.digest(path) for path in complete}
        for path, content in contents.items():
            if self._announced.setdefault(path, content) != content:
                raise UnusableStorage(_describe_overwritten(path))
        self._store.announce(self._node, {path: self._announced[path] for path in own if path in self._announced})
        self._store.upload(self._folder.path, contents)
        self._uploaded = complete
        log(f"uploaded {len(contents)} shards of this pod")
        self._note_success()
        return True

    def _upload_changes(self, *, final: bool, waits_for_shards: bool) -> bool:
        """Upload the folder if it has changed and is complete. Returns whether the store now equals it."""
        now = time.monotonic()
        # Read the step before the scan: a file saved in between belongs to a later step.
        progress = self._ranks.progress() if final or self._pending else None
        step = progress.checkpoint_step if progress is not None else None
        files = self._folder.scan(now)
        changed = {path for path in {*files, *self._uploaded} if files.get(path) != self._uploaded.get(path)}
        partition = next(filter(is_partition, sorted(files)), None)
        if self._is_multi_node and partition is not None:
            raise UnusableStorage(_describe_partition(partition))
        incomplete = IncompleteFiles(set(), set())
        if changed and not final:
            incomplete = self._folder.find_incomplete(files, now)
        sharded = self._find_sharded(files, incomplete) if changed else ShardedCheckpoints(set(), set(), {})
        held_back = {path for path in files if os.path.dirname(path) in sharded.incomplete}
        if final and waits_for_shards and sharded.awaited:
            return False
        if not final:
            incomplete = IncompleteFiles(incomplete.unfinished | held_back, incomplete.recent - held_back)
        awaited = self._find_awaited(incomplete, now)
        excluded = incomplete.unfinished | awaited | held_back

        pending = bool(changed - (excluded - awaited))
        if pending != self._pending:
            self._pending = pending
            self._report_state()
        if awaited or not pending:
            return not pending
        self._save(files, excluded, sharded, step)
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

    def _find_sharded(self, files: Mapping[str, FileIdentity], incomplete: IncompleteFiles) -> ShardedCheckpoints:
        """Return the state of the checkpoints with shards. Raises: UnusableStorage, ChangedFile."""
        unsure = incomplete.unfinished | incomplete.recent
        self._metadata = {path: identity for path, identity in self._metadata.items() if path in files}
        names = {}
        for path in files:
            if is_metadata(path) and path not in unsure:
                names[os.path.dirname(path)] = self._folder.read_shard_names(path)
                self._check_overwritten(path, files, names[os.path.dirname(path)])
        before = self._last.files if self._last else {}
        foreign = {path: content for path, content in before.items() if is_shard(path) and path not in files}
        missing = find_missing_shards(names, {*files, *foreign})
        if missing and self._is_multi_node:
            shards = self._store.read_shards()
            foreign |= {path: content for path, content in shards.items() if path not in files}
            missing = find_missing_shards(names, {*files, *foreign})
        without_list = list_checkpoint_folders(files) - set(names)
        named = {os.path.join(folder, name) for folder in names for name in names[folder]}
        complete = {path: content for path, content in foreign.items() if path in named}
        return ShardedCheckpoints(without_list | set(missing), set(missing), complete)

    def _check_overwritten(self, path: str, files: Mapping[str, FileIdentity], names: Iterable[str]) -> None:
        """Refuse a checkpoint that replaces one in the same folder, if other pods have some of its shards.

        The former shards could not be distinguished from these. Raises: UnusableStorage, ChangedFile.
        """
        identity = files[path]
        is_changed = self._metadata.setdefault(path, identity) != identity
        if self._last is not None and path in self._last.files:
            is_changed = is_changed or self._folder.digest(path) != self._last.files[path]
        if not is_changed:
            return
        shards = [os.path.join(os.path.dirname(path), name) for name in names]
        if any(shard not in files or self._folder.is_fetched(shard) for shard in shards):
            raise UnusableStorage(_describe_overwritten(path))
        self._metadata[path] = identity

    def _save(
        self,
        files: Mapping[str, FileIdentity],
        excluded: set[str],
        sharded: ShardedCheckpoints,
        step: float | None,
    ) -> None:
        """Write a snapshot. Of excluded files it has the content in the last snapshot, if any.

        Raises: PrefixSuperseded, ChangedFile, OSError.
        """
        newest_first = sorted(files, key=lambda path: files[path].modified, reverse=True)
        complete = {path: self._folder.digest(path) for path in newest_first if path not in excluded}
        before = self._last.files if self._last else {}
        kept = {
            path: content
            for path, content in before.items()
            if path in excluded or os.path.dirname(path) in sharded.incomplete
        }
        contents = {**complete, **sharded.foreign, **kept}
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


def _describe_overwritten(path: str) -> str:
    return (
        f"{path} was saved again in the same folder. With checkpoint.url and several pods, save each checkpoint of "
        "torch.distributed.checkpoint in a folder of its own, such as step-100."
    )


def _describe_partition(path: str) -> str:
    return (
        f"{path} is a partition of a checkpoint of DeepSpeed's ZeRO, and other pods have its other partitions. From "
        "other pods checkpoint.url uploads only shards of torch.distributed.checkpoint. Use checkpoint.claimName."
    )


def find_step(paths: Iterable[str]) -> int | None:
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
