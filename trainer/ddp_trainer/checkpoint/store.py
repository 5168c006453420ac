"""Checkpoints that are either whole or not there.

A checkpoint is a data file ``step-000000120.pt`` (a plain ``torch.load`` file) and a manifest
``step-000000120.json`` with its length and SHA-256. Both are written to a temporary name, synced and renamed, the
manifest last: without one a data file does not count. Only rank 0 reads and writes; the others get the bytes from it,
so that the folder need not be shared and all ranks surely resume from the same one.

Where attempts are counted (``DDP_ATTEMPT``), names end in ``-attempt-2`` and so on, and an attempt removes no file of
a later one: what an attempt that should be dead writes can't harm another's. See :mod:`ddp_trainer.checkpoint.fence`.
"""

import hashlib
import io
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ddp_trainer.checkpoint import CheckpointConfig
from ddp_trainer.checkpoint.fence import FOLDER as FENCE_FOLDER
from ddp_trainer.checkpoint.fence import Fence
from ddp_trainer.checkpoint.lock import FolderLock
from ddp_trainer.distributed.world import World
from ddp_trainer.errors import Superseded, UserError, warn
from ddp_trainer.files import fsync_folder, replacing, writable, write_atomically

MANIFEST_VERSION = 1
# In the manifest, not in the state, which is the same to the bit in every run of these steps: training time so far.
SECONDS = "trainingSeconds"


