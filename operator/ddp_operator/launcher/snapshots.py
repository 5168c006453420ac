"""Snapshots of a folder of checkpoints in a file system of fsspec's.

    fence/000000002-000000003-<run id>.json   the second claim of the prefix, by attempt 3
    objects/<sha256>                          a file's content; never changed, shared by all snapshots that have it
    snapshots/000000002-000000017.json        the manifest of a snapshot, by the second claim; written last

What is written is only ever a new name, so nothing here needs a lock, a rename or a conditional write of the store: it
has to list what was written before, as S3, GCS, Azure and file systems do.
"""

import hashlib
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Iterable, Optional

from .files import log

VERSION = 1
_CHUNK = 1 << 20
_AT_ONCE = 4  # files on their way
_TEMPORARY = ".ddp-fetch-"
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "hf"}  # makedirs would make a bucket
_OBJECT = re.compile(r"[0-9a-f]{64}")


class PrefixSuperseded(Exception):
    """Another attempt has claimed the prefix: this one writes no more."""

    def __init__(self, message: str, *, same_job: bool) -> None:
        super().__init__(message)
        self.same_job = same_job


class Damaged(Exception):
    """A snapshot that is not whole."""


class Changed(Exception):
    """A file was changed or removed while it was read."""


@dataclass(frozen=True)
class CheckpointSnapshot:
    """A manifest. ``files``: the SHA-256 and the size of each file, by its path in the folder."""

    name: str
    files: dict[str, tuple[str, int]]
    step: Optional[int]
    time: float


@dataclass(frozen=True)
class PrefixClaim:
    """One attempt's place in the order of those that have claimed the prefix; the last one holds it."""

    number: int
    attempt: int
    run_id: str

    @property
    def name(self) -> str:
        """The claim's file, whose name says all of it: of two with one number the later attempt's is the last."""
        return f"{self.number:09d}-{self.attempt:09d}-{self.run_id}.json"

    @property
    def job(self) -> str:
        """The job in the run id, which is ``<job>-<attempt>``."""
        end = f"-{self.attempt}"
        return self.run_id[: -len(end)] if self.run_id.endswith(end) else self.run_id


