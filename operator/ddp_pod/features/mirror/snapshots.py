"""Snapshots of the checkpoint folder in a file system of fsspec.

    fence/000000002-000000003-<run id>.json   the second claim of the prefix, by attempt 3
    objects/<sha256>                          a file's content; immutable, shared by all snapshots that contain it
    snapshots/000000002-000000017.json        the manifest of a snapshot by the second claim; written last
    parts/000000002-000003-000000004.json     the fourth list of the shards in pod 3, written before their contents

Every write creates a new name, so the store needs no lock, rename or conditional write. Its listings have to contain
all earlier writes, as those of S3, GCS, Azure and file systems do.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...base.files import log
from ...transfer.sources import make_folder

VERSION = 1
_CHUNK = 1 << 20
_MAX_PARTS_BYTES = 64 << 20  # of the lists of all pods
_PARALLEL = 4  # files transferred at the same time
_DOWNLOAD_ATTEMPTS = 2  # the second corrects damage in transit
_TEMPORARY = ".ddp-fetch-"
# Errors of reading JSON that another program has written.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError)
_OBJECT = re.compile(r"[0-9a-f]{64}")
_CLAIM_FILE = re.compile(r"(\d{9})-(\d{9})-(.*)\.json")
_MANIFEST_FILE = re.compile(r"\d{9}-\d{9}\.json")
_PART_FILE = re.compile(r"(\d{9})-(\d{6})-(\d{9})\.json")


class PrefixSuperseded(Exception):
    """Another attempt has claimed the prefix; this one must not write."""

    def __init__(self, message: str, *, same_job: bool) -> None:
        super().__init__(message)
        self.same_job = same_job


class DamagedSnapshot(Exception):
    """A snapshot is incomplete or corrupt."""


class ChangedFile(Exception):
    """A file was changed or removed while it was read."""


class FileContent(NamedTuple):
    """A file's content: its SHA-256 in hex and its size in bytes."""

    digest: str
    size: int


class FileIdentity(NamedTuple):
    """Metadata that changes with every change of a file."""

    size: int
    modified: int
    changed: int
    inode: int


@dataclass(frozen=True)
class CheckpointSnapshot:
    """A manifest. ``files``: the content of each file by its path in the folder."""

    name: str
    files: dict[str, FileContent]
    step: int | None
    time: float


@dataclass(frozen=True)
class PrefixClaim:
    """One attempt's claim of the prefix. The last claim holds it."""

    number: int
    attempt: int
    run_id: str

    @property
    def name(self) -> str:
        """The claim's file name. Names sort by number, and two claims with the same number by attempt."""
        return f"{self.number:09d}-{self.attempt:09d}-{self.run_id}.json"

    @property
    def job(self) -> str:
        """The job in the run id, which is ``<job>-<attempt>``."""
        suffix = f"-{self.attempt}"
        return self.run_id[: -len(suffix)] if self.run_id.endswith(suffix) else self.run_id


class PartName(NamedTuple):
    """Which pod wrote a list of shards. ``number``: the last list of a pod replaces its former ones."""

    claim: int
    pod: int
    number: int

    @property
    def path(self) -> str:
        """The path below the root."""
        return f"parts/{self.claim:09d}-{self.pod:06d}-{self.number:09d}.json"


