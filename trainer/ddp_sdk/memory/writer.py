"""Writes copies of a state while the training continues.

Tensors that only an optimizer's step changes are copied during the next forward and backward pass; the next optimizer
step waits for the end of that copy. Everything else is copied before :meth:`Writer.write` returns. GPU memory is copied
on separate streams, without stopping the host.
"""

from __future__ import annotations

import glob
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .copies import HEADER_BYTES, SHARD, CopyFile, Header, build_header, copy_memory
from .ranks import PeerCounter, RankPlace, Ring
from .state import Leaf, TensorRow, read_tensor

SECONDS_FOR_COPY = 30.0
"""A copy that takes longer ends all copies."""
_CHUNK_ELEMENTS = 1 << 15
_MAX_SAVED = 2  # files of one state; launchers delete former ones


class Slots:
    """The two files of one writer, of which the older one is overwritten."""

    def __init__(self, path: str) -> None:
        self.files: tuple[CopyFile, ...] = (CopyFile(f"{path}-0"), CopyFile(f"{path}-1"))

    def list_copies(self) -> list[tuple[CopyFile, Header]]:
        """Return the files that contain a copy."""
        headers = [(file, file.header) for file in self.files]
        return [(file, header) for file, header in headers if header is not None]

    def find(self, kind: int, step: int, origin: int | None) -> CopyFile | None:
        """Return the file with a copy of a step. ``origin``: the rank whose state it is; None: any."""
        for file, header in self.list_copies():
            if header.kind == kind and header.step == step and origin in (None, header.rank):
                return file
        return None

    def find_next(self, keep: int | None = None) -> CopyFile:
        """Return the file to overwrite: the older one, but not a copy of step ``keep``."""
        steps = {file: header.step for file, header in self.list_copies()}
        return min(
            self.files, key=lambda file: (steps.get(file) == keep if keep is not None else False, steps.get(file, -1))
        )

    def invalidate_after(self, step: int) -> None:
        """Declare that there is no copy of a later step."""
        for file, header in self.list_copies():
            if header.step > step:
                file.invalidate()

    def measure_missing(self, size: int) -> int:
        """Return how many bytes of memory two files of ``size`` bytes need in addition to those that exist."""
        return sum(max(0, HEADER_BYTES + size - file.allocated) for file in self.files)

    def close(self) -> None:
        """Release the memory of this process."""
        for file in self.files:
            file.close()


class SavedCopies(Slots):
    """Files on disk, which the launchers of an earlier attempt have saved there. No rank writes them.

    ``paths``: without the step at the end of the files' names.
    """

    def __init__(self, *paths: str) -> None:
        files: list[CopyFile] = []
        for path in paths:
            names = {name.rpartition("-")[2]: name for name in glob.glob(f"{glob.escape(path)}-[0-9]*")}
            newest = sorted((step for step in names if step.isdigit()), key=int)[-_MAX_SAVED:]
            files += [CopyFile(names[step]) for step in newest]
        self.files = tuple(files)


class GpuCopy(NamedTuple):
    """A copy. ``target``: uint8 on the host; ``source``: on a GPU, one dimension, as many bytes."""

    target: Tensor
    source: Tensor


class _RunningCopies(NamedTuple):
    """The copies of one device. ``finished``: an event after the last of them."""

    device: torch.device
    finished: Any


class GpuCopies:
    """The copies of one state. Without a GPU all methods do nothing."""

    def __init__(self) -> None:
        self._running: list[_RunningCopies] = []
        self._reached: list[Any] = []
        self._streams: dict[torch.device, Any] = {}

    def start(self, copies: Sequence[GpuCopy]) -> None:
        """Start copies that read what the current streams have computed so far."""
        self._running = []
        self._reached = []
        for device in {copy.source.device for copy in copies}:
            # torch has 32 streams per device, handed out in turn: a new one per copy would be the training's own.
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream = self._streams[device]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for copy in copies:
                    if copy.source.device == device:
                        copy.target.copy_(copy.source.view(torch.uint8), non_blocking=True)
                        copy.source.record_stream(stream)
                finished = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                finished.record(stream)
            self._running.append(_RunningCopies(device, finished))

    def fence(self) -> None:
        """Make the current streams wait for the copies: the sources may change after that."""
        if not self._running or torch.cuda.is_current_stream_capturing():
            return
        if not self._reached:
            self._reached = [_record(running.device) for running in self._running]
        for running in self._running:
            torch.cuda.current_stream(running.device).wait_event(running.finished)

    def synchronize(self) -> None:
        """Wait for the end of the copies on the host, in a thread beside the training."""
        for running in self._running:
            running.finished.synchronize()

    def measure_stall(self) -> float:
        """Return for how many seconds the streams waited at the fence; 0 if that is not known yet."""
        stalls = [0.0]
        for running, reached in zip(self._running, self._reached):  # noqa: B905
            if reached.query() and running.finished.query():
                stalls.append(float(reached.elapsed_time(running.finished)) / 1000)
        return max(stalls)


