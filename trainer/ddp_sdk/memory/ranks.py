"""The ranks of the job: this rank's place, and messages between ranks. Works with gloo and with NCCL."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import RingNeighbours

_CHUNK_BYTES = 32 << 20
_SECONDS_FOR_PEERS = 20.0
_POLL_SECONDS = 0.005
_SHORTEST_PAUSE = 0.0005
_ABANDONED = 1 << 40


class RankPlace(NamedTuple):
    """This rank: its number, the number of ranks, its number within its pod, and the pod's index."""

    rank: int
    world: int
    local_rank: int
    pod: int


def find_place(environ: Mapping[str, str] = os.environ) -> RankPlace:
    """Return this rank's place. Raises RuntimeError if the process group of several ranks does not exist yet."""
    rank = 0
    world = 1
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        world = dist.get_world_size()
    elif int(environ.get("WORLD_SIZE") or 1) > 1:
        raise RuntimeError("restore() needs the process group; call torch.distributed.init_process_group before it")
    pod = environ.get("JOB_COMPLETION_INDEX") or environ.get("GROUP_RANK") or "0"
    return RankPlace(rank, world, int(environ.get("LOCAL_RANK") or 0), int(pod))


class Ranks:
    """The collectives over all ranks. Every rank calls them in the same order."""

    def __init__(self, place: RankPlace) -> None:
        self.place = place
        self.device = _find_device() if place.world > 1 else torch.device("cpu")

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """Return the rows of all ranks, each with as many numbers of 64 bits."""
        if self.place.world == 1:
            return [list(row)]
        own = torch.tensor(row, dtype=torch.int64, device=self.device)
        rows = [torch.empty_like(own) for _ in range(self.place.world)]
        dist.all_gather(rows, own)
        return [[int(number) for number in each.tolist()] for each in rows]

    def find_maximum(self, number: int) -> int:
        """Return the greatest number of any rank."""
        if self.place.world == 1:
            return number
        value = torch.tensor([number], dtype=torch.int64, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value.item())

    def is_true_for_all(self, condition: bool) -> bool:
        """Return whether the condition holds on every rank."""
        return self.find_maximum(0 if condition else 1) == 0

    def broadcast(self, memory: Tensor) -> None:
        """Replace ``memory``, uint8 on ``device``, by that of rank 0. Does not stop the host on a GPU."""
        dist.broadcast(memory, src=0)

    def wait_for_all(self) -> None:
        """Wait until every rank calls this."""
        self.find_maximum(0)

    def send(self, memory: Tensor, target: int) -> None:
        """Send ``memory``, uint8 on the host, in chunks."""
        for chunk in torch.split(memory, _CHUNK_BYTES):
            dist.send(chunk.to(self.device), dst=target)

    def receive(self, memory: Tensor, source: int) -> None:
        """Fill ``memory``, uint8 on the host, in chunks."""
        for chunk in torch.split(memory, _CHUNK_BYTES):
            received = torch.empty_like(chunk, device=self.device)
            dist.recv(received, src=source)
            chunk.copy_(received)


def _find_device() -> torch.device:
    """Return the device of tensors that the default process group accepts."""
    if "nccl" in dist.get_backend_config() and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class PeerCounter:
    """Counts calls of all ranks in the store of the process group, from any thread. ``name``: the same on all ranks."""

    def __init__(self, place: RankPlace, name: str, environ: Mapping[str, str] = os.environ) -> None:
        self._world = place.world
        self._copies = 0
        self._failures = [0, 0]
        self._is_stopped = threading.Event()
        address = environ["MASTER_ADDR"]
        port = int(environ["MASTER_PORT"])
        timeout = timedelta(seconds=_SECONDS_FOR_PEERS)
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
        self.store = dist.PrefixStore(f"ddp-memory/{name}", store)  # type: ignore[attr-defined]

    def is_called_by_all(self) -> bool:
        """Return whether all ranks call this within 20 seconds. All of them get the same result."""
        count = self.store.add("calls", 1)
        deadline = time.monotonic() + _SECONDS_FOR_PEERS
        while count < self._world and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            count = self.store.add("calls", 0)
        own = "yes" if count >= self._world else "no"
        return bool(self.store.compare_set("result", "", own) == b"yes")

    def agree_on_copy(self, is_complete: bool) -> bool:
        """Wait until every rank has called this as often as this rank. Returns whether all copies are complete.

        Until then the copy before may be the newest complete one, so no rank may overwrite it. Raises TimeoutError
        after 20 seconds, or if a rank has abandoned its copies.
        """
        self._copies += 1
        parity = self._copies % 2  # a fast rank may report a failure of the next copy before this one reads
        if not is_complete:
            self.store.add(f"failures/{parity}", 1)
        count = self.store.add("copies", 1)
        deadline = time.monotonic() + _SECONDS_FOR_PEERS
        pause = _SHORTEST_PAUSE
        while count < self._copies * self._world and not self._is_stopped.wait(pause):
            if time.monotonic() > deadline:
                break
            pause = min(2 * pause, 0.1)
            count = self.store.add("copies", 0)
        if self._is_stopped.is_set():
            return True
        if not self._copies * self._world <= count < _ABANDONED:
            raise TimeoutError("another rank did not complete its copy of the last step")
        failures = self.store.add(f"failures/{parity}", 0)
        has_failed = failures > self._failures[parity]
        self._failures[parity] = failures
        return not has_failed

    def abandon(self) -> None:
        """Tell the other ranks that this one completes no more copies. Does nothing if the store has ended."""
        with suppress(RuntimeError):
            self.store.add("copies", _ABANDONED)

    def stop_waiting(self) -> None:
        """Let :meth:`agree_on_copy` return at once: this rank overwrites no more copies."""
        self._is_stopped.set()


