"""The service that listens to the pods of running jobs, and asks all witnesses once one of them reports silence.

While nothing is silent a job costs two or three waiting requests. Leases are read for suspected nodes only.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from ddp_operator.api.cluster import Key, Snapshot
from ddp_operator.api.faults import contain
from ddp_operator.api.kubeobjects import utc_now
from ddp_operator.api.parse import parse_status
from ddp_operator.api.resources import find_metrics_port
from ddp_operator.api.status import Status
from ddp_operator.decide.hooks import Service
from ddp_operator.decide.state import Suspicion
from ddp_operator.decide.views import PodView
from ddp_operator.features.lost_nodes.contacts import Contact
from ddp_operator.features.lost_nodes.evidence import JobEvidence, PodEvidence, Reach, judge_pods
from ddp_operator.features.lost_nodes.readmission import ReadLease, Readmission, ReadNode
from ddp_operator.features.lost_nodes.returns import (
    DELETED,
    LONGEST_ABSENCE,
    LostPod,
    describe_return,
    list_awaited_nodes,
)
from ddp_operator.kube.cache import ObjectCache
from ddp_operator.reading.objects import view_pod
from ddp_pod.contract.peers import choose_peer_steps

logger = logging.getLogger(__name__)

SHORTEST_WAIT: Final = 3
"""Seconds after which a pod responds although no peer is silent. At the end of a wait a frozen machine is noticed."""
LONGEST_WAIT: Final = 8
_JOBS_PER_SECOND: Final = 50  # of waiting: many jobs are asked more rarely, so that all cost little in sum
PAUSE: Final = 0.5
"""Seconds between two rounds of questions about silent pods."""
MOST_JOBS: Final = 2000
MOST_SILENT: Final = 16
"""Silent pods of a job that are examined at a time."""
MOST_NODES_AT_ONCE: Final = 8
"""Nodes that are declared lost in a minute, in the whole cluster."""
LOOK_SECONDS: Final = 15.0
"""Seconds between two readings of the lost nodes that jobs avoid."""
_MINUTE: Final = timedelta(seconds=60)
_HINT_PAUSE: Final = timedelta(seconds=20)  # twice as long as a pod passes a hint on
_OTHERS: Final = 8  # pods asked in a round beside the witnesses
_PROMPT_ROUNDS: Final = 30  # of questions, after which a pod that is not lost is examined more rarely
_LONGEST_PAUSE: Final = 20  # pauses
_CONTROL_NODES: Final = 4  # other nodes of the job whose Leases are read for comparison
_FOLLOWED: Final = ("Running", "Restarting")
_TOO_MANY: Final = f"; {MOST_NODES_AT_ONCE} nodes were lost in the last minute: the operator waits"

Fetch = Callable[[str, int, int], Awaitable[Contact]]


class Group(NamedTuple):
    """The running pods of an attempt by index. ``port``: of their reports.

    ``ring``: the number of pods by which each pod chooses those that it probes.
    """

    pods: Mapping[int, PodView]
    ring: int
    port: int


class _Reached(NamedTuple):
    """The end of the operator's requests to a pod. ``since``: the last answer, or when the next one was due."""

    reach: Reach
    since: datetime


@dataclass(eq=False)
class _Followed:
    """A job that the service follows. ``turn``: of the pods that are listened to."""

    port: int
    task: asyncio.Task[None] | None = None
    turn: int = 0
    reached: dict[str, _Reached] = field(default_factory=dict)
    """By the UID of the pod."""
    suspicions: Mapping[str, Suspicion] = field(default_factory=dict)
    boots: Mapping[str, str] = field(default_factory=dict)
    """The boots of the silent pods' nodes, when they were first examined."""
    lost: dict[str, LostPod] = field(default_factory=dict)
    """By name, until the end or the return of their nodes is known."""
    returns: dict[str, Suspicion] = field(default_factory=dict)
    """The ends and returns of their nodes, by the names of lost pods."""
    awaited: frozenset[str] = frozenset()
    """Lost nodes that the job avoids until they are ready again."""
    hinted: dict[int, datetime] = field(default_factory=dict)
    """When a hint about a pod was last followed."""

    def accept_hints(self, hints: set[int], now: datetime) -> set[int]:
        """Return the pods that a witness has named, each once in a while: anyone who reaches a pod can send hints."""
        self.hinted = {pod: time for pod, time in self.hinted.items() if now - time < _HINT_PAUSE}
        accepted = hints.difference(self.hinted)
        self.hinted |= dict.fromkeys(accepted, now)
        return accepted


