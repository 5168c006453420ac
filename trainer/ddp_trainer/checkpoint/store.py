"""The store of checkpoints, each of which is complete or does not exist.

A checkpoint is a data file ``step-000000120.pt`` (a plain ``torch.load`` file) and a manifest
``step-000000120.json`` with its length and SHA-256. Both are written to a temporary name, synced and renamed, the
manifest last: a data file without a manifest is ignored. Only rank 0 reads and writes, and broadcasts the bytes: the
folder need not be shared, and all ranks resume from the same checkpoint.

With ``DDP_ATTEMPT`` set, names end in ``-attempt-2`` and so on, and an attempt never removes files of a later one: a
superseded attempt can't damage the checkpoints of its successor. See :mod:`ddp_trainer.checkpoint.fence`.
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

from ddp_sdk.errors import UserError
from ddp_sdk.files import fsync_folder, replacing, writable, write_atomically
from ddp_trainer.checkpoint import CheckpointConfig
from ddp_trainer.checkpoint.fence import FOLDER as FENCE_FOLDER
from ddp_trainer.checkpoint.fence import Fence
from ddp_trainer.checkpoint.lock import FolderLock
from ddp_trainer.distributed.world import World
from ddp_trainer.errors import Superseded, warn

MANIFEST_VERSION = 1
# Training time so far. It is in the manifest because the state must be equal to the bit in every run of these steps.
SECONDS = "trainingSeconds"


class StateSnapshot:
    """A copy of a state at the time of construction.

    Tensors on a GPU are first copied within its memory, asynchronously to the host; :meth:`to_cpu` copies them to the
    host, in the thread that calls it. Meanwhile the copy needs the size of the state in device memory. If that is not
    available, the state is copied to the host at once.
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

    def to_cpu(self, streams: dict[torch.device, Any]) -> dict[str, Any]:
        """Return the state with every tensor on the CPU, and release the device memory. Call it once, in any thread.

        ``streams``: one per device for all copies. torch hands out 32 in turn: a new one may be the step's own.
        """
        for device, event in self._copied:
            if device not in streams:
                streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream = streams[device]
            with torch.cuda.stream(stream):
                event.wait(stream)
                self._state = tree_map_only(Tensor, partial(_fetch, device), self._state)
            stream.synchronize()
        self._copied = []
        state: dict[str, Any] = self._state
        return state


