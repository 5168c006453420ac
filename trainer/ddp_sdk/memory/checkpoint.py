"""``MemoryCheckpoint``: copies of the training state in memory, with which a lost rank or pod costs no step."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..contract import ENV_ATTEMPT, ENV_CHECKPOINT_DIR, ENV_MEMORY_DIR, ENV_MEMORY_INTERVAL, ENV_RUN_ID
from .agreement import Held, Member, Transfer, choose_step, find_changed_size, find_ring, plan_transfers
from .copies import (
    ENCODED_BYTES,
    REPLICATED,
    SHARD,
    CopyFile,
    NoRoomError,
    decode_header,
    encode_header,
    find_available,
    make_private_folder,
)
from .interval import Interval
from .ranks import PeerCounter, RankPlace, Ranks, Ring, find_place
from .state import (
    FlatState,
    Leaf,
    TensorRow,
    build_rows,
    build_state,
    decode_manifest,
    encode_manifest,
    encode_rows,
    find_misfit,
    find_settled,
    flatten,
)
from .writer import SECONDS_FOR_COPY, Copy, SavedCopies, Slots, Writer

_MAX_ATTEMPTS = 8
_MAX_HELD = 10
_NEVER = 1 << 62
_SECONDS_AT_EXIT = 10.0


class Stateful(Protocol):
    """An object with a state: a model, an optimizer, a scheduler, or the script's own."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, of tensors, numbers, strings, bytes, lists, tuples and dicts."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Load a state."""
        ...


class _Chosen(NamedTuple):
    """The step from which all ranks continue, and the number of ranks that received it from a peer."""

    step: int
    received: int


class MemoryCheckpoint:
    """Copies of the state of ``objects`` in shared memory of the pod, which outlive ranks and torchrun's agent.

        memory = MemoryCheckpoint({"model": model, "optimizer": optimizer})
        step = memory.restore()          # None: continue from the disk, or begin
        ...
        memory.save(step)                # after each optimizer step, on all ranks

    With DDP the first rank of each pod keeps the state of all. With FSDP2 each rank keeps its shard, and that of a
    rank of another pod. Without ``folder`` and DDP_MEMORY_DIR, which the operator sets, nothing is copied.

    A ``state_dict`` that reads numbers from a GPU, such as that of ``torch.amp.GradScaler``, stops the host in each
    save until the GPU has completed the step.

    ``interval``: steps between two copies (default: DDP_MEMORY_INTERVAL, or so many that copies cost at most 1 % of
    the training's time). With a set interval :meth:`save` waits for the end of the copy where only this process has the
    state: with FSDP2, and with DDP in one pod. ``sharded``: whether each rank has its own state (default: whether a
    state contains DTensors). ``finite_only``: keep no copy with a number that is not finite. ``enabled``: False: copy
    nothing.
    """

    def __init__(
        self,
        objects: Mapping[str, Stateful],
        *,
        folder: str | None = None,
        interval: int | None = None,
        sharded: bool | None = None,
        finite_only: bool = False,
        enabled: bool = True,
    ) -> None:
        for name, item in objects.items():
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise TypeError(f"{name} is a {type(item).__name__} without state_dict and load_state_dict")
        if interval is not None and interval < 1:
            raise ValueError(f"interval is {interval}; set a number of steps from 1")
        self._objects = dict(objects)
        self._folder = (folder or os.environ.get(ENV_MEMORY_DIR) or None) if enabled else None
        self._fixed_interval = interval or _read_interval(os.environ)
        self._sharded = sharded
        self._finite_only = finite_only
        self._session: _Session | None = None

    @property
    def is_active(self) -> bool:
        """Whether states are copied."""
        return self._folder is not None

    @property
    def interval(self) -> int:
        """Steps between two copies at the moment."""
        return self._session.interval.steps if self._session is not None else self._fixed_interval or 1

    @property
    def stalled_seconds(self) -> float:
        """For how long saves have stopped the training in this process."""
        return self._session.stalled if self._session is not None else 0.0

    def restore(self, *, at_least: int | Callable[[int], int] = 0) -> int | None:
        """Load the newest step of which a complete copy exists, and return it; None if there is none.

        All ranks call this once, after the process group exists and before the first :meth:`save`. A rank without the
        copy receives it from a peer. ``at_least``: the step of the newest checkpoint on disk; older copies are ignored.
        It may be a function that returns it for the newest step of which this rank has a copy, 0 without one.
        """
        if self._folder is None:
            return None
        if self._session is not None:
            raise RuntimeError("restore() has been called before; call it once")
        place = find_place()
        unsupported = _find_unsupported(self._objects)
        if unsupported:
            self._folder = None
            if place.rank == 0:
                print(f"MemoryCheckpoint: no copies: {unsupported}", file=sys.stderr, flush=True)
            return None
        self._session = _Session(self._objects, self._folder, place, self._fixed_interval, self._finite_only)
        return self._session.restore(self._sharded, at_least)

    def save(self, step: int) -> None:
        """Copy the state after ``step`` completed steps, if a copy is due. All ranks call this after each step.

        The state may change as soon as this returns. Never raises for lack of memory: training continues without
        copies, with one warning. Waits for the end of the copy, on a CPU and up to 30 s, where a killed process would
        otherwise lose a completed step; with an automatic interval only within 1 % of the training's time.
        """
        if self._folder is None:
            return
        if self._session is None:
            raise RuntimeError("save() needs restore() before; call it once, after the process group exists")
        if self._session.pid == os.getpid():
            self._session.save(step)

    def fence(self) -> None:
        """Wait until parameters may change. Needed only before updates that are no step of a torch.optim.Optimizer."""
        if self._session is not None:
            self._session.fence()

    def close(self) -> None:
        """Complete the last copy and release the memory of this process. The copies remain."""
        if self._session is not None:
            self._session.close()


