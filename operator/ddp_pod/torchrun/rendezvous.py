"""The rendezvous of a job's pods: each registers in the log of a round, and pod 0 publishes the list of members.

Keys in the store, below the run's id:

    <round>/pods       log of the pods that register for the round, or leave before it
    <round>/replacing  log of those of them that take the place of another pod
    <round>/restart    exists once the members of the round before have to join this one
    <round>/cause      exists once a pod knows why: its own rank has failed, or a pod has joined or left
    <round>/change     exists once a pod joins or leaves: the members of the round before stop their ranks
    <round>/stopping   log of the members that were asked to stop
    <round>/members    the members, their restarts, the address of rank 0's store, and whether there is a cause
    beats/<pod>        a time that rises while the pod lives; only if pods can join and leave
    closed             exists once a pod has ended

A pod that takes another's place has the same index, and thus the same place in these lists.
"""

import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import api

from ..base.files import log
from ..base.known_failure import KnownFailure
from ..base.pod import Pod
from ..contract.failure_table import PREEMPTED, Outcome
from ..contract.names import EXIT_PREEMPTED
from .membership import GroupSize, Heartbeats, Registration, Seats, choose_members
from .store import SignedStore, host_store

STATIC = "static"
_SECONDS_WITHOUT_STORE = 5.0
_SECONDS_FOR_CALL = 60.0
_SHORTEST_BEAT = 0.5  # between two heartbeats
_LONGEST_BEAT = 2.0
_MISSED_BEATS = 6  # after which a pod is dead
_LONGEST_PAUSE = 1.0  # between two reads of the store
_LONGEST_PAUSE_OF_POD_0 = 0.3
_LONGEST_PAUSE_TO_JOIN = 0.4  # of a pod that waits for a round, as all then wait for each other
_PAUSE_PER_POD = 0.01


class TrainingOver(Exception):
    """The run has ended while this pod was on standby."""


class PodReplacedError(KnownFailure):
    """Another pod has this pod's index: this one was declared lost, and must not train beside its successor."""

    def __init__(self, pod: int) -> None:
        message = f"another pod has taken the place of this pod {pod}, which was lost to its peers; this one ends"
        super().__init__(message, Outcome(PREEMPTED.name, EXIT_PREEMPTED), PREEMPTED.remedy)


class Round(NamedTuple):
    """A published round. ``members``: pod indices by rank; ``address``, ``port``: of rank 0's store.

    ``restarts``: of the ranks before this round. All members count the same, except one that took another's place.
    ``explained``: whether a pod knew the cause of the restart, or pods have joined, left or been replaced.
    ``identities``: of the members.
    """

    number: int
    members: Sequence[int]
    restarts: int
    address: str
    port: int
    explained: bool
    identities: Sequence[str] = ()


class Unfinished(NamedTuple):
    """A member that trains on although the ranks of another one have ended with 0, and why, as text.

    ``explained``: whether a pod was asked to stop, has joined or left, or knows why ranks have failed. Else its ranks
    have only lost a peer, and no pod has reported so far which.
    """

    pod: int
    reason: str
    explained: bool


_BEFORE_FIRST = Round(number=-1, members=(), restarts=0, address="", port=0, explained=True)