def _fetch(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to("cpu") if tensor.device == device else tensor


class HashingFile:
    """A writable file that computes the checksum while it writes, so that the data need not be read again."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0
        # The error of a failed write, which torch.save replaces by its own exception.
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write ``data``, and update checksum and size."""
        self.digest.update(data)
        try:
            written = self._file.write(data)
        except OSError as error:
            self.failure = error
            raise
        self.size += written
        return written

    def flush(self) -> None:
        """Flush the file's buffer."""
        self._file.flush()


@dataclass(frozen=True)
class Saved:
    """A checkpoint by its manifest."""

    step: int
    accuracy: float | None
    data: Path
    manifest: Path
    sha256: str
    size: int
    attempt: int
    # Training time of the run up to this checkpoint; 0 if the manifest has none.
    seconds: float = 0.0


@dataclass(frozen=True)
class _PendingSave:
    """A snapshot that is to be written."""

    snapshot: StateSnapshot
    step: int
    accuracy: float | None
    run: dict[str, Any]
    started: float
    on_saved: Callable[[int, float], None] | None


class Checkpointer:
    """Rank 0's folder of checkpoints. :meth:`save` returns when the state is copied; a thread writes it.

    One checkpoint is written at a time, and one more may wait. A third one replaces the waiting one: training never
    waits for the disk, and at most two copies are in memory.
    """

    def __init__(self, config: CheckpointConfig, fence: Fence | None = None) -> None:
        assert config.dir is not None
        self.folder = Path(config.dir)
        self.keep = config.keep
        self.fence = fence
        # The checkpoint from which the run resumed.
        self.resumed: Saved | None = None
        self._folder_lock = FolderLock(self.folder)
        # Set by the writing thread when a later attempt holds the folder; nothing is written from then on.
        self.superseded: Superseded | None = None
        # Called by the writing thread at that time.
        self.on_superseded: Callable[[], None] = lambda: None
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.Lock()
        self._waiting: _PendingSave | None = None
        self._thread: threading.Thread | None = None

    def prepare(self) -> None:
        """Create the folder; raises :class:`UserError` if it is not writable."""
        with writable(self.folder, "checkpoint.dir"):
            write_atomically(self.folder / ".writable", b"")
            (self.folder / ".writable").unlink()

    def claim(self) -> None:
        """Claim the folder for this attempt, and remove incomplete files of processes that died.

        Raises :class:`Superseded` if a later attempt has started, :class:`UserError` if another run is using it.
        """
        if self.fence is not None:
            self.fence.claim()
        else:
            self._folder_lock.acquire()
        for pattern in (".step-*.tmp", f"{FENCE_FOLDER}/.*.tmp"):
            for temporary in self.folder.glob(pattern):
                temporary.unlink(missing_ok=True)

    def close(self) -> None:
        """Finish writing, and release the folder for other runs."""
        self.wait()
        self._folder_lock.release()

    def check_fence(self) -> None:
        """Raise :class:`Superseded` unless this attempt may still write here."""
        if self.superseded is not None:
            raise self.superseded
        if self.fence is not None:
            self.fence.check()

    def list(self) -> list[Saved]:
        """Return all checkpoints with a readable manifest, the newest first."""
        checkpoints = []
        for path in self.folder.glob("step-*.json"):
            try:
                checkpoints.append(_read_manifest(path))
            except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
                warn(f"manifest {path} can't be read ({error}); skipped")
        return sorted(checkpoints, key=lambda saved: (saved.step, saved.attempt), reverse=True)

    def read_newest(self) -> bytes | None:
        """Read the newest checkpoint with a correct checksum; damaged ones are skipped with a warning."""
        checkpoints = self.list()
        for saved in checkpoints:
            try:
                data = saved.data.read_bytes() if saved.data.stat().st_size == saved.size else b""
            except OSError as error:
                warn(f"checkpoint {saved.data} can't be read ({error.strerror or error}); trying an older one")
                continue
            if len(data) != saved.size or hashlib.sha256(data).hexdigest() != saved.sha256:
                warn(f"checkpoint {saved.data} is damaged (wrong checksum); trying an older one")
                continue
            self.resumed = saved
            return data
        if checkpoints:
            warn(f"no checkpoint in {self.folder} is valid; training starts from the beginning")
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

        ``on_saved`` is called from the writing thread with the step and the duration in seconds. A failed write is a
        warning: older checkpoints are kept, and the run continues.
        """
        if self.superseded is not None:
            return
        started = time.perf_counter()
        save = _PendingSave(StateSnapshot(state), step, accuracy, run, started, on_saved)
        with self._lock:
            skipped = self._waiting
            self._waiting = save
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ddp-checkpoint")
                self._thread.start()
        if skipped is not None:
            warn(f"checkpoint of step {skipped.step} is skipped: checkpoints are due faster than the disk writes them")

    def wait(self) -> None:
        """Wait until all checkpoints are written."""
        while (thread := self._thread) is not None:
            thread.join()

    def _work(self) -> None:
        while True:
            # The thread declares its end under the lock under which it found nothing to write: save() either hands over
            # before that, or starts another thread. Else a checkpoint could stay unwritten.
            with self._lock:
                save = self._waiting
                self._waiting = None
                if save is None:
                    self._thread = None
                    return
            self._write(save)
            del save  # frees its snapshot before the next one is written

    def _write(self, save: _PendingSave) -> None:
        try:
            self.check_fence()
            self._write_files(save)
        except Superseded as error:
            self.superseded = error
            self.on_superseded()
            return
        except Exception as error:  # a full disk, no memory, a state that can't be pickled: training continues
            warn(f"checkpoint of step {save.step} was not saved ({error}); older checkpoints are kept")
            return
        if save.on_saved is not None:
            save.on_saved(save.step, time.perf_counter() - save.started)

    def _write_files(self, save: _PendingSave) -> None:
        attempt = 0 if self.fence is None else self.fence.attempt
        stem = _stem(save.step, attempt)
        data = self.folder / f"{stem}.pt"
        manifest_path = data.with_suffix(".json")
        try:
            with replacing(data, durable=True, check=self.check_fence) as file:
                hashing = HashingFile(file)
                try:
                    torch.save(save.snapshot.to_cpu(self._streams), cast("IO[bytes]", hashing))
                except RuntimeError as error:
                    raise hashing.failure or error from None
            manifest = {
                "version": MANIFEST_VERSION,
                "step": save.step,
                "accuracy": save.accuracy,
                "attempt": attempt,
                "file": data.name,
                "sha256": hashing.digest.hexdigest(),
                "bytes": hashing.size,
                "time": time.time(),
                "run": save.run,
            }
            write_atomically(manifest_path, json.dumps(manifest, indent=2).encode(), durable=True)
        except BaseException:
            if not manifest_path.exists():
                data.unlink(missing_ok=True)  # without a manifest it is ignored, but would fill the disk
            raise
        self._prune(attempt)

    def _prune(self, attempt: int) -> None:
        """Remove all but the newest ``keep`` and the best. The manifest is removed first: no incomplete one remains."""
        checkpoints = self.list()
        rated = [saved for saved in checkpoints if saved.accuracy is not None]
        best = max(rated, key=lambda saved: (saved.accuracy, saved.step)) if rated else None
        for old in checkpoints[self.keep :]:
            if old is not best and old.attempt <= attempt:
                old.manifest.unlink(missing_ok=True)
                old.data.unlink(missing_ok=True)
        fsync_folder(self.folder)


def load_newest(checkpointer: Checkpointer | None, world: World) -> dict[str, Any] | None:
    """Load the newest valid checkpoint's state on every rank, on the CPU; only rank 0's ``checkpointer`` reads it."""
    data = world.broadcast_bytes(checkpointer.read_newest() if checkpointer is not None and world.is_main else None)
    if data is None:
        return None
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch documents no exception types
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            "checkpoint.dir", f"the newest checkpoint was not saved by this trainer ({reason})", "give another folder"
        ) from error
    return state


def _read_manifest(path: Path) -> Saved:
    """Read a manifest. Raises ValueError if its content contradicts its name."""
    manifest = json.loads(path.read_text())
    step = int(manifest["step"])
    attempt = int(manifest.get("attempt", 0))
    data = path.with_suffix(".pt")
    if manifest["file"] != data.name:  # the file is read, and later deleted: it must not be elsewhere
        raise ValueError(f"it names the file {manifest['file']}, not {data.name}")
    if path.stem != _stem(step, attempt):
        raise ValueError("it describes another checkpoint")
    return Saved(
        step=step,
        accuracy=None if manifest["accuracy"] is None else float(manifest["accuracy"]),
        data=data,
        manifest=path,
        sha256=str(manifest["sha256"]),
        size=int(manifest["bytes"]),
        attempt=attempt,
        seconds=_read_seconds(manifest),
    )


def _read_seconds(manifest: dict[str, Any]) -> float:
    """Return the training time in a manifest; 0 if it is missing or invalid, which must not invalidate a checkpoint."""
    run = manifest.get("run")
    seconds = run.get(SECONDS) if isinstance(run, dict) else None
    if isinstance(seconds, int | float) and 0.0 <= seconds < math.inf:
        return float(seconds)
    return 0.0


def _stem(step: int, attempt: int) -> str:
    return f"step-{step:09d}" + (f"-attempt-{attempt}" if attempt else "")