def _find_unsupported(objects: Mapping[str, Stateful]) -> str:
    """Return why the state of the objects cannot be copied; empty if nothing is known against it."""
    for name, item in objects.items():
        modules = item.modules() if isinstance(item, torch.nn.Module) else ()
        # By name: the import of torch.distributed.fsdp takes long.
        if any(kind.__name__ == "FullyShardedDataParallel" for module in modules for kind in type(module).__mro__):
            return (
                f"{name} uses FullyShardedDataParallel (FSDP1), whose state_dict gathers the state of all ranks. "
                "Training continues with its checkpoints on disk. Use torch.distributed.fsdp.fully_shard (FSDP2)."
            )
    return ""


def _read_interval(environ: Mapping[str, str]) -> int | None:
    text = environ.get(ENV_MEMORY_INTERVAL, "")
    return max(1, int(text)) if text.isdigit() else None


class _CopyLayout:
    """The places of the tensors in a copy, computed once while the tensors remain the same."""

    def __init__(self) -> None:
        self._key: list[Any] = []
        self._rows: list[TensorRow] = []
        self.encoded = b""

    def update(self, leaves: Sequence[Leaf]) -> list[TensorRow]:
        """Return the places for a state."""
        key = [leaf.layout for leaf in leaves]
        if key != self._key:
            self._key = key
            self._rows = build_rows(leaves)
            self.encoded = encode_rows(self._rows)
        return self._rows


def _find_saved(place: RankPlace, environ: Mapping[str, str]) -> SavedCopies:
    """Return the copies that launchers of earlier attempts saved for this rank (ddp_pod/features/memory/copies.py)."""
    run = environ.get(ENV_RUN_ID, "")
    suffix = f"-{environ.get(ENV_ATTEMPT, '')}"
    run = run[: -len(suffix)] if run.endswith(suffix) else run
    folder = os.path.join(environ.get(ENV_CHECKPOINT_DIR, ""), f"ddp-memory-{run}")
    if os.path.islink(folder):
        return SavedCopies()  # the launcher creates no links: another user of the volume has
    return SavedCopies(os.path.join(folder, "state"), os.path.join(folder, f"shard-{place.rank}"))