class PodRendezvous(api.RendezvousHandler):
    """One pod's part in all rounds of a run. ``current``: the round that it has joined last.

    ``restarts``: of the ranks, and ``knows_cause``: whether this pod knows why they restart, both to set before the
    next round. ``is_cause_known``: the same of any pod, as ``num_nodes_waiting`` has read it. With the backend
    ``static`` the ranks use the store of the pods, at the job's port. A job with one pod needs no network.
    Raises: RendezvousConnectionError.
    """

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._size = GroupSize(pod.nodes, pod.min_nodes or pod.nodes, pod.max_nodes or pod.nodes)
        self._store = _connect(pod)
        self._shared = SignedStore(self._store, pod.secret, pod.run_id)
        self._rank_store: Any = None
        self._pause = min(_LONGEST_PAUSE, pod.nodes * _PAUSE_PER_POD)
        self._read_at = 0.0
        self._lost_at: float | None = None  # the store
        self._beat_seconds = max(_SHORTEST_BEAT, min(_LONGEST_BEAT, pod.nodes * _PAUSE_PER_POD))
        self._heartbeats = Heartbeats(self._beat_seconds * _MISSED_BEATS, time.monotonic())
        self._seats = Seats()
        self.current = _BEFORE_FIRST
        self.restarts = 0
        self.knows_cause = True  # it joins
        self.is_cause_known = False
        self._has_taken_part = False  # in a round, as another agent of this pod may have
        self._next = 0  # the round for which this pod registers, or has registered last
        self._has_left = threading.Event()
        if pod.regroups:
            self._beat()
            threading.Thread(target=self._keep_beating, daemon=True, name="heartbeat").start()

    def get_backend(self) -> str:
        """Return torchrun's name of the backend."""
        return self._pod.rendezvous_backend

    def get_run_id(self) -> str:
        """Return the run's id."""
        return self._pod.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether the agents host rank 0's store. On one machine the rank's own would listen on all addresses.

        A program of one rank may start ranks that create a store themselves, to which they would not connect.
        """
        has_peers = self._pod.nodes * self._pod.nproc_per_node > 1
        return self._pod.rendezvous_backend == STATIC or (self._pod.local and has_peers)

    # -- joining

    def next_rendezvous(self) -> Any:
        """Join the next round that has a place for this pod.

        Raises: RendezvousClosedError, RendezvousConnectionError, RendezvousTimeoutError, TrainingOver,
        PodReplacedError.
        """
        try:
            self.current = self._join()
        except RuntimeError as error:
            raise api.RendezvousConnectionError(f"lost the store: {error}") from error
        self._next = self.current.number + 1
        self.is_cause_known = False
        store = PrefixStore(f"{self._pod.run_id}/{self.current.number}/torch", self._store)
        rank = self.current.members.index(self._pod.node)
        size = len(self.current.members)
        bootstrap = api.RendezvousStoreInfo(self.current.address, self.current.port)
        return api.RendezvousInfo(store, rank, size, bootstrap)

    def _join(self) -> Round:
        """Return the next round with this pod. A new agent reads past the rounds before its time."""
        last = self.current
        while True:
            self._next = last.number + 1
            published = self._read_round(self._next)
            is_late = published is not None
            if published is None:
                published = self._await_round(last.members)
            self._seats.note_round(published.members, published.identities)
            if self._pod.node in published.members:
                self._check_identity(published, is_late=is_late)
                if not is_late:
                    return published
            last = published

    def _check_identity(self, published: Round, *, is_late: bool) -> None:
        """Raises: PodReplacedError if the member with this pod's index is another pod that has replaced this one.

        ``is_late``: whether the round was published before this agent had registered. A new pod reads the rounds of
        its predecessors first.
        """
        identity = published.identities[published.members.index(self._pod.node)]
        if identity == self._pod.identity:
            self._has_taken_part = True
        elif self._has_taken_part or not is_late:
            raise PodReplacedError(self._pod.node)

    def _await_round(self, previous: Sequence[int]) -> Round:
        """Register for the next round and wait until it is published, with this pod or without it.

        A pod on standby is a spare that the ``previous`` members do not need. It has no time limit until one is lost.
        """
        is_standby = bool(self._pod.spares and previous and self._pod.node not in previous)
        longest = _LONGEST_PAUSE_OF_POD_0 if self._pod.node == 0 else _LONGEST_PAUSE_TO_JOIN
        since = time.monotonic()
        self._register(self.restarts)
        if not is_standby:
            self.request_restart(knows_cause=self.knows_cause, is_change=self.current.number < 0)
        while True:
            waited = time.monotonic() - since
            published = self._publish(previous, waited) if self._pod.node == 0 else self._read_round(self._next)
            if published is not None:
                return published
            if self.is_closed():
                raise TrainingOver if is_standby else api.RendezvousClosedError
            if is_standby and not self._is_restart_requested():
                since = time.monotonic()
                self._replace_lost(previous)
            elif waited > self._pod.join_timeout_seconds:
                raise api.RendezvousTimeoutError
            time.sleep(self._pause if is_standby else min(self._pause, longest))

    def _replace_lost(self, members: Sequence[int]) -> None:
        """Request a restart if a member has left or is dead: another pod takes its place."""
        registrations = self._read_registrations()
        if any(registrations.get(pod, 0) is None for pod in members) or self._find_dead(members):
            self.request_restart(knows_cause=True, is_change=True)

    def _publish(self, previous: Sequence[int], waited: float) -> Round | None:
        """Publish the next round if it is complete. Only pod 0 does."""
        lines = self._seats.select(self._read_log())
        registrations = {pod: line.restarts for pod, line in lines.items()}
        dead = self._find_dead({*registrations, *previous})
        if dead.intersection(previous):
            self.request_restart(knows_cause=True, is_change=True)
        members = choose_members(self._size, registrations, previous, dead, waited)
        if members is None:
            return None
        counts = {registrations[pod] or 0 for pod in members}
        explained = len(counts) > 1 or members != list(previous) or self._read_cause()
        address = [self._pod.address, self._prepare_rank_store()]
        identities = [lines[pod].identity for pod in members]
        self._shared.write(f"{self._next}/members", [members, max(counts), *address, explained, identities])
        return self._read_round(self._next)

    def _read_registrations(self) -> dict[int, int | None]:
        """Return the restarts of each pod that has registered for the next round; None for a pod that has left."""
        return {pod: line.restarts for pod, line in self._seats.select(self._read_log()).items()}

    def _read_log(self, name: str = "pods") -> list[Registration]:
        return [Registration(*line) for line in self._shared.read_log(f"{self._next}/{name}")]

    def _register(self, restarts: int | None) -> None:
        """Register for the next round; None: this pod leaves."""
        line = Registration(self._pod.node, restarts, self._pod.identity)
        if self._seats.find_replaced([line]):
            self._shared.append(f"{self._next}/replacing", line)
        self._shared.append(f"{self._next}/pods", line)

    def has_lost_member(self) -> bool:
        """Return whether another pod joins in the place of a member that has not announced its stop.

        Ranks that wait for the lost member cannot agree on saving. Raises: RuntimeError without the store.
        """
        # Not the log of all pods, which each of them would have to verify at each restart.
        replaced = self._seats.find_replaced(self._read_log("replacing")).intersection(self.current.members)
        return bool(replaced.difference(self._shared.read_log(f"{self.current.number}/stopping")))

    def _prepare_rank_store(self) -> int:
        """Return the port of a new store: restarted ranks would read the addresses of their peers from the old one."""
        if self._pod.rendezvous_backend == STATIC:
            return self._pod.port
        if self.use_agent_store:
            self._rank_store = host_store(self._pod.address, 0)
            return int(self._rank_store.port)
        with socket.create_server((self._pod.address if self._pod.local else "", 0)) as server:
            return int(server.getsockname()[1])

    def _read_round(self, number: int) -> Round | None:
        value = self._shared.read(f"{number}/members")
        return None if value is None else Round(number, *value)

    def share(self) -> SignedStore:
        """Return the values that the pods share in the current round."""
        return SignedStore(self._store, self._pod.secret, f"{self._pod.run_id}/{self.current.number}/shared")

    # -- changes of the group

    def num_nodes_waiting(self) -> int:
        """Return 1 if this pod has to join another round. Reads the store once in a pause.

        Raises: RendezvousConnectionError after some seconds without the store.
        """
        now = time.monotonic()
        if now - self._read_at < self._pause:
            return 0
        self._read_at = now
        try:
            if not self._is_restart_requested():
                return 0
            self.is_cause_known = self._read_cause()
            return 1
        except RuntimeError as error:
            self._lost_at = self._lost_at or now
            if now - self._lost_at > _SECONDS_WITHOUT_STORE:  # until then the ranks may end and report why
                raise api.RendezvousConnectionError(f"lost the store: {error}") from error
            return 0

    def is_round_over(self) -> bool:
        """Return whether this pod has to join another round before its ranks have started.

        No rank can fail then and make the pods join again, so that pod 0 itself looks for lost pods.
        Raises: RuntimeError without the store.
        """
        if self._pod.node == 0:
            self._replace_lost(self.current.members)
        return self.is_closed() or self.num_nodes_waiting() > 0

    def leave(self) -> None:
        """Leave the run, so that its other pods do not wait for this one."""
        self._has_left.set()
        try:
            self._register(None)
            if self._pod.regroups and self._pod.node in self.current.members:
                self.request_restart(knows_cause=True, is_change=True)
        except RuntimeError as error:  # the store has ended
            log(f"could not leave the rendezvous, so the other pods wait for missing heartbeats: {error}")

    def request_restart(self, *, knows_cause: bool, is_change: bool = False) -> None:
        """Make the members of the current round join the next one. ``is_change``: as a pod joins or leaves.

        Raises: RuntimeError without the store.
        """
        if knows_cause:
            self._shared.write(f"{self._next}/cause", True)
        if is_change:
            self._shared.write(f"{self._next}/change", True)
        self._shared.write(f"{self._next}/restart", True)

    def announce_stop(self) -> None:
        """Report to the members of the current round that this pod was asked to stop. Raises: RuntimeError.

        A pod does so before it stops its ranks: the ranks of all pods may agree to end, with any exit code.
        """
        if self.current.number >= 0:
            self._shared.append(f"{self.current.number}/stopping", self._pod.node)

    def find_interruption(self, list_ended: Callable[[], Collection[int]]) -> str:
        """Return why the ranks of the current round may have been asked to end; empty: no pod knows of a reason.

        ``list_ended``: reads the pods whose ranks had ended with 0 before. Raises: RuntimeError without the store.
        """
        stopping = self._list_stopping(list_ended)
        if stopping:
            return describe_stop(stopping)
        is_changing = self._shared.read(f"{self._next}/change") is not None
        return "pods join or leave the job" if is_changing else ""

    def find_unfinished(self, list_ended: Callable[[], Collection[int]]) -> Unfinished | None:
        """Return why other members train on although the ranks of this one have ended with 0; None: none does.

        A member that was asked to stop, or joins the next round, has not ended. A pod that joins for the first time
        comes too late. ``list_ended``, Raises: see ``find_interruption``.
        """
        stopping = self._list_stopping(list_ended)
        if stopping:
            return Unfinished(stopping[0], describe_stop(stopping), explained=True)
        if not self._is_restart_requested():
            return None
        rejoining = set(self._read_registrations()).intersection(self.current.members).difference(list_ended())
        if not rejoining:
            return None
        is_changing = self._shared.read(f"{self._next}/change") is not None
        first = min(rejoining)
        return Unfinished(first, f"pod {first} restarts its ranks", explained=is_changing or self._read_cause())

    def _list_stopping(self, list_ended: Callable[[], Collection[int]]) -> list[int]:
        """Return the other members that were asked to stop before their ranks had ended."""
        stopping = set(self._shared.read_log(f"{self.current.number}/stopping")) - {self._pod.node}
        return sorted(stopping.difference(list_ended())) if stopping else []

    def _is_restart_requested(self) -> bool:
        return self._shared.read(f"{self._next}/restart") is not None

    def _read_cause(self) -> bool:
        return self._shared.read(f"{self._next}/cause") is not None

    def _find_dead(self, pods: Collection[int]) -> set[int]:
        """Return the pods whose heartbeats have stopped; none in a job whose pods do not join and leave."""
        if not self._pod.regroups or not pods:
            return set()
        times = self._shared.read_all([f"beats/{pod}" for pod in pods])
        beats = {pod: times[place] for place, pod in enumerate(pods)}
        return self._heartbeats.find_dead(beats, time.monotonic()) - {self._pod.node}

    def _beat(self) -> None:
        self._shared.write(f"beats/{self._pod.node}", time.time())

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


def describe_stop(pods: Sequence[int]) -> str:
    """Return the text about pods that were asked to stop."""
    more = f" and {len(pods) - 1} more" if len(pods) > 1 else ""
    return f"pod {pods[0]}{more} {'were' if more else 'was'} asked to stop"


def _connect(pod: Pod) -> Any:
    if not pod.is_multi_node:
        return HashStore()
    try:
        timeout = timedelta(seconds=_SECONDS_FOR_CALL)
        return TCPStore(pod.store_host, pod.port, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise api.RendezvousConnectionError(f"no connection to the store: {error}") from error