class SnapshotStore:
    """The snapshots below ``root``, written by one attempt. Raises the file system's errors unchanged."""

    def __init__(self, system: Any, root: str, attempt: int, run_id: str, keep: int) -> None:
        self._system = system
        self._root = root
        self._keep = keep
        self._own = PrefixClaim(0, attempt, re.sub(r"[^-.\w]", "_", run_id))
        self._number = 0  # of this attempt's last snapshot
        self._manifests: dict[str, CheckpointSnapshot] = {}
        self._parts: dict[PartName, dict[str, FileContent]] = {}
        self._damaged_objects: set[str] = set()
        self.bytes = 0  # uploaded

    # -- the fence

    def claim(self) -> CheckpointSnapshot | None:
        """Claim the prefix for this attempt, or keep the claim of this attempt's former process.

        Returns the last snapshot by this attempt, None if it has none. Raises: PrefixSuperseded.
        """
        claims = self._read_claims()
        if not self._find_own(claims):
            newest = claims[-1] if claims else PrefixClaim(0, 0, "")
            if newest.job == self._own.job and newest.attempt > self._own.attempt:
                raise self._explain(newest)
            self._own = PrefixClaim(newest.number + 1, self._own.attempt, self._own.run_id)
            self._write(f"fence/{self._own.name}", json.dumps({"time": time.time()}).encode())

        written = [name for name in self.list() if name.startswith(f"{self._own.number:09d}-")]
        self._number = max((int(name[10:]) for name in written), default=0)
        self.check()
        return self.read(written[-1]) if written else None

    def join(self) -> None:
        """Write below the claim that pod 0 has made for this attempt. Raises: PrefixSuperseded, OSError."""
        if not self._find_own(self._read_claims()):
            raise OSError(f"pod 0 has not claimed {self._root} yet")
        self.check()

    def _find_own(self, claims: Iterable[PrefixClaim]) -> bool:
        """Take up the claim of this attempt. Returns whether it exists."""
        own = [claim for claim in claims if (claim.attempt, claim.run_id) == (self._own.attempt, self._own.run_id)]
        self._own = own[0] if own else self._own
        return bool(own)

    def check(self) -> None:
        """Raise PrefixSuperseded unless this attempt holds the prefix or no claim exists."""
        claims = self._read_claims()
        if claims and claims[-1] != self._own:
            raise self._explain(claims[-1])

    def _read_claims(self) -> list[PrefixClaim]:
        matches = [_CLAIM_FILE.fullmatch(name) for name in self._list("fence")]
        claims = [PrefixClaim(int(match[1]), int(match[2]), match[3]) for match in matches if match]
        return sorted(claims, key=lambda claim: claim.name)

    def _explain(self, newest: PrefixClaim) -> PrefixSuperseded:
        same_job = newest.job == self._own.job
        owner = f"attempt {newest.attempt}" if same_job else f"another job (run {newest.run_id})"
        message = f"{owner} has taken over {self._root}: attempt {self._own.attempt} stops uploading"
        return PrefixSuperseded(message, same_job=same_job)

    # -- reading

    def list(self) -> list[str]:
        """Return the names of all snapshots, the newest last."""
        names = [name for name in self._list("snapshots") if _MANIFEST_FILE.fullmatch(name)]
        return sorted(name[: -len(".json")] for name in names)

    def read(self, name: str) -> CheckpointSnapshot:
        """Return a snapshot's manifest. Raises: DamagedSnapshot."""
        if name not in self._manifests:
            try:
                raw = json.loads(self._system.cat_file(self._path(f"snapshots/{name}.json")))
                self._manifests[name] = _decode_manifest(name, raw)
            except (*_MALFORMED, FileNotFoundError) as error:
                raise DamagedSnapshot(f"its manifest is unreadable ({type(error).__name__}: {error})") from None
        return self._manifests[name]

    def fetch_newest(self, folder: str) -> CheckpointSnapshot | None:
        """Download the newest intact snapshot into the folder; log those that are damaged.

        Returns the snapshot, None if there is none. Raises: OSError of the folder.
        """
        damaged: set[str] = set()
        while True:
            names = [name for name in self.list() if name not in damaged]
            if not names:
                break
            try:
                return self.fetch(names[-1], folder)
            except DamagedSnapshot as error:
                damaged.add(names[-1])
                log(f"snapshot {names[-1]} in {self._root} is skipped, trying an older one: {error}")
        if damaged:
            log(f"all snapshots in {self._root} are damaged: training starts from the beginning")
        return None

    def fetch(self, name: str, folder: str, known: Iterable[str] = ()) -> CheckpointSnapshot:
        """Download the files of a snapshot that the folder does not have yet. Raises: DamagedSnapshot, OSError.

        ``known``: paths whose content in the folder is right.
        """
        snapshot = self.read(name)
        _remove_temporary_files(folder)
        right = set(known)
        unknown = [(path, content) for path, content in snapshot.files.items() if path not in right]
        with ThreadPoolExecutor(_PARALLEL) as pool:
            list(pool.map(lambda item: self._fetch_file(folder, *item), unknown))
        return snapshot

    def _fetch_file(self, folder: str, path: str, content: FileContent) -> None:
        target = os.path.join(folder, path)
        with suppress(OSError):  # the folder has no such file
            if _has_content(target, content):
                return
        os.makedirs(os.path.dirname(target), exist_ok=True)
        temporary = os.path.join(folder, f"{_TEMPORARY}{os.getpid()}-{hashlib.sha256(path.encode()).hexdigest()[:16]}")
        try:
            for _ in range(_DOWNLOAD_ATTEMPTS):
                try:
                    self._system.get_file(self._path(f"objects/{content.digest}"), temporary)
                except FileNotFoundError:
                    break
                if _has_content(temporary, content):
                    os.replace(temporary, target)
                    return
            self._damaged_objects.add(content.digest)
            raise DamagedSnapshot(
                f"the content of {path} (objects/{content.digest}) is missing or has another checksum"
            )
        finally:
            with suppress(OSError):  # it was renamed or never created
                os.unlink(temporary)

    # -- writing

    def upload(self, folder: str, files: Mapping[str, FileContent]) -> None:
        """Upload the files' contents that the store does not have, in the given order. Raises: ChangedFile, OSError."""
        stored = self._list("objects")
        missing: dict[FileContent, str] = {}
        for path, content in files.items():
            if stored.get(content.digest) != content.size or content.digest in self._damaged_objects:
                missing[content] = os.path.join(folder, path)
        with ThreadPoolExecutor(_PARALLEL) as pool:
            list(pool.map(lambda item: self._upload_file(item[1], item[0]), missing.items()))

    def _upload_file(self, source: str, content: FileContent) -> None:
        name = f"objects/{content.digest}"
        try:
            before = identify(source)
            self._make_folder("objects")
            self._system.put_file(source, self._path(name))
            changed = before.size != content.size or identify(source) != before
        except FileNotFoundError:
            if os.path.exists(source):
                raise
            changed = True
        if changed:
            self._remove([name])  # its content may differ from its name
            raise ChangedFile(f"{source} was changed or removed while it was uploaded")
        self._damaged_objects.discard(content.digest)
        self.bytes += content.size

    def write(self, files: Mapping[str, FileContent], step: int | None) -> CheckpointSnapshot:
        """Write the manifest of a snapshot whose contents were uploaded. Raises: PrefixSuperseded, OSError."""
        stored = self._list("objects")
        self.check()
        missing = [path for path, content in files.items() if stored.get(content.digest) != content.size]
        if missing:
            raise OSError(f"{self._root} lacks uploaded files: {', '.join(missing[:3])}")
        name = f"{self._own.number:09d}-{self._number + 1:09d}"
        snapshot = CheckpointSnapshot(name, dict(files), step, time.time())
        manifest = {
            "version": VERSION,
            "attempt": self._own.attempt,
            "runId": self._own.run_id,
            "step": step,
            "time": snapshot.time,
            "files": snapshot.files,
        }
        self._write(f"snapshots/{name}.json", json.dumps(manifest, indent=1).encode())
        self._number += 1
        self._manifests[name] = snapshot
        return snapshot

    # -- shards in other pods than pod 0

    def announce(self, pod: int, shards: Mapping[str, FileContent]) -> None:
        """Write which shards a pod has; their contents follow. Raises: PrefixSuperseded, OSError.

        ``prune`` removes no content of an announced shard.
        """
        former = [part for part in self._measure_parts() if part.pod == pod]
        self.check()
        number = max((part.number for part in former if part.claim == self._own.number), default=0)
        part = PartName(self._own.number, pod, number + 1)
        self._write(part.path, json.dumps({"version": VERSION, "files": dict(shards)}, indent=1).encode())
        self._remove(part.path for part in former)

    def read_shards(self) -> dict[str, FileContent]:
        """Return the announced shards of all pods whose contents are uploaded. Raises: OSError."""
        announced = self._read_announced()
        stored = self._list("objects")
        return {path: content for path, content in announced.items() if stored.get(content.digest) == content.size}

    def forget_shards(self) -> None:
        """Remove the lists of all pods: every shard that counts belongs to a snapshot. Raises: PrefixSuperseded."""
        parts = self._measure_parts()
        self.check()
        self._remove(part.path for part in parts)
        self._parts = {}  # the pods number their lists from 1 again

    def _read_announced(self) -> dict[str, FileContent]:
        sizes = self._measure_parts()
        newest: dict[int, PartName] = {}
        for part in sorted(sizes):
            if part.claim == self._own.number:
                newest[part.pod] = part
        needed = sum(sizes[part] for part in newest.values())
        if needed > _MAX_PARTS_BYTES:
            raise OSError(
                f"the lists of shards of all pods contain {needed >> 20} MiB, more than {_MAX_PARTS_BYTES >> 20} MiB. "
                "Delete old checkpoints in every pod, or save fewer shards."
            )
        self._parts = {part: files for part, files in self._parts.items() if part in newest.values()}
        shards: dict[str, FileContent] = {}
        for part in newest.values():
            if part not in self._parts:
                with suppress(FileNotFoundError):  # the pod has written another one
                    self._parts[part] = _decode_part(self._system.cat_file(self._path(part.path)))
            shards.update(self._parts.get(part, {}))
        return shards

    def _measure_parts(self) -> dict[PartName, int]:
        """Return the sizes of the lists of all pods in bytes."""
        matches = {_PART_FILE.fullmatch(name): size for name, size in self._list("parts").items()}
        return {PartName(int(match[1]), int(match[2]), int(match[3])): size for match, size in matches.items() if match}

    def prune(self) -> None:
        """Remove all but the newest snapshots, and the objects that no snapshot needs; nothing of a later attempt.

        Raises: PrefixSuperseded, OSError.
        """
        objects = self._list("objects")
        names = self.list()
        announced = self._read_announced()
        self.check()  # after the listings, so that they contain nothing of a later attempt
        needed = {content.digest for content in announced.values()}
        for name in names[-self._keep :]:
            with suppress(DamagedSnapshot):  # a damaged manifest needs no object
                needed.update(content.digest for content in self.read(name).files.values())
        self._remove(f"snapshots/{name}.json" for name in names[: -self._keep])
        self._remove(f"objects/{digest}" for digest in objects if digest not in needed)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._system.rm_file(self._path(name))

    # -- the file system

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _write(self, name: str, content: bytes) -> None:
        self._make_folder(os.path.dirname(name))
        self._system.pipe_file(self._path(name), content)

    def _make_folder(self, name: str) -> None:
        make_folder(self._system, self._path(name))

    def _list(self, folder: str) -> dict[str, int]:
        """Return the sizes of the files in a folder by name."""
        try:
            entries = self._system.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return {}
        return {str(entry["name"]).rstrip("/").rpartition("/")[2]: int(entry["size"] or 0) for entry in entries}