class _Session:
    """The copies of one process: from :meth:`restore` to its end."""

    def __init__(
        self, objects: Mapping[str, Stateful], folder: str, place: RankPlace, interval: int | None, finite_only: bool
    ) -> None:
        self.pid = os.getpid()
        self.stalled = 0.0
        self._objects = objects
        self._place = place
        self._ranks = Ranks(place)
        self._finite_only = finite_only
        self._folder = os.path.join(folder, f"pod-{place.pod}")
        make_private_folder(self._folder)
        self._state_slots = Slots(os.path.join(self._folder, "state"))
        self._shard_slots = Slots(os.path.join(self._folder, f"shard-{place.local_rank}"))
        self._peer_slots = Slots(os.path.join(self._folder, f"peer-{place.local_rank}"))
        self._saved = _find_saved(place, os.environ)
        self.interval = Interval(interval, self._agree)
        self._kind = REPLICATED
        self._members: list[Member] = []
        self._nonce = 0
        self._writer: Writer | None = None
        self._layout = _CopyLayout()
        self._is_prepared = False
        self._saves_everywhere = False
        self._is_asynchronous = True
        self._problem = ""
        self._saves = 0
        self._is_measuring = False  # whether the last save has a stall that is still counted
        self._stall = 0.0
        self._fenced = 0.0
        self._waited = 0.0
        self._waits_for_copies = False
        self._step_began = time.perf_counter()
        self._hook = register_optimizer_step_pre_hook(lambda *_: self.fence())
        atexit.register(self.close)

    # -- restore

    def restore(self, sharded: bool | None, at_least: int | Callable[[int], int]) -> int | None:
        """See :meth:`MemoryCheckpoint.restore`."""
        try:
            template = self._read_state()
        except TypeError as error:
            self._disable(str(error))
            return None
        self._kind = SHARD if (template.is_sharded if sharded is None else sharded) else REPLICATED
        if callable(at_least):
            at_least = at_least(
                max((header.step for slots in self._list_own_slots() for _, header in slots.list_copies()), default=0)
            )
        chosen = self._fetch_newest(at_least)
        if chosen is not None and not self._load(chosen.step, template):
            chosen = None
        for slots in self._list_own_slots():
            slots.invalidate_after(-1 if chosen is None else chosen.step)
        self._step_began = time.perf_counter()
        if chosen is None:
            return None
        note = f"; {chosen.received} ranks received it from a peer" if chosen.received else ""
        self._log(f"training continues from step {chosen.step}, copied in memory{note}")
        return chosen.step

    def _fetch_newest(self, at_least: int) -> _Chosen | None:
        """Agree on a step, and give every rank its copy. Damaged copies are invalidated, and older ones tried."""
        for _ in range(_MAX_ATTEMPTS):
            self._members = self._gather_members(at_least)
            step = choose_step(self._members, self._kind)
            if step is None:
                former = find_changed_size(self._members, self._kind)
                if former is not None:
                    world = self._place.world
                    self._log(f"copies of {former} ranks do not fit {world}; training continues from the disk")
                return None
            received = self._transfer(step)
            self._ranks.wait_for_all()  # the first rank of the pod has received the copy
            file = self._find_held(step, self._place.rank)
            is_good = file is not None and file.verify()
            if file is not None and not is_good:
                self._log(f"the copy of step {step} in pod {self._place.pod} is damaged; it is not used", anyone=True)
                file.invalidate()
            if self._ranks.is_true_for_all(is_good):
                return _Chosen(step, received)
        return None

    def _gather_members(self, at_least: int) -> list[Member]:
        held = [Held.from_header(header) for slots in self._list_own_slots() for _, header in slots.list_copies()]
        held += [Held(0, 0, 0, 0, 0)] * (_MAX_HELD - len(held))
        nonce = int.from_bytes(os.urandom(7), "little")
        place = self._place
        if self._problem:
            at_least = _NEVER  # without room this rank cannot receive a copy
        row = [nonce, place.pod, place.local_rank, at_least, *(number for each in held for number in each)]
        rows = self._ranks.gather(row)
        self._nonce = rows[0][0]
        members = []
        for rank, (_, pod, local_rank, limit, *numbers) in enumerate(rows):
            copies = [Held(*numbers[start : start + 5]) for start in range(0, len(numbers), 5)]
            members.append(Member(rank, pod, local_rank, limit, tuple(copy for copy in copies if copy.kind)))
        return members

    def _list_own_slots(self) -> list[Slots]:
        """Return the files for which this rank is responsible."""
        own = [self._shard_slots, self._peer_slots, self._saved]
        return [self._state_slots, *own] if self._place.local_rank == 0 else own

    def _transfer(self, step: int) -> int:
        """Take part in the transfers of a step. Returns how many there are."""
        transfers = plan_transfers(self._members, self._kind, step)
        for transfer in transfers:
            if transfer.source == self._place.rank:
                file = self._find_held(step, transfer.origin)
                assert file is not None
                header = file.header
                assert header is not None
                self._ranks.send(_to_tensor(encode_header(header)), transfer.target)
                self._ranks.send(file.open(), transfer.target)
            elif transfer.target == self._place.rank:
                self._receive(transfer, step)
        return len(transfers)

    def _receive(self, transfer: Transfer, step: int) -> None:
        encoded = torch.empty(ENCODED_BYTES, dtype=torch.uint8)
        self._ranks.receive(encoded, transfer.source)
        slots = self._state_slots if self._kind == REPLICATED else self._shard_slots
        file = slots.find_next(keep=step)
        try:
            memory = file.reserve(transfer.size)
        except NoRoomError as error:
            self._disable(self._describe_room(error.needed))
            self._ranks.receive(torch.empty(transfer.size, dtype=torch.uint8), transfer.source)
            return
        self._ranks.receive(memory, transfer.source)
        header = decode_header(bytes(encoded.tolist()))
        if header is not None:
            file.commit(header)

    def _find_held(self, step: int, origin: int) -> CopyFile | None:
        """Return the file that holds a copy of a step. ``origin``: the rank of a shard."""
        if self._kind == REPLICATED:
            held = (slots.find(REPLICATED, step, None) for slots in (self._state_slots, self._saved))
        else:
            held = (slots.find(SHARD, step, origin) for slots in (self._shard_slots, self._peer_slots, self._saved))
        return next((file for file in held if file is not None), None)

    def _load(self, step: int, template: FlatState) -> bool:
        """Load a copy into the objects of all ranks. Returns False if it does not fit on one of them."""
        file = self._find_held(step, self._place.rank)
        assert file is not None
        header = file.header
        assert header is not None
        memory = file.open()
        problem = ""
        try:
            manifest = decode_manifest(bytes(memory[header.payload :].numpy()), header.payload)
            problem = find_misfit(manifest, self._objects, template)
        except ValueError as error:
            problem = str(error)
        if problem:
            self._log(f"the copy of step {step} is not used: {problem}")
        if not self._ranks.is_true_for_all(not problem):
            return False
        for name, item in self._objects.items():
            try:
                item.load_state_dict(build_state(name, item, manifest, memory, template))
            except Exception as error:
                file.invalidate()  # the next start continues from the disk
                message = f"the copy of step {step} does not fit {name}: {error}; the next start does not use it"
                raise RuntimeError(message) from error
        return True

    # -- save

    def save(self, step: int) -> None:
        """See :meth:`MemoryCheckpoint.save`."""
        began = time.perf_counter()
        self._account(began)
        self._waited = 0.0
        if self.interval.is_due(step):
            self._copy(step)
            self._saves += 1
            self._is_measuring = True
        self._step_began = time.perf_counter()
        self._stall = self._step_began - began

    def fence(self) -> None:
        """See :meth:`MemoryCheckpoint.fence`."""
        if self._writer is None or self.pid != os.getpid():
            return
        began = time.perf_counter()
        self._writer.fence()
        self._fenced += time.perf_counter() - began

    def close(self) -> None:
        """See :meth:`MemoryCheckpoint.close`."""
        atexit.unregister(self.close)
        self._hook.remove()
        if self.pid != os.getpid():
            return
        if self._writer is not None:
            self._writer.close(_SECONDS_AT_EXIT)
        for slots in (self._state_slots, self._shard_slots, self._peer_slots):
            slots.close()

    def _account(self, now: float) -> None:
        """Record the step since the last call, and the stall of the last copy."""
        fenced = self._fenced
        self._fenced = 0.0
        self.interval.record_step(max(0.0, now - self._step_began - fenced))
        if not self._is_measuring:
            return
        self._is_measuring = False
        stall = self._stall + fenced
        contended = 0.0
        if self._writer is not None:
            stall += self._writer.measure_gpu_stall()
            contended = self._writer.take_contention()
        self.stalled += stall
        self.interval.record_save(stall - self._waited, self._waited, contended)

    def _copy(self, step: int) -> None:
        try:
            state = self._read_state()
        except TypeError as error:
            self._disable(str(error))
            return
        rows = self._layout.update(state.leaves)
        manifest = encode_manifest(state.tree, self._layout.encoded)
        if not self._is_prepared:
            self._is_prepared = True
            self._prepare(rows[-1].offset + rows[-1].bytes + len(manifest) if rows else len(manifest))
            self._waits_for_copies = self._is_state_in_one_process(state)
        now = self._list_volatile(state)
        if self._writer is None or self._problem:
            return
        copy = Copy(self._kind, step, state.leaves, rows, manifest, now, self._saves, self.stalled)
        try:
            self._writer.write(copy)
        except NoRoomError as error:
            self._disable(self._describe_room(error.needed))
        self._wait_for_copy()
        self._observe_writer()

    def _is_state_in_one_process(self, state: FlatState) -> bool:
        """Return whether the end of this process during a copy would lose a completed step.

        A state on a GPU does not count: a wait for its copy would stop the host until the GPU has completed the step.
        """
        pods = {member.pod for member in self._members}
        is_in_other_pods = self._kind == REPLICATED and self._saves_everywhere and len(pods) > 1
        return not is_in_other_pods and not any(leaf.tensor.is_cuda for leaf in state.leaves)

    def _wait_for_copy(self) -> None:
        """Wait for the end of the copy, of sharded state on all ranks, if only this process has the state."""
        assert self._writer is not None
        if self._waits_for_copies and not self._writer.problem:
            began = time.perf_counter()
            self._writer.wait(min(self.interval.compute_wait(), SECONDS_FOR_COPY))
            self._waited = time.perf_counter() - began

    def _observe_writer(self) -> None:
        assert self._writer is not None
        if self._writer.problem:
            self._disable(self._writer.problem)
        if self._writer.changed and self._is_asynchronous:
            self._is_asynchronous = False
            self._log(
                f"{self._writer.changed} changed outside of an optimizer's step while it was copied; from now on all "
                "tensors are copied within save(). Call fence() before such a change to avoid this.",
                anyone=True,
            )

    def _prepare(self, size: int) -> None:
        """Decide before the first copy who writes, and whether the ranks can rely on each other's calls."""
        pods = {member.pod for member in self._members}
        counter: PeerCounter | None = None
        self._saves_everywhere = self._place.world == 1
        if self._place.world > 1:
            try:
                counter = PeerCounter(self._place, str(self._nonce))
                self._saves_everywhere = counter.is_called_by_all()
            except (KeyError, ValueError, RuntimeError) as error:
                self._log(f"the store of the process group does not respond: {error}", anyone=True)
        if not self._saves_everywhere:
            self._log("save() is not called by all ranks: pods whose ranks do not call it keep no copies", anyone=True)
            if self._kind == SHARD:
                self._disable("each rank has its own shard; call save() on all ranks")
                return
        ring = find_ring(self._members, self._place.rank) if self._kind == SHARD else None
        has_room = self._has_room(size, files=2 if ring is None else 4)
        if self._kind == SHARD and not self._ranks.is_true_for_all(has_room):
            self._problem = self._problem or "another rank has no room"
        if self._problem:
            return
        if self._kind == REPLICATED and self._place.local_rank != 0:
            return
        slots = self._state_slots if self._kind == REPLICATED else self._shard_slots
        self._writer = Writer(slots, self._place, finite_only=self._finite_only)
        if self._kind == SHARD and counter is not None:
            self._writer.count_copies(counter)
        if ring is not None:
            assert counter is not None  # without it the saves are not known to be everywhere
            try:
                self._writer.exchange_shards(Ring(ring, self._place.rank, counter.store), self._peer_slots)
            except RuntimeError as error:
                counter.abandon()
                self._disable(f"the neighbouring pod does not respond: {error}")
        elif self._kind == SHARD and len(pods) > 1:
            self._log("the pods have different numbers of ranks: shards have no copies in other pods")

    def _has_room(self, size: int, *, files: int) -> bool:
        """Return whether the files fit, and warn once if they do not."""
        if self._kind == REPLICATED and self._place.local_rank != 0:
            return True
        own = self._state_slots if self._kind == REPLICATED else self._shard_slots
        missing = own.measure_missing(size) + (self._peer_slots.measure_missing(size) if files > 2 else 0)
        if missing <= find_available(self._folder):
            return True
        self._disable(self._describe_room(missing))
        return False

    def _list_volatile(self, state: FlatState) -> list[Tensor | None]:
        """Return for each tensor the memory to copy at once; None: only an optimizer's step changes it.

        Of replicated state every pod keeps rank 0's: buffers such as those of batch norm differ between ranks.
        """
        settled = find_settled(self._objects.values())
        volatile = [index for index, leaf in enumerate(state.leaves) if leaf.tensor.data_ptr() not in settled]
        # A rank that copies everything at once broadcasts no more than its peers, which may not know of the change.
        at_once = volatile if self._is_asynchronous else range(len(state.leaves))
        now: list[Tensor | None] = [None] * len(state.leaves)
        for index in at_once:
            now[index] = state.leaves[index].tensor
        is_shared = self._kind == REPLICATED and self._saves_everywhere and self._place.world > 1
        if not is_shared or not volatile:
            return now
        device = self._ranks.device
        parts = [state.leaves[index].memory.view(torch.uint8).to(device) for index in volatile]
        flat = torch.cat(parts)
        self._ranks.broadcast(flat)
        offset = 0
        for index, part in zip(volatile, parts):  # noqa: B905
            now[index] = flat[offset : offset + part.numel()]
            offset += part.numel()
        return now

    def _read_state(self) -> FlatState:
        return flatten({name: item.state_dict() for name, item in self._objects.items()})

    def _agree(self, steps: int) -> int:
        return self._ranks.find_maximum(steps) if self._saves_everywhere else steps

    # -- messages

    def _disable(self, problem: str) -> None:
        """Copy no more, with one warning."""
        if not self._problem:
            self._problem = problem
            self._log(f"no more copies: {problem}", anyone=True)

    def _describe_room(self, needed: int) -> str:
        mebibytes = -(-needed // (1 << 20))
        free = find_available(self._folder) >> 20
        return (
            f"the copies need {mebibytes} MiB of memory, and {self._folder} has room for {free} MiB. Training "
            "continues with its checkpoints on disk. Raise spec.sharedMemory and the container's memory limit, or set "
            "spec.checkpoint.memoryInterval to 0."
        )

    def _log(self, message: str, *, anyone: bool = False) -> None:
        if anyone or self._place.rank == 0:
            print(f"MemoryCheckpoint: {message}", file=sys.stderr, flush=True)


def _to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