class Snapshot:
    """A state as it was when this was made.

    Tensors on a GPU are first copied there, which the device does in its turn while the host goes on; the way to the
    host's memory is taken by whoever calls :meth:`to_cpu`. It costs the size of the state in device memory for a while.
    Where that is not to be had, the copy goes to the host at once.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        devices: set[torch.device] = set()

        def clone(tensor: Tensor) -> Tensor:
            if tensor.is_cuda:
                devices.add(tensor.device)
            return tensor.detach().clone()

        try:
            self._state = tree_map_only(Tensor, clone, state)
        except torch.OutOfMemoryError:
            devices.clear()
            self._state = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)
        self._copied = []
        for device in devices:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._copied.append((device, event))

    def to_cpu(self, streams: "CopyStreams") -> dict[str, Any]:
        """The state with every tensor on the CPU. Call it once, from any thread; the device memory is given back."""
        for device, event in self._copied:
            stream = streams.get(device)
            with torch.cuda.stream(stream):
                event.wait(stream)
                self._state = tree_map_only(Tensor, partial(_fetch, device), self._state)
            stream.synchronize()
        self._copied = []
        state: dict[str, Any] = self._state
        return state


class CopyStreams:
    """One stream a device for copies beside the next steps.

    torch hands out 32 streams a device in turn: one taken for each checkpoint would sooner or later be the step's own.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def get(self, device: torch.device) -> Any:
        """The stream of ``device``, the same one each time."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def _fetch(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to("cpu") if tensor.device == device else tensor


class HashingFile:
    """A file to write to that takes the checksum on the way, so that the data is not read again."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0
        # torch.save puts words of its own in the place of this.
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write ``data`` and count it."""
        self.digest.update(data)
        try:
            written = self._file.write(data)
        except OSError as error:
            self.failure = error
            raise
        self.size += written
        return written

    def flush(self) -> None:
        """Pass on what is buffered."""
        self._file.flush()


@dataclass(frozen=True)
class Saved:
    """What the manifest says of one checkpoint."""

    step: int
    accuracy: float | None
    data: Path
    manifest: Path
    sha256: str
    size: int
    attempt: int
    # Training time of the run up to it; 0 where an earlier version wrote it.
    seconds: float = 0.0


@dataclass(frozen=True)
class _Job:
    """A snapshot on its way to the disk."""

    snapshot: Snapshot
    step: int
    accuracy: float | None
    run: dict[str, Any]
    started: float
    on_saved: Callable[[int, float], None] | None


class Checkpointer:
    """Rank 0's folder of checkpoints. Saving returns when the state is copied; a thread writes it.

    One checkpoint is written at a time. One more may wait; where the disk is so slow that a third comes, the waiting
    one gives way to it: the step loop never stands still for the disk, and at most two copies are in memory.
    """

    def __init__(self, config: CheckpointConfig, fence: Fence | None = None) -> None:
        assert config.dir is not None
        self.folder = Path(config.dir)
        self.keep = config.keep
        self.fence = fence
        # What the run has resumed from.
        self.resumed: Saved | None = None
        self._folder_lock = FolderLock(self.folder)
        # Set by the writing thread when a later attempt has taken the folder over; nothing is written from then on.
        self.superseded: Superseded | None = None
        # Called then, from that thread.
        self.on_superseded: Callable[[], None] = lambda: None
        self._streams = CopyStreams()
        self._lock = threading.Lock()
        self._waiting: _Job | None = None
        self._thread: threading.Thread | None = None

    def prepare(self) -> None:
        """Make the folder; raises :class:`UserError` where it can't be written to."""
        with writable(self.folder, "checkpoint.dir"):
            write_atomically(self.folder / ".writable", b"")
            (self.folder / ".writable").unlink()

    def claim(self) -> None:
        """Take the folder for this attempt and clear away what dead writers left half-written.

        Raises :class:`Superseded` where a later attempt has begun, :class:`UserError` where another run is using it.
        """
        if self.fence is not None:
            self.fence.claim()
        else:
            self._folder_lock.acquire()
        for pattern in (".step-*.tmp", f"{FENCE_FOLDER}/.*.tmp"):
            for temporary in self.folder.glob(pattern):
                temporary.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the folder to other runs, once nothing is being written."""
        self.wait()
        self._folder_lock.release()

    def check_fence(self) -> None:
        """Raise :class:`Superseded` unless this attempt may still write here."""
        if self.superseded is not None:
            raise self.superseded
        if self.fence is not None:
            self.fence.check()

    def list(self) -> list[Saved]:
        """All checkpoints with a readable manifest, the newest first."""
        found = []
        for path in self.folder.glob("step-*.json"):
            try:
                found.append(_read_manifest(path))
            except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
                warn(f"manifest {path} can't be read ({error}); skipped")
        return sorted(found, key=lambda saved: (saved.step, saved.attempt), reverse=True)

    def read_newest(self) -> bytes | None:
        """The bytes of the newest checkpoint whose checksum is right; damaged ones are skipped with a warning."""
        found = self.list()
        for saved in found:
            try:
                data = saved.data.read_bytes() if saved.data.stat().st_size == saved.size else b""
            except OSError as error:
                warn(f"checkpoint {saved.data} can't be read ({error.strerror or error}); trying an older one")
                continue
            if len(data) != saved.size or hashlib.sha256(data).hexdigest() != saved.sha256:
                warn(f"checkpoint {saved.data} is damaged (its checksum is wrong); trying an older one")
                continue
            self.resumed = saved
            return data
        if found:
            warn(f"no checkpoint in {self.folder} is whole; training starts from the beginning")
        return None

    def save(
        self,
        state: dict[str, Any],
        step: int,
        accuracy: float | None,
        run: dict[str, Any],
        on_saved: Callable[[int, float], None] | None = None,
    ) -> None:
        """Copy ``state`` and write it as the checkpoint of ``step`` in the background; ``run`` goes into the manifest.

        ``on_saved`` is called from the writing thread with the step and the seconds it took. A write that fails is a
        warning: what was saved before stays, and the run goes on.
        """
        if self.superseded is not None:
            return
        started = time.perf_counter()
        job = _Job(Snapshot(state), step, accuracy, run, started, on_saved)
        with self._lock:
            left_out, self._waiting = self._waiting, job
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ddp-checkpoint")
                self._thread.start()
        if left_out is not None:
            warn(f"checkpoint of step {left_out.step} is skipped: the disk is slower than checkpoints are due")

    def wait(self) -> None:
        """Wait until nothing is being written and nothing waits."""
        while (thread := self._thread) is not None:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                job, self._waiting = self._waiting, None
                if job is None:
                    self._thread = None
                    return
            self._write(job)
            del job  # with its snapshot, before the wait for the next one

    def _write(self, job: _Job) -> None:
        step = job.step
        try:
            self.check_fence()
            self._write_files(job)
        except Superseded as error:
            self.superseded = error
            self.on_superseded()
            return
        except Exception as error:  # a full disk, no memory, a state that can't be pickled: training goes on
            warn(f"checkpoint of step {step} was not saved ({error}); older ones stay")
            return
        if job.on_saved is not None:
            job.on_saved(step, time.perf_counter() - job.started)

    def _write_files(self, job: _Job) -> None:
        attempt = 0 if self.fence is None else self.fence.attempt
        stem = _stem(job.step, attempt)
        data = self.folder / f"{stem}.pt"
        manifest_path = data.with_suffix(".json")
        try:
            with replacing(data, durable=True, check=self.check_fence) as file:
                hashing = HashingFile(file)
                try:
                    torch.save(job.snapshot.to_cpu(self._streams), cast("IO[bytes]", hashing))
                except RuntimeError as error:
                    raise hashing.failure or error from None
            manifest = {
                "version": MANIFEST_VERSION,
                "step": job.step,
                "accuracy": job.accuracy,
                "attempt": attempt,
                "file": data.name,
                "sha256": hashing.digest.hexdigest(),
                "bytes": hashing.size,
                "time": time.time(),
                "run": job.run,
            }
            write_atomically(manifest_path, json.dumps(manifest, indent=2).encode(), durable=True)
        except BaseException:
            if not manifest_path.exists():
                data.unlink(missing_ok=True)  # It would never count, and take the place of one that does.
            raise
        self._prune(attempt)

    def _prune(self, attempt: int) -> None:
        """Remove all but the newest ``keep`` and the best; the manifest goes first, so that no half one is left."""
        saved = self.list()
        rated = [one for one in saved if one.accuracy is not None]
        best = max(rated, key=lambda one: (one.accuracy, one.step)) if rated else None
        for old in saved[self.keep :]:
            if old is not best and old.attempt <= attempt:
                old.manifest.unlink(missing_ok=True)
                old.data.unlink(missing_ok=True)
        fsync_folder(self.folder)


def load_newest(checkpointer: Checkpointer | None, world: World) -> dict[str, Any] | None:
    """The newest good checkpoint's state on every rank, on the CPU; only rank 0's ``checkpointer`` is asked."""
    data = world.broadcast_bytes(checkpointer.read_newest() if checkpointer is not None and world.is_main else None)
    if data is None:
        return None
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch promises nothing about what it cannot load
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            "checkpoint.dir", f"the newest checkpoint is not one of this trainer's ({reason})", "give another folder"
        ) from error
    return state


def _read_manifest(path: Path) -> Saved:
    """What a manifest says. It is trusted with nothing that its own name does not say as well."""
    manifest = json.loads(path.read_text())
    step, attempt = int(manifest["step"]), int(manifest.get("attempt", 0))
    data = path.with_suffix(".pt")
    if manifest["file"] != data.name:  # it is read, and one day deleted: never what lies elsewhere
        raise ValueError(f"its file {manifest['file']} is not beside it")
    if path.stem != _stem(step, attempt):
        raise ValueError("it is another checkpoint's")
    accuracy = None if manifest["accuracy"] is None else float(manifest["accuracy"])
    checksum = str(manifest["sha256"])
    return Saved(step, accuracy, data, path, checksum, int(manifest["bytes"]), attempt, _read_seconds(manifest))


def _read_seconds(manifest: dict[str, Any]) -> float:
    """Training time in a manifest; 0 where there is none, for no checkpoint is lost over it."""
    run = manifest.get("run")
    seconds = run.get(SECONDS) if isinstance(run, dict) else None
    if isinstance(seconds, int | float) and 0.0 <= seconds < math.inf:
        return float(seconds)
    return 0.0


def _stem(step: int, attempt: int) -> str:
    return f"step-{step:09d}" + (f"-attempt-{attempt}" if attempt else "")
