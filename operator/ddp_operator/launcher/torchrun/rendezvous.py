"""The rendezvous of a job's pods: each registers in the log of a round, and pod 0 publishes the list of members.

Keys in the store, below the run's id:

    <round>/pods       log of the pods that register for the round, or leave before it
    <round>/restart    exists once the members of the round before have to join this one
    <round>/members    the members, their restarts, and the address of rank 0's store
    beats/<pod>        a counter that rises while the pod lives; only if pods can join and leave
    closed             exists once a pod has ended

A pod that takes another's place has the same index, and thus the same place in these lists.
"""

import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Optional, Sequence

from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import api

from ..clock import AwakeClock
from ..pod import Pod
from .membership import GroupSize, Heartbeats, choose_members, read_registrations
from .store import SignedStore, host_store

_SECONDS_WITHOUT_STORE = 5.0
_SECONDS_FOR_CALL = 60.0
_SHORTEST_BEAT = 0.5  # between two heartbeats
_LONGEST_BEAT = 2.0
_MISSED_BEATS = 6  # after which a pod is dead
_LONGEST_PAUSE = 1.0  # between two reads of the store
_LONGEST_PAUSE_OF_POD_0 = 0.3
_PAUSE_PER_POD = 0.01


class TrainingOver(Exception):
    """The run has ended while this pod was on standby."""


class Round(NamedTuple):
    """A published round. ``members``: pod indices by rank; ``address``, ``port``: of rank 0's store.

    ``restarts``: of the ranks before this round. All members count the same, except one that took another's place.
    """

    number: int
    members: Sequence[int]
    restarts: int
    address: str
    port: int


_BEFORE_FIRST = Round(number=-1, members=(), restarts=0, address="", port=0)


class PodRendezvous(api.RendezvousHandler):
    """One pod's part in all rounds of a run. ``current``: the round that it has joined last.

    ``restarts``: of the ranks; set it before the next round, and read it after. A job with one pod needs no network:
    its rounds are complete at once. Raises: RendezvousConnectionError.
    """

    def __init__(self, pod: Pod, run: str, address: str, size: GroupSize) -> None:
        self._pod = pod
        self._run = run
        self._address = address
        self._size = size
        self._store = _connect(pod)
        self._shared = SignedStore(self._store, pod.secret, run)
        self._rank_stores = RankStores(pod, address)
        self._pause = min(_LONGEST_PAUSE, pod.nodes * _PAUSE_PER_POD)
        self._read_at = 0.0
        self._lost_store: Optional[tuple[AwakeClock, Exception]] = None
        self._beat_seconds = max(_SHORTEST_BEAT, min(_LONGEST_BEAT, pod.nodes * _PAUSE_PER_POD))
        self._heartbeats = Heartbeats(self._beat_seconds * _MISSED_BEATS, time.monotonic())
        self.current = _BEFORE_FIRST
        self.restarts = 0
        self._has_left = threading.Event()
        if pod.regroups:
            self._beat()
            threading.Thread(target=self._keep_beating, daemon=True, name="heartbeat").start()

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return "ddp"

    def get_run_id(self) -> str:
        """Return the run's id."""
        return self._run

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent hosts rank 0's store."""
        return self._rank_stores.are_hosted

    # -- joining

    def next_rendezvous(self) -> Any:
        """Join the next round that has a place for this pod.

        Raises: RendezvousClosedError, RendezvousConnectionError, RendezvousTimeoutError, TrainingOver.
        """
        try:
            joined = self._join()
        except RuntimeError as error:
            raise api.RendezvousConnectionError(f"lost the store: {error}") from error
        self.current = joined
        self.restarts = joined.restarts
        store = PrefixStore(f"{self._run}/{joined.number}/torch", self._store)
        rank = joined.members.index(self._pod.node)
        return _build_info(store, rank, len(joined.members), joined.address, joined.port)

    def _join(self) -> Round:
        """Return the next round with this pod. A new agent reads past the rounds before its time."""
        last = self.current
        while True:
            published = self._read_round(last.number + 1)
            if published is None:
                published = self._await_round(last.number + 1, last.members)
                if self._pod.node in published.members:
                    return published
            last = published

    def _await_round(self, number: int, previous: Sequence[int]) -> Round:
        """Register for a round and wait until it is published, with this pod or without it."""
        wait = _Wait(self._pod, number, previous, time.monotonic())
        pause = min(self._pause, _LONGEST_PAUSE_OF_POD_0) if self._pod.node == 0 else self._pause
        self._shared.append(f"{number}/pods", [self._pod.node, self.restarts])
        if not wait.is_standby:
            self._request_restart(number)
        try:
            while True:
                published = self._publish(wait) if self._pod.node == 0 else self._read_round(number)
                if published is not None:
                    return published
                self._check_wait(wait, time.monotonic())
                time.sleep(pause)
        except BaseException:
            with suppress(Exception):  # the store may be what has ended
                self._shared.append(f"{number}/pods", [self._pod.node, None])
            raise

    def _check_wait(self, wait: "_Wait", now: float) -> None:
        """Raise if the run has ended or the time limit is over. A spare requests a restart for a lost member."""
        if self.is_closed():
            raise TrainingOver if wait.is_standby else api.RendezvousClosedError
        if wait.is_standby and not self._is_restart_requested(wait.number):
            wait.since = now
            left = read_registrations(self._shared.read_log(f"{wait.number}/pods")).left
            if left.intersection(wait.previous) or self._find_dead(wait.previous):
                self._request_restart(wait.number)
        if now - wait.since > self._pod.join_timeout_seconds:
            raise api.RendezvousTimeoutError

    def _publish(self, wait: "_Wait") -> Optional[Round]:
        """Publish a round if it is complete. Only pod 0 does."""
        registrations = read_registrations(self._shared.read_log(f"{wait.number}/pods"))
        dead = self._find_dead(sorted({*registrations.joined, *wait.previous}))
        waited = time.monotonic() - wait.since
        members = choose_members(self._size, registrations, wait.previous, dead, waited)
        if members is None:
            return None
        address, port = self._rank_stores.prepare()
        restarts = max(registrations.joined[pod] for pod in members)
        self._shared.write(f"{wait.number}/members", [members, restarts, address, port])
        return Round(wait.number, members, restarts, address, port)

    def _read_round(self, number: int) -> Optional[Round]:
        value = self._shared.read(f"{number}/members")
        return None if value is None else Round(number, *value)

    def share(self) -> SignedStore:
        """Return the values that the pods share in the current round."""
        return SignedStore(self._store, self._pod.secret, f"{self._run}/{self.current.number}/shared")

    # -- changes of the group

    def num_nodes_waiting(self) -> int:
        """Return 1 if this pod has to join another round. Reads the store once in a pause.

        Raises: RendezvousConnectionError after some seconds without the store.
        """
        now = time.monotonic()
        if now - self._read_at < self._pause:
            return 0
        self._read_at = now
        if self._lost_store is None:
            try:
                return int(self._is_restart_requested(self.current.number + 1))
            except RuntimeError as error:
                self._lost_store = AwakeClock(1.0, now), error
        clock, problem = self._lost_store
        if clock.tick(now) > _SECONDS_WITHOUT_STORE:  # until then the ranks may end and report why
            raise api.RendezvousConnectionError(f"lost the store: {problem}") from problem
        return 0

    def leave(self) -> None:
        """Leave the run, so that its other pods do not wait for this one."""
        self._has_left.set()
        if self._pod.regroups and self.current is not _BEFORE_FIRST:
            following = self.current.number + 1
            self._shared.append(f"{following}/pods", [self._pod.node, None])
            self._request_restart(following)

    def _request_restart(self, number: int) -> None:
        self._shared.write(f"{number}/restart", True)

    def _is_restart_requested(self, number: int) -> bool:
        return self._shared.read(f"{number}/restart") is not None

    def _find_dead(self, pods: Sequence[int]) -> set[int]:
        """Return the pods whose heartbeats have stopped; none in a job whose pods do not join and leave."""
        if not self._pod.regroups or not pods:
            return set()
        counts = self._store.multi_get([f"{self._run}/beats/{pod}" for pod in pods])
        beats = {pod: counts[place] for place, pod in enumerate(pods)}
        return self._heartbeats.find_dead(beats, time.monotonic()) - {self._pod.node}

    def _beat(self) -> None:
        self._shared.add(f"beats/{self._pod.node}", 1)

    def _keep_beating(self) -> None:
        with suppress(RuntimeError):  # the store has ended, as the main thread will notice
            while not self._has_left.wait(self._beat_seconds):
                self._beat()

    # -- the end

    def is_closed(self) -> bool:
        """Return whether a pod has ended, so that there is no further round."""
        return self._shared.read("closed") is not None

    def set_closed(self) -> None:
        """Prevent all pods from joining another round."""
        self._shared.write("closed", True)

    def shutdown(self) -> bool:
        """End the run for all pods. Returns whether that succeeded."""
        with suppress(RuntimeError):  # the store has ended
            self.set_closed()
            return True
        return False