@dataclass(eq=False)
class NodeWatch(Service):
    """Finds lost pods. ``on_change`` is called for a job of which something else is suspected than before."""

    store: ObjectCache
    on_change: Callable[[Key], None]
    fetch: Fetch
    read_lease: ReadLease
    read_node: ReadNode
    clock: Callable[[], datetime] = utc_now
    pause: float = PAUSE
    look_seconds: float = LOOK_SECONDS
    _readmission: Readmission = field(init=False)
    _jobs: dict[Key, _Followed] = field(default_factory=dict)
    _declared: deque[tuple[datetime, str]] = field(default_factory=deque)
    """Nodes that were declared lost in the last minute."""

    def __post_init__(self) -> None:
        self._readmission = Readmission(self.read_node, self.read_lease, self.clock)

    async def run(self) -> None:
        """Look for the return of lost nodes, and wake the jobs that avoid them."""
        while True:
            with contain("feature lost-nodes", "returned nodes"):
                returned = await self._readmission.look(
                    frozenset[str]().union(*(followed.awaited for followed in self._jobs.values()))
                )
                for node in sorted(returned):
                    logger.info("node %s is ready again: the jobs that have lost it once may use it", node)
                for key, followed in list(self._jobs.items()):
                    if returned & followed.awaited:
                        self.on_change(key)
            await asyncio.sleep(self.look_seconds)

    def list_returned_nodes(self) -> frozenset[str]:
        """See ``Service``."""
        return self._readmission.list_ready()

    def note_status(self, snapshot: Snapshot, old: Status, new: Status, now: datetime) -> None:
        """Follow a job whose pods train, and no other one."""
        metadata = snapshot.resource["metadata"]
        key = Key(str(metadata["namespace"]), str(metadata["name"]))
        if new.phase in _FOLLOWED and new.attempt > 0:
            if key not in self._jobs and len(self._jobs) < MOST_JOBS:
                followed = _Followed(find_metrics_port(snapshot.resource))
                followed.task = asyncio.get_running_loop().create_task(self._follow(key, followed))
                self._jobs[key] = followed
            if key in self._jobs:
                self._jobs[key].awaited = frozenset(list_awaited_nodes(new))
        else:
            self.forget(key)

    def list_suspicions(self, key: Key) -> Mapping[str, Suspicion]:
        """See ``Service``. The first pass of an operator writes no status of a job in which nothing changes."""
        snapshot = None if key in self._jobs else self.store.snapshot(key)
        if snapshot is not None and (snapshot.resource.get("status") or {}).get("phase") in _FOLLOWED:
            status = parse_status(snapshot.resource)
            self.note_status(snapshot, status, status, self.clock())
        followed = self._jobs.get(key)
        return {} if followed is None else {**followed.suspicions, **followed.returns}

    async def close(self) -> None:
        """End all requests."""
        for key in list(self._jobs):
            self.forget(key)

    def forget(self, key: Key) -> None:
        """End the requests to the pods of a job."""
        followed = self._jobs.pop(key, None)
        if followed is not None and followed.task is not None:
            followed.task.cancel()

    async def _follow(self, key: Key, followed: _Followed) -> None:
        """Listen to a job's pods until it is forgotten. A fault ends one round."""
        while True:
            with contain("feature lost-nodes", str(key)):
                group = view_group(self.store.snapshot(key), followed.port)
                silent = await self._listen(group, followed)
                rounds = 0
                while silent:
                    group = view_group(self.store.snapshot(key), followed.port)
                    silent = await self._examine(key, group, followed, silent)
                    rounds += 1
                    await asyncio.sleep(self.pause * max(1, min(_LONGEST_PAUSE, rounds // _PROMPT_ROUNDS)))
                await self._find_returns(key, followed)
            await asyncio.sleep(self.pause)

    @property
    def _wait(self) -> int:
        """For how many seconds a pod may wait with its response."""
        return min(LONGEST_WAIT, SHORTEST_WAIT + len(self._jobs) // _JOBS_PER_SECOND)

    async def _listen(self, group: Group, followed: _Followed) -> set[int]:
        """Wait until a pod reports a silent peer, or does not respond itself. Returns the silent pods."""
        asked = choose_listeners(group, followed.turn)
        followed.turn += 1
        if not asked:
            await asyncio.sleep(self._wait)
            return set()
        requests = [asyncio.create_task(self._ask(group, index, followed, self._wait)) for index in asked]
        try:
            for finished in asyncio.as_completed(requests):
                silent = await finished
                if silent:
                    return silent
        finally:
            for request in requests:
                request.cancel()
        return set()

    async def _ask(self, group: Group, index: int, followed: _Followed, wait: int) -> set[int]:
        """Return the pods that a pod reports as silent, or this pod if it does not respond.

        A pod that has not answered yet is asked without waiting: it may freeze within the first seconds.
        """
        if group.pods[index].uid not in followed.reached:
            wait = 0
        contact = await self._reach(group.pods[index], group.port, followed, wait)
        if contact.report is not None:
            silent = {peer.pod for peer in contact.report.contacts if peer.silent_seconds is not None}
            own = set(contact.report.hints).intersection(group.pods)  # a hostile pod may name any number
            return silent.intersection(group.pods) | followed.accept_hints(own, self.clock())
        if contact.reach in ("Answers", "Refused"):  # at once: by a launcher of an older release, or by the machine
            await asyncio.sleep(wait)
            return set()
        reached = followed.reached.get(group.pods[index].uid)
        return {index} if reached is not None and reached.reach != "Answers" else set()

    async def _reach(self, pod: PodView, port: int, followed: _Followed, wait: int) -> Contact:
        due = self.clock() + timedelta(seconds=wait)
        contact = await self.fetch(pod.address, port, wait)
        before = followed.reached.get(pod.uid)
        if contact.reach == "Answers":
            followed.reached[pod.uid] = _Reached("Answers", self.clock())
        elif before is not None:  # a NetworkPolicy may hide a pod that has never answered
            since = min(due, self.clock()) if before.reach == "Answers" else before.since
            followed.reached[pod.uid] = _Reached(contact.reach, since)
        return contact

    async def _examine(self, key: Key, group: Group, followed: _Followed, silent: set[int]) -> set[int]:
        """Ask all witnesses of the silent pods, and conclude. Returns the pods that are silent now."""
        examined = sorted(silent.intersection(group.pods))[:MOST_SILENT]
        witnesses = {index: list_witnesses(group, index) for index in examined}
        others = choose_others(group, followed.turn)  # which may know of further silent pods
        followed.turn += 1
        asked = sorted({*examined, *others, *(peer for peers in witnesses.values() for peer in peers)})
        contacts = await asyncio.gather(
            *(self._reach(group.pods[index], group.port, followed, wait=0) for index in asked)
        )
        reports = {index: contact.report for index, contact in zip(asked, contacts, strict=True)}
        silences: dict[int, list[float]] = {index: [] for index in examined}
        named: set[int] = set()
        for witness in asked:
            report = reports[witness]
            for peer in report.contacts if report is not None else ():
                if peer.silent_seconds is not None:
                    named.add(peer.pod)
                if peer.pod in silences and peer.pod != witness:
                    silences[peer.pod].append(peer.silent_seconds or 0.0)
        silent_nodes = {group.pods[index].node_name for index in named.union(silent).intersection(group.pods)}
        evidence = await self._collect(group, followed, silences)
        unexamined = silent_nodes.difference(pod.node for pod in evidence.silent)
        evidence = replace(evidence, unexamined=len(unexamined))
        self._conclude(key, group, followed, judge_pods(evidence, self.clock()))
        unreached = {index for index in examined if not self._is_reached(group.pods[index], followed)}
        return named.intersection(group.pods) | unreached

    def _is_reached(self, pod: PodView, followed: _Followed) -> bool:
        """Return whether the pod's launcher has answered the operator's last request, or none ever."""
        reached = followed.reached.get(pod.uid)
        return reached is None or reached.reach == "Answers"

    async def _collect(self, group: Group, followed: _Followed, silences: Mapping[int, Sequence[float]]) -> JobEvidence:
        """Read the Leases of the silent pods' nodes, and of some others for comparison."""
        nodes = {group.pods[index].node_name for index in silences}
        used = {pod.node_name for pod in group.pods.values()}
        others = sorted(used - nodes)[:_CONTROL_NODES]
        names = sorted(nodes) + others
        readings = dict(zip(names, await asyncio.gather(*map(self.read_lease, names)), strict=True))
        ends = await self._find_ends(followed, sorted(nodes))
        now = self.clock()
        pods = []
        for index, peers in silences.items():
            pod = group.pods[index]
            reached = followed.reached.get(pod.uid)
            lease = readings[pod.node_name]
            since = reached.since if reached is not None else now
            pods.append(
                PodEvidence(
                    name=pod.name,
                    uid=pod.uid,
                    index=index,
                    node=pod.node_name,
                    peers=peers,
                    reach=reached.reach if reached is not None else "",
                    reach_seconds=max(0.0, (now - since).total_seconds()),
                    lease=lease.age,
                    lease_problem=lease.problem,
                    end=ends.get(pod.node_name, ""),
                )
            )
        known = [age for age in (readings[name].age for name in others) if age is not None]
        late = sum(age.is_late for age in known)
        return JobEvidence(pods, len(used), len(known) - late, late)

    async def _find_ends(self, followed: _Followed, nodes: Sequence[str]) -> Mapping[str, str]:
        """Return the nodes of silent pods that have ended since these were first examined, and how."""
        readings = await asyncio.gather(*map(self.read_node, nodes))
        boots = {node: reading.boot for node, reading in zip(nodes, readings, strict=True)}
        followed.boots = {node: followed.boots.get(node) or boot for node, boot in boots.items()}
        ends: dict[str, str] = {}
        for node, boot in boots.items():
            if boot == DELETED:
                ends[node] = "was deleted"
            elif boot and boot != followed.boots[node]:
                ends[node] = "has restarted"
        return ends

    async def _find_returns(self, key: Key, followed: _Followed) -> None:
        """Note the ends and returns of lost nodes. A job has at most as many as are declared lost in a while."""
        for name, lost in list(followed.lost.items()):
            reading, lease = await asyncio.gather(self.read_node(lost.node), self.read_lease(lost.node))
            now = self.clock()
            text = describe_return(lost, reading.boot, lease, now)
            if text or now - lost.declared > LONGEST_ABSENCE:
                del followed.lost[name]
            if text:
                followed.returns = {name: Suspicion(lost.declared, text, is_lost=False)}
                logger.warning("%s: pod %s was lost: %s", key, name, text)
                self.on_change(key)

    def _conclude(self, key: Key, group: Group, followed: _Followed, suspicions: Mapping[str, Suspicion]) -> None:
        """Record the suspicions, and wake the job's next pass if they have changed."""
        nodes = {pod.uid: pod.node_name for pod in group.pods.values()}
        names = {pod.uid: pod.name for pod in group.pods.values()}
        limited = {uid: self._limit_rate(nodes[uid], suspicion) for uid, suspicion in suspicions.items()}
        before = {uid: suspicion.is_lost for uid, suspicion in followed.suspicions.items()}
        followed.suspicions = limited
        if before != {uid: suspicion.is_lost for uid, suspicion in limited.items()}:
            for uid, suspicion in limited.items():
                state = "is lost" if suspicion.is_lost else "may be lost"
                logger.warning("%s: node %s %s: %s", key, nodes[uid], state, suspicion.message)
                if suspicion.is_lost:
                    boot = followed.boots.get(nodes[uid], "")
                    lost = LostPod(nodes[uid], boot, self.clock(), is_frozen=suspicion.is_frozen)
                    followed.lost.setdefault(names[uid], lost)
                    self._readmission.forget(nodes[uid])
            self.on_change(key)

    def _limit_rate(self, node: str, suspicion: Suspicion) -> Suspicion:
        """Return the suspicion, without its conclusion if too many nodes were lost in the last minute."""
        if not suspicion.is_lost:
            return suspicion
        now = self.clock()
        while self._declared and now - self._declared[0][0] >= _MINUTE:
            self._declared.popleft()
        known = {name for _, name in self._declared}
        if node not in known and len(known) >= MOST_NODES_AT_ONCE:
            return suspicion._replace(message=f"{suspicion.message}{_TOO_MANY}", is_lost=False)
        if node not in known:
            self._declared.append((now, node))
        return suspicion


def view_group(snapshot: Snapshot | None, port: int) -> Group:
    """Return the running pods of the current attempt in a snapshot."""
    if snapshot is None:
        return Group({}, 0, port)
    attempt = (snapshot.resource.get("status") or {}).get("attempt")
    pods = [view_pod(raw) for raw in snapshot.pods]
    own = [pod for pod in pods if pod.attempt == attempt and pod.alive and not pod.deleting]
    running = {pod.index: pod for pod in own if pod.running and pod.has_run and pod.address and pod.node_name}
    return Group(running, _count_ring(snapshot), port)


def _count_ring(snapshot: Snapshot) -> int:
    spec = snapshot.resource.get("spec") or {}
    most = (spec.get("elastic") or {}).get("maxNodes")
    return max(int(spec.get("nodes") or 1) + int(spec.get("spares") or 0), int(most or 0))


def choose_listeners(group: Group, turn: int) -> Sequence[int]:
    """Return the pods to listen to: pod 0, a witness of it, and another one in turn."""
    indexes = sorted(group.pods)
    if not indexes:
        return ()
    return list(dict.fromkeys((indexes[0], indexes[-1], indexes[turn % len(indexes)])))


def choose_others(group: Group, turn: int) -> Sequence[int]:
    """Return some pods in turn."""
    indexes = sorted(group.pods)
    first = turn * _OTHERS % max(1, len(indexes))
    return (indexes[first:] + indexes[:first])[:_OTHERS]


def list_witnesses(group: Group, index: int) -> Sequence[int]:
    """Return the running pods that probe a pod."""
    witnesses = [(index - step) % group.ring for step in choose_peer_steps(group.ring)]
    return [witness for witness in witnesses if witness in group.pods]