def _decode_manifest(name: str, raw: Any) -> CheckpointSnapshot:
    """Read a manifest. Raises: ValueError, LookupError, TypeError, AttributeError."""
    if raw["version"] != VERSION:
        raise ValueError("it has another version")
    step = None if raw["step"] is None else int(raw["step"])
    return CheckpointSnapshot(name, _decode_files(raw), step, float(raw["time"]))


def _decode_part(data: bytes) -> dict[str, FileContent]:
    """Read a list of shards. Raises: ValueError."""
    try:
        return _decode_files(json.loads(data))
    except _MALFORMED as error:
        raise ValueError(f"a list of shards is unreadable ({type(error).__name__}: {error})") from None


def _decode_files(raw: Any) -> dict[str, FileContent]:
    """Read the files of a manifest or a list. Raises: ValueError, LookupError, TypeError, AttributeError."""
    files = {path: FileContent(str(digest), int(size)) for path, (digest, size) in raw["files"].items()}
    if not all(path and not os.path.isabs(path) and ".." not in path.split("/") for path in files):
        raise ValueError("it names files outside of the folder")
    if not all(_OBJECT.fullmatch(content.digest) for content in files.values()):
        raise ValueError("it has invalid object names")
    return files


def _remove_temporary_files(folder: str) -> None:
    """Remove the downloads of a killed process."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(_TEMPORARY):
                os.unlink(os.path.join(folder, name))


def _has_content(path: str, content: FileContent) -> bool:
    """Return whether a file has this content. Raises: OSError."""
    return os.path.getsize(path) == content.size and hash_file(path) == content.digest


def identify(path: str) -> FileIdentity:
    """Return metadata that changes with every change of a file. Raises: OSError."""
    status = os.stat(path)
    return FileIdentity(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def hash_file(path: str) -> str:
    """Return the SHA-256 of a file in hex. Raises: OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