class SnapshotStore:
    """The snapshots below ``root`` as one attempt sees them; errors of the file system pass through."""

    def __init__(self, system: Any, root: str, attempt: int, run_id: str, keep: int) -> None:
        self._system, self._root, self._keep = system, root, keep
        self._own = PrefixClaim(0, attempt, re.sub(r"[^-.\w]", "_", run_id))
        self._number = 0  # of this attempt's last snapshot
        self._manifests: dict[str, CheckpointSnapshot] = {}
        self._suspect: set[str] = set()  # objects that were found damaged
        self.bytes = 0  # that were uploaded

    # -- the fence

    def claim(self) -> Optional[CheckpointSnapshot]:
        """Claim the prefix for this attempt; a process that takes another's place finds the claim, and keeps it.

        Returns the last snapshot by this attempt, None if it has none. Raises: PrefixSuperseded.
        """
        claims = self._read_claims()
        own = [one for one in claims if (one.attempt, one.run_id) == (self._own.attempt, self._own.run_id)]
        if not own:
            newest = claims[-1] if claims else PrefixClaim(0, 0, "")
            if newest.job == self._own.job and newest.attempt > self._own.attempt:
                raise self._explain(newest)
            own = [PrefixClaim(newest.number + 1, self._own.attempt, self._own.run_id)]
            self._write(f"fence/{own[0].name}", json.dumps({"time": time.time()}).encode())
        self._own = own[0]
        written = [name for name in self.list() if name.startswith(f"{self._own.number:09d}-")]
        self._number = max((int(name[10:]) for name in written), default=0)
        self.check()
        return self.read(written[-1]) if written else None

    def check(self) -> None:
        """Raise PrefixSuperseded unless this attempt holds the prefix or no claim exists."""
        claims = self._read_claims()
        if claims and claims[-1] != self._own:
            raise self._explain(claims[-1])

    def _read_claims(self) -> list[PrefixClaim]:
        found = [re.fullmatch(r"(\d{9})-(\d{9})-(.*)\.json", name) for name in self._list("fence")]
        return sorted(
            (PrefixClaim(int(one[1]), int(one[2]), one[3]) for one in found if one), key=lambda claim: claim.name
        )

    def _explain(self, newest: PrefixClaim) -> PrefixSuperseded:
        same_job = newest.job == self._own.job
        who = f"attempt {newest.attempt}" if same_job else f"another job (run {newest.run_id})"
        message = f"{who} has taken over {self._root}: this one, attempt {self._own.attempt}, uploads no more"
        return PrefixSuperseded(message, same_job=same_job)

    # -- reading

    def list(self) -> list[str]:
        """Return the names of all snapshots, the newest last."""
        return sorted(name[:-5] for name in self._list("snapshots") if re.fullmatch(r"\d{9}-\d{9}\.json", name))

    def read(self, name: str) -> CheckpointSnapshot:
        """Return a snapshot's manifest. Raises: Damaged."""
        if name not in self._manifests:
            try:
                raw = json.loads(self._system.cat_file(self._path(f"snapshots/{name}.json")))
                files = {path: (str(digest), int(size)) for path, (digest, size) in raw["files"].items()}
                step = None if raw["step"] is None else int(raw["step"])
                if raw["version"] != VERSION or not all(map(_is_inside, files)):
                    raise ValueError("it is of another version, or names files outside of the folder")
                if not all(_OBJECT.fullmatch(digest) for digest, _ in files.values()):
                    raise ValueError("it names no objects")
                self._manifests[name] = CheckpointSnapshot(name, files, step, float(raw["time"]))
            except (ValueError, LookupError, TypeError, AttributeError, FileNotFoundError) as error:
                raise Damaged(f"its manifest can't be read ({type(error).__name__}: {error})") from None
        return self._manifests[name]

    def fetch_newest(self, folder: str) -> Optional[CheckpointSnapshot]:
        """Bring the newest whole snapshot into the folder; those that are not whole are skipped with a warning.

        Returns the snapshot, None where there is none. Raises: OSError of the folder.
        """
        tried: set[str] = set()
        while True:
            names = [name for name in self.list() if name not in tried]
            if not names:
                break
            tried.add(names[-1])
            try:
                return self.fetch(names[-1], folder)
            except Damaged as error:
                log(f"snapshot {names[-1]} in {self._root} is skipped, an older one is tried: {error}")
        if tried:
            log(f"no snapshot in {self._root} is whole: training starts from the beginning")
        return None

    def fetch(self, name: str, folder: str) -> CheckpointSnapshot:
        """Bring a snapshot into the folder; what is there already is not fetched again. Raises: Damaged, OSError."""
        snapshot = self.read(name)
        with suppress(OSError):
            for left in os.listdir(folder):
                if left.startswith(_TEMPORARY):  # of a process that was killed over it
                    os.unlink(os.path.join(folder, left))
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda item: self._fetch_file(folder, *item), snapshot.files.items()))
        return snapshot

    def _fetch_file(self, folder: str, path: str, content: tuple[str, int]) -> None:
        digest, size = content
        target = os.path.join(folder, path)
        with suppress(OSError):
            if os.path.getsize(target) == size and hash_file(target) == digest:
                return
        os.makedirs(os.path.dirname(target), exist_ok=True)
        temporary = os.path.join(folder, f"{_TEMPORARY}{os.getpid()}-{hashlib.sha256(path.encode()).hexdigest()[:16]}")
        try:
            for _ in range(2):  # what was damaged on the way comes whole the second time
                try:
                    self._system.get_file(self._path(f"objects/{digest}"), temporary)
                except FileNotFoundError:
                    break
                if os.path.getsize(temporary) == size and hash_file(temporary) == digest:
                    os.replace(temporary, target)
                    return
            self._suspect.add(digest)
            raise Damaged(f"the content of {path} (objects/{digest}) is missing or has another checksum")
        finally:
            with suppress(OSError):
                os.unlink(temporary)

    # -- writing

    def upload(self, folder: str, files: dict[str, tuple[str, int]]) -> None:
        """Upload those of the files, the last first, that the store does not have. Raises: Changed, OSError."""
        there = self._list("objects")
        todo = {
            content: path
            for path, content in files.items()
            if there.get(content[0]) != content[1] or content[0] in self._suspect
        }
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda item: self._upload_file(os.path.join(folder, item[1]), *item[0]), todo.items()))

    def _upload_file(self, source: str, digest: str, size: int) -> None:
        try:
            before = identify(source)
            self._make_folder("objects")
            self._system.put_file(source, self._path(f"objects/{digest}"))
            changed = before[0] != size or identify(source) != before
        except FileNotFoundError:
            if os.path.exists(source):
                raise
            changed = True
        if changed:
            self._remove([f"objects/{digest}"])  # whose name promises another content than it may have
            raise Changed(f"{source} was changed or removed while it was uploaded")
        self._suspect.discard(digest)
        self.bytes += size

    def write(self, files: dict[str, tuple[str, int]], step: Optional[int]) -> CheckpointSnapshot:
        """Make a snapshot of files whose contents were uploaded. Raises: PrefixSuperseded, OSError."""
        there = self._list("objects")
        self.check()
        lost = [path for path, (digest, size) in files.items() if there.get(digest) != size]
        if lost:
            raise OSError(f"{self._root} does not have what was uploaded to it: {', '.join(lost[:3])}")
        snapshot = CheckpointSnapshot(f"{self._own.number:09d}-{self._number + 1:09d}", dict(files), step, time.time())
        manifest = {"version": VERSION, "attempt": self._own.attempt, "runId": self._own.run_id, "step": step}
        self._write(
            f"snapshots/{snapshot.name}.json",
            json.dumps({**manifest, "time": snapshot.time, "files": snapshot.files}, indent=1).encode(),
        )
        self._number += 1
        self._manifests[snapshot.name] = snapshot
        return snapshot

    def prune(self) -> None:
        """Remove all but the newest snapshots, and what no snapshot needs; never what a later attempt has written.

        Raises: PrefixSuperseded, OSError.
        """
        objects, names = self._list("objects"), self.list()
        self.check()  # so none of what was listed before is a later attempt's
        old, kept = names[: -self._keep], names[-self._keep :]
        needed: set[str] = set()
        for name in kept:
            with suppress(Damaged):
                needed.update(digest for digest, _ in self.read(name).files.values())
        self._remove(f"snapshots/{name}.json" for name in old)
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
        protocols = self._system.protocol
        if _WITHOUT_FOLDERS.isdisjoint([protocols] if isinstance(protocols, str) else protocols):
            self._system.makedirs(self._path(name), exist_ok=True)

    def _list(self, folder: str) -> dict[str, int]:
        """Return the names below a folder, with their sizes."""
        try:
            found = self._system.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return {}
        return {str(one["name"]).rstrip("/").rpartition("/")[2]: int(one["size"] or 0) for one in found}


def identify(path: str) -> tuple[int, int, int, int]:
    """Return what changes with each change of a file: its size first. Raises: OSError."""
    about = os.stat(path)
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino


def hash_file(path: str) -> str:
    """Return the SHA-256 of a file in hex. Raises: OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _is_inside(path: str) -> bool:
    return bool(path) and not os.path.isabs(path) and ".." not in path.split("/")