def _connect(pod: Pod) -> Any:
    if not pod.is_multi_node:
        return HashStore()
    try:
        timeout = timedelta(seconds=_SECONDS_FOR_CALL)
        return TCPStore(pod.store_host, pod.port, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise api.RendezvousConnectionError(f"no connection to the store: {error}") from error


class _Wait:
    """A pod's wait for a round. ``previous``: the members of the round before; ``since``: monotonic time.

    A pod on standby is a spare that the previous round does not need. Its time limit starts when a member is lost.
    """

    def __init__(self, pod: Pod, number: int, previous: Sequence[int], now: float) -> None:
        self.number = number
        self.previous = previous
        self.since = now
        self.is_standby = bool(pod.spares and previous and pod.node not in previous)


class RankStores:
    """The address of rank 0's store in each round, and the store if the agent hosts it.

    In a cluster rank 0 hosts it. On one machine it would listen on all addresses, so the agent of rank 0 hosts it.
    """

    def __init__(self, pod: Pod, address: str) -> None:
        self._is_local = pod.local
        self._address = address
        # A program of one rank may start ranks with a store of their own, to which they would not connect.
        self.are_hosted = pod.local and pod.nodes * pod.nproc_per_node > 1
        self._store: Any = None

    def prepare(self) -> tuple[str, int]:
        """Return address and port of a new store: restarted ranks would read the peers' addresses from the old one."""
        if self.are_hosted:
            self._store = host_store(self._address, 0)
            return self._address, int(self._store.port)
        with socket.create_server((self._address if self._is_local else "", 0)) as server:
            return self._address, int(server.getsockname()[1])


def _build_info(store: Any, rank: int, size: int, address: str, port: int) -> Any:
    """Return the result of ``next_rendezvous``. Before torch 2.4 the agent chooses rank 0's address itself."""
    if not hasattr(api, "RendezvousInfo"):
        return store, rank, size
    return api.RendezvousInfo(store, rank, size, api.RendezvousStoreInfo(address, port))