class Ring:
    """Exchanges shards with the neighbouring pods, over a connection of two ranks each, from any thread.

    ``store``: of :class:`PeerCounter`.
    """

    def __init__(self, neighbours: RingNeighbours, rank: int, store: Any) -> None:
        self.neighbours = neighbours
        self._outgoing: _Connection
        self._incoming: _Connection
        # All ranks create the connections in an order in which none waits for a chain of others.
        outgoing_phase = _find_phase(neighbours.position, neighbours.length)
        incoming_phase = _find_phase((neighbours.position - 1) % neighbours.length, neighbours.length)
        if neighbours.length == 2:
            self._outgoing = self._incoming = _connect(rank, neighbours.target, store)
        elif outgoing_phase < incoming_phase:
            self._outgoing = _connect(rank, neighbours.target, store)
            self._incoming = _connect(rank, neighbours.source, store)
        else:
            self._incoming = _connect(rank, neighbours.source, store)
            self._outgoing = _connect(rank, neighbours.target, store)

    def exchange_numbers(self, own: Sequence[int]) -> list[int]:
        """Send numbers to the target; return those of the source, as many."""
        outgoing = torch.tensor(own, dtype=torch.int64)
        incoming = torch.empty_like(outgoing)
        self._exchange(outgoing, incoming)
        return [int(number) for number in incoming.tolist()]

    def exchange(self, outgoing: Tensor, incoming: Tensor) -> None:
        """Send ``outgoing`` to the target and fill ``incoming`` from the source, both uint8 on the host."""
        sent = torch.split(outgoing, _CHUNK_BYTES)
        received = torch.split(incoming, _CHUNK_BYTES)
        for index in range(max(len(sent), len(received))):
            self._exchange(
                sent[index] if index < len(sent) else None, received[index] if index < len(received) else None
            )

    def _exchange(self, outgoing: Tensor | None, incoming: Tensor | None) -> None:
        work = None
        if outgoing is not None:
            work = self._outgoing.group.send([outgoing], self._outgoing.peer, 0)
        if incoming is not None:
            self._incoming.group.recv([incoming], self._incoming.peer, 0).wait()
        if work is not None:
            work.wait()


def _find_phase(pair: int, length: int) -> int:
    """Return when a pair of neighbours of a ring connects: no rank has two pairs in one phase."""
    return 2 if length % 2 and pair == length - 1 else pair % 2


class _Connection(NamedTuple):
    """A group of two ranks. ``peer``: the other one's number in it."""

    group: Any
    peer: int


def _connect(rank: int, peer: int, store: Any) -> _Connection:
    # Not new_group(use_local_synchronization=True): its name contains the number of groups that the rank has created,
    # which differs between the two ranks of a pair in rings of odd length, and in programs with groups of their own.
    first, second = sorted((rank, peer))
    prefix = dist.PrefixStore(f"ring/{first}-{second}", store)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=_SECONDS_FOR_PEERS)
    group = dist.ProcessGroupGloo(prefix, int(rank == second), 2, timeout)
    return _Connection(group, int(peer == second))