def _record(device: torch.device) -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class Copy(NamedTuple):
    """A state to copy. ``now``: source per leaf that may change before the next optimizer step; None: it does not.

    ``saves`` and ``stalled``: as in the header.
    """

    kind: int
    step: int
    leaves: Sequence[Leaf]
    rows: Sequence[TensorRow]
    manifest: bytes
    now: Sequence[Tensor | None]
    saves: int
    stalled: float


class _Watched(NamedTuple):
    """A tensor that a GPU copies. ``version``: that of its source when the copy was requested."""

    leaf: Leaf
    version: int


class _PendingTensor(NamedTuple):
    """A tensor that the thread copies. ``version``: that of its source when the copy was requested."""

    address: int
    size: int
    leaf: Leaf
    version: int


class _Job(NamedTuple):
    """The thread's work for a copy. ``memory``: that of ``file``, which starts with ``payload`` bytes of tensors."""

    copy: Copy
    file: CopyFile
    memory: Tensor
    payload: int
    pending: Sequence[_PendingTensor]


class Writer:
    """Copies states into the slots of this rank, one at a time, and shards into those of its neighbour.

    ``problem``: why it has stopped to write; empty while it writes. ``changed``: the tensor that changed while it was
    copied.
    """

    def __init__(self, slots: Slots, place: RankPlace, *, finite_only: bool) -> None:
        self.slots = slots
        self.problem = ""
        self.changed = ""
        self._place = place
        self._finite_only = finite_only
        self._ring: Ring | None = None
        self._peer_slots: Slots | None = None
        self._counter: PeerCounter | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._finished = threading.Event()
        self._finished.set()
        self._copied = threading.Event()
        self._copied.set()
        self._gpu = GpuCopies()
        self._lock = threading.Lock()
        self._watched: list[_Watched] = []  # until the end of the copy or the next step, whichever is first
        self._changed_on_gpu: list[str] = []
        self._contended = 0.0

    def count_copies(self, counter: PeerCounter) -> None:
        """From now on overwrite no shard before all ranks have a newer one."""
        self._counter = counter

    def exchange_shards(self, ring: Ring, peer_slots: Slots) -> None:
        """From now on keep the shards of a neighbour, and send it those of this rank."""
        self._ring = ring
        self._peer_slots = peer_slots

    def write(self, copy: Copy) -> None:
        """Start to copy a state. Raises :class:`NoRoomError`."""
        if not self.wait(SECONDS_FOR_COPY):
            self.problem = f"the copy of an earlier step took more than {SECONDS_FOR_COPY:g} s"
            return
        payload = copy.rows[-1].offset + copy.rows[-1].bytes if copy.rows else 0
        payload = -(-payload // 64) * 64
        file = self.slots.find_next()
        memory = file.reserve(payload + len(copy.manifest))
        file.announce()
        pending = self._copy_now(copy, memory, file)
        memory[payload:].copy_(torch.frombuffer(bytearray(copy.manifest), dtype=torch.uint8))
        # Cleared before the thread can set them: a fence or a wait that follows must not see those of the copy before.
        self._copied.clear()
        self._finished.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ddp-memory-copy", daemon=True)
            self._thread.start()
        self._jobs.put(_Job(copy, file, memory, payload, pending))

    def fence(self) -> None:
        """Wait until the tensors of the running copy may change; on a GPU, its stream waits instead."""
        self._copied.wait()
        self._find_changed_on_gpu()
        self._gpu.fence()

    def measure_gpu_stall(self) -> float:
        """Return for how many seconds the GPU waited at the last fence; 0 if that is not known yet."""
        return self._gpu.measure_stall()

    def take_contention(self) -> float:
        """Return for how many seconds the thread has competed for a CPU since the last call."""
        with self._lock:
            seconds = self._contended
            self._contended = 0.0
        return seconds

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the running copy. Returns False if it takes longer."""
        return self._finished.wait(seconds)

    def close(self, seconds: float) -> None:
        """Complete the running copy and end the thread: torch aborts a process that ends while a thread uses it."""
        if self._thread is None:
            return
        # The thread may wait for ranks that end too and call nothing more: first end that wait, then the thread.
        if self._counter is not None:
            self._counter.stop_waiting()
        self._jobs.put(None)
        self._thread.join(seconds)
        self._thread = None

    def _copy_now(self, copy: Copy, memory: Tensor, file: CopyFile) -> list[_PendingTensor]:
        """Copy what the training may change at any time, and start the copies of the GPU. Returns the rest."""
        pending = []
        watched = []
        on_gpu = []
        address = memory.data_ptr()
        for leaf, row, now in zip(copy.leaves, copy.rows, copy.now):  # noqa: B905
            size = row.bytes
            source = leaf.tensor if now is None else now
            if not size:
                continue
            if source.is_cuda:
                target = memory[row.offset : row.offset + size]
                if now is None:
                    watched.append(_Watched(leaf, _read_version(leaf.source)))
                on_gpu.append(GpuCopy(target, leaf.memory if now is None else now.clone()))
            elif now is None:
                pending.append(_PendingTensor(address + row.offset, size, leaf, _read_version(leaf.source)))
            else:
                copy_memory(address + row.offset, source, size)
        if on_gpu:
            file.pin()
        self._gpu.start(on_gpu)
        self._watched = watched
        self._changed_on_gpu = []
        return pending

    def _find_changed_on_gpu(self) -> list[str]:
        """Return the tensors that changed while a GPU copied them, by the first check after the copy was requested."""
        with self._lock:
            watched = self._watched
            self._watched = []
            self._changed_on_gpu += [
                item.leaf.path for item in watched if _read_version(item.leaf.source) != item.version
            ]
            return self._changed_on_gpu

    def _work(self) -> None:
        """Complete copies, in a thread."""
        while True:
            job = self._jobs.get()
            if job is None:
                return
            before = read_thread_times()
            try:
                self._finish(job)
            except Exception as error:  # training continues whatever happens to its copies
                self.problem = f"{type(error).__name__}: {error}"
                if self._counter is not None:
                    self._counter.abandon()
            del job  # frees its tensors before a waiting training can request the next copy
            contended = compute_contention(before, read_thread_times())
            with self._lock:
                self._contended += contended
            self._copied.set()
            self._finished.set()

    def _finish(self, job: _Job) -> None:
        # The file first, then the neighbour, then all ranks: each may end at any time, and the copy before is only
        # overwritten when every rank has reported this one.
        header = None
        try:
            header = self._complete(job)
        finally:
            if header is None:
                job.file.invalidate()
            else:
                job.file.commit(header)
        written = [job.file]
        if self._ring is not None:
            written.append(self._exchange(header, job.memory))
        if self._counter is not None and not self._counter.agree_on_copy(header is not None):
            # The next copy must overwrite this one, not the one before, which is the newest that all ranks have.
            for file in written:
                file.invalidate()

    def _complete(self, job: _Job) -> Header | None:
        """Copy the rest. Returns None if the copy must not be used."""
        for item in job.pending:
            copy_memory(item.address, item.leaf.tensor, item.size)
        # Versions are read after the copy: a change that began during it has raised the version by then. Only then the
        # next step may change the tensors, while the checksum and the exchange still run.
        changed = [item.leaf.path for item in job.pending if _read_version(item.leaf.source) != item.version]
        self._copied.set()
        self._gpu.synchronize()
        changed += self._find_changed_on_gpu()
        if changed:
            self.changed = changed[0]
            return None
        if self._finite_only and not _is_finite(job.memory[: job.payload], job.copy.rows):
            return None
        header = build_header(
            job.copy.kind,
            job.copy.step,
            world=self._place.world,
            rank=self._place.rank,
            payload=job.payload,
            memory=job.memory,
        )
        return header._replace(saves=job.copy.saves, stalled=job.copy.stalled)

    def _exchange(self, header: Header | None, memory: Tensor) -> CopyFile:
        """Send this rank's shard to its neighbour, and keep that of the other neighbour in the returned file."""
        assert self._ring is not None
        assert self._peer_slots is not None
        own = [-1, 0, 0, 0] if header is None else [header.step, header.payload, header.manifest, header.checksum]
        step, payload, manifest, checksum = self._ring.exchange_numbers(own)
        file = self._peer_slots.find_next()
        incoming = memory[:0] if step < 0 else file.reserve(payload + manifest)
        self._ring.exchange(memory[:0] if header is None else memory, incoming)
        if step >= 0:
            origin = self._ring.neighbours.source
            file.commit(Header(SHARD, step, self._place.world, origin, payload, manifest, checksum, time.time()))
        return file


class ThreadTimes(NamedTuple):
    """For how many seconds a thread has used a CPU, and has waited for one."""

    used: float
    waited: float


def read_thread_times() -> ThreadTimes:
    """Return the times of this thread; zeros where the system does not count them."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            used, waited, _ = file.read().split()
        return ThreadTimes(int(used) / 1e9, int(waited) / 1e9)
    except (OSError, ValueError):
        return ThreadTimes(0.0, 0.0)


def compute_contention(before: ThreadTimes, after: ThreadTimes) -> float:
    """Return for how many seconds a thread used a CPU for which others waited.

    Who shares a CPU fairly waits for as long as it lets others wait; who gets a CPU at once has taken an idle one.
    """
    return max(0.0, min(after.used - before.used, after.waited - before.waited))


def _read_version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)


def _is_finite(payload: Tensor, rows: Sequence[TensorRow]) -> bool:
    """Return whether the payload contains only finite numbers."""
    for row in rows:
        if not getattr(torch, row.dtype).is_floating_point or not row.elements:
            continue
        flat = read_tensor(payload, row._replace(shape=(row.elements,), stride=(1,)))
        # In parts so small that torch sums each with one thread: the training needs the other threads.
        for part in torch.split(flat, _CHUNK_ELEMENTS):
            if not bool(torch.isfinite(part).all()):
                return False
    return True
