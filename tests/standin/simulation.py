"""The operator and its API server in one thread, without network and without time: every step is the test's.

The operator's parts are the real ones, down to the client, whose calls end in the stand-in instead of a socket. When
the watches deliver, when a timer is due, where the process dies and which call fails is said by the test, so that each
run of it is the same.

What is left out, and is tested over HTTP: Kopf, and the API server's checks of a Job's fields, which cost most.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import kopf
import msgspec
import yaml

from ddp_operator.api.status import Status
from ddp_operator.cluster import ClusterError, Event, Key
from ddp_operator.cluster import Object as Frozen
from ddp_operator.constants import ANNOTATION_COMPLETION_INDEX, KIND, LABEL_ATTEMPT, LABEL_JOB_NAME
from ddp_operator.kube.client import ApiClient
from ddp_operator.kube.cluster import KubeCluster
from ddp_operator.kube.errors import ApiError
from ddp_operator.kube.events import build_event
from ddp_operator.kube.resources import path, plural
from ddp_operator.kube.store import Store
from ddp_operator.kube.sync import CHILD_SELECTOR, WATCHED, Laggard, Synchroniser
from ddp_operator.local import pods
from ddp_operator.local.store import format_time
from ddp_operator.reconcile import Reconciler

from .controllers import Controllers
from .errors import Failure
from .faults import Faults
from .running import CRD
from .selectors import labels_of, parse
from .server import Api, Ask
from .storage import Object, Storage, copied
from .validation import admit
from .watching import event_of

BEGIN = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)
FINISHED = ("Succeeded", "Failed")


class Killed(BaseException):
    """The operator's process ends here, in the midst of whatever it does."""


class Simulation:
    """An API server, its controllers and kubelets, and one operator."""

    def __init__(self) -> None:
        self.now = BEGIN
        self.storage = Storage(self.clock)
        numbers = itertools.count(1)
        self.storage.new_uid = lambda: f"00000000-0000-0000-0000-{next(numbers):012x}"
        self.faults = Faults()
        self.api = Api(self.storage, self.faults)
        self.api.install(_definition())
        self.controllers = Controllers(self.storage, self.api.kind)
        suffixes = itertools.count()
        self.controllers.suffix = lambda: f"{next(suffixes):05x}"
        self.storage.create(self.api.kind("Namespace"), {"metadata": {"name": "default"}, "spec": {}})
        self.page: str | None = None
        """What pods say at /metrics."""
        self.pages: dict[str, str | None] = {}
        """What those of single jobs say instead, by the job's name."""
        self.calls: list[str] = []
        """Every call of the operator: verb and resource."""
        self.kill_after = 0
        """The operator is killed right after this call, counted from the first; 0: never."""
        self.frozen = False
        """The watches bring nothing: only the comparison with lists finds what happens."""
        self.echo = 0
        """So many changes a watch brings once more, each time before it goes on."""
        self.lives = 0
        """How often the operator has started."""
        self.refused: list[str] = []
        """What the API server has found wrong with what the operator wrote."""
        self.events: list[str] = []
        """The reasons of all Events that the operator has posted."""
        self._wanted: dict[Key, datetime] = {}
        self._seen: dict[str, int] = {}
        self._begin()

    def clock(self) -> datetime:
        """Return the time, which only ``advance`` moves."""
        return self.now

    # The operator

    def _begin(self) -> None:
        """Let a new process of the operator exist, which knows nothing."""
        self.lives += 1
        self.store = Store()
        self.client = _Client(self)
        self.cluster = _Cluster(self, self.client, self.store)
        self.reconciler = Reconciler(self.cluster, clock=self.clock)
        self.sync = _Synchroniser(self.client, self.store, namespaces=(), interval=1e9, on_change=self.want)
        self._wanted.clear()

    def want(self, key: Key, seconds: float = 0.0) -> None:
        """Ask for a pass in so many seconds."""
        self._wanted[key] = self.now + timedelta(seconds=seconds)

    async def restart(self) -> None:
        """Start the operator anew: it lists everything, compares, and looks at every resource."""
        while True:
            self._begin()
            for kind in WATCHED:
                self._seen[kind] = len(self.storage.history)
                for obj in self.storage.list(self.api.kind(kind)):
                    if _matches(kind)(labels_of(obj)):
                        self._take(kind, "ADDED", obj)
            try:
                while True:
                    try:
                        await self.sync.resync()
                    except ClusterError:
                        continue
                    return
            except Killed:
                continue

    def _take(self, kind: str, event: str, obj: Object) -> None:
        key = self.store.remove(kind, obj) if event == "DELETED" else self.store.apply(kind, obj)
        if key is not None:
            self.want(key)

    def deliver(self, kind: str, count: int | None = None) -> bool:
        """Let the watch of a kind bring its next changes (all); return whether there were any."""
        history, first = self.storage.history, self._seen.get(kind, 0)
        last = len(history) if count is None else min(len(history), first + count)
        for change in history[max(0, first - self.echo) : last]:
            event = event_of(change, self.api.kind(kind), None, _matches(kind))
            if event is not None:
                self._take(kind, event["type"], copied(event["object"]))
        self._seen[kind] = last
        return last > first

    def repeat(self, kind: str, count: int) -> None:
        """Let the watch of a kind bring its last changes once more, as one that was cut may."""
        self._seen[kind] = max(0, self._seen.get(kind, 0) - count)

    def due(self) -> Iterator[Key]:
        """Yield the resources of which a pass is due."""
        yield from sorted(key for key, when in self._wanted.items() if when <= self.now)

    async def reconcile(self, key: Key) -> BaseException | None:
        """Make one pass, as the queue would; return what ended it, if something did."""
        self._wanted.pop(key, None)
        try:
            wait = await self.reconciler.reconcile(key)
        except ClusterError as error:
            self.want(key)
            return error
        except Killed as death:
            await self.restart()
            return death
        if wait is not None and key not in self._wanted:
            self.want(key, wait)
        return None

    async def settle(self, seconds: float = 2.0) -> None:
        """Let everybody work for so many seconds: each does at once what there is to do, and rests in between."""
        if self.lives == 1:
            await self.restart()
        end = self.now + timedelta(seconds=seconds)
        rounds = 0
        while rounds < 40:
            rounds += 1
            self.controllers.round()
            if self.frozen:
                await self.sync.resync()
            moved = [] if self.frozen else [kind for kind in WATCHED if self.deliver(kind)]
            keys = list(self.due())
            for key in keys:
                await self.reconcile(key)
            if not moved and not keys:
                following = min(self._wanted.values(), default=end)
                if following >= end:
                    self.now = end
                    return
                self.now, rounds = following, 0
        raise AssertionError(f"no rest at {self.now}: {self.calls[-20:]}")

    def move_clock(self, seconds: float) -> None:
        """Let the time jump, while nobody works."""
        self.now += timedelta(seconds=seconds)

    # The wire

    def call(self, ask: Ask) -> tuple[int, Any, float]:
        """Answer one call of the operator. Raises: Killed; ClusterError where no answer comes."""
        place = self.api.route(ask)
        fault = self.faults.match(place.verb, place.resource, place.name or "")
        self.calls.append(f"{place.verb} {place.resource}")
        try:
            if fault is not None and fault.status in ("drop", "timeout"):
                raise ClusterError("no answer")
            try:
                if fault is not None and isinstance(fault.status, int):
                    raise Failure(fault.status, "injected fault")
                answer: tuple[int, Any, float] = (*self.api.perform(ask, place), 0.0)
            except Failure as failure:
                if failure.code in (400, 422) and fault is None:
                    self.refused.append(f"{place.verb} {place.resource}: {failure.body()['message']}")
                answer = failure.code, failure.body(), 0.0
            if fault is not None and fault.status == "lost answer":
                raise ClusterError("the answer was lost")
            return answer
        finally:
            self.die_if_due()

    def die_if_due(self) -> None:
        """Let the process end if it was to end after this call. Raises: Killed."""
        if len(self.calls) == self.kill_after:
            raise Killed

    # What there is

    def get(self, kind: str, name: str) -> Object | None:
        """Return an object as stored, or None."""
        return self.storage.find(self.api.kind(kind), "default", name)

    def list(self, kind: str) -> list[Object]:
        """Return the objects of a kind."""
        return self.storage.list(self.api.kind(kind))

    def status(self, name: str = "train") -> Status:
        """Return a resource's status."""
        found = self.get(KIND, name)
        assert found is not None, name
        return msgspec.convert(found.get("status") or {}, Status)

    def pods(self, attempt: int | None = None, *, living: bool = True, name: str = "train") -> list[Object]:
        """Return a job's pods of an attempt (the current one) by index."""
        wanted = str(attempt if attempt is not None else self.status(name).attempt)
        found = [
            pod
            for pod in self.list("Pod")
            if labels_of(pod).get(LABEL_ATTEMPT) == wanted and labels_of(pod).get(LABEL_JOB_NAME) == name
            if not living or pod["status"]["phase"] not in FINISHED
        ]
        return sorted(found, key=index_of)

    # Users

    def create(self, resource: Mapping[str, Any]) -> Object:
        """Create an object; a training job's CEL rules are taken for granted."""
        kind = self.api.kind(str(resource["kind"]))
        return self.storage.create(kind, admit(kind, copied(dict(resource)), None, status_only=True))

    def edit(self, name: str = "train", **spec: Any) -> None:
        """Change members of a training job's spec."""
        kind, before = self.api.kind(KIND), self.get(KIND, name)
        assert before is not None, name
        after = copied(before)
        after["spec"] |= spec
        self.storage.update(kind, before, admit(kind, after, before, status_only=True))

    def delete(self, kind: str, name: str) -> None:
        """Delete an object; what it owns follows."""
        found = self.get(kind, name)
        if found is not None:
            self.storage.delete(self.api.kind(kind), found)

    # Nodes and kubelets

    def _write_pod(self, pod: Object, status: Mapping[str, Any], **spec: Any) -> None:
        before = self.get("Pod", pod["metadata"]["name"])
        if before is not None and before["metadata"]["uid"] == pod["metadata"]["uid"]:
            after = copied(before) | {"status": copied(dict(status))}
            after["spec"] |= spec
            self.storage.update(self.api.kind("Pod"), before, after, verb="kubelet")

    def run_pod(self, pod: Object) -> None:
        """Let a pod run, on a node of its index."""
        status = pods.running_status(pod, self.now)
        conditions = [{"type": "Ready", "status": "True", "lastTransitionTime": format_time(self.now)}]
        self._write_pod(pod, {**status, "podIP": "10.0.0.1", "conditions": conditions}, nodeName=node_of(pod))

    def end_pod(self, pod: Object, code: int = 0, message: Any = "", *, reason: str = "") -> None:
        """Let a pod's container end."""
        text = message if isinstance(message, str) else msgspec.json.encode(message).decode()
        reason = reason or ("Error" if code else "Completed")
        self._write_pod(pod, pods.finished_status(pod, code, reason, text, self.now))

    def evict(self, pod: Object, reason: str = "EvictionByEvictionAPI") -> None:
        """Announce a disruption, then delete the pod."""
        told = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "words"}
        status = pod["status"]
        told["lastTransitionTime"] = format_time(self.now)
        self._write_pod(pod, {**status, "conditions": [*(status.get("conditions") or []), told]})
        marked = self.get("Pod", pod["metadata"]["name"])
        if marked is not None and "deletionTimestamp" not in marked["metadata"]:
            grace = marked["spec"].get("terminationGracePeriodSeconds", 30)
            self.storage.delete(self.api.kind("Pod"), marked, grace=grace if marked["spec"].get("nodeName") else None)

    def lose_node(self, name: str) -> None:
        """Let a node fall silent: its pods are no longer ready, and what is deleted on it does not end."""
        self.controllers.dead_nodes.add(name)
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        ready = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "silent"}
        if not any(found["metadata"]["name"] == name for found in self.list("Node")):
            self.storage.create(self.api.kind("Node"), node | {"status": {"conditions": [ready]}})
        unready = {"type": "Ready", "status": "False", "lastTransitionTime": format_time(self.now)}
        for pod in self.list("Pod"):
            if pod["spec"].get("nodeName") == name and pod["status"]["phase"] not in FINISHED:
                self._write_pod(pod, pod["status"] | {"conditions": [unready]})


class _Client(ApiClient):
    """The operator's client, whose calls go nowhere but to the stand-in."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(self._log_in, qps=1e9, burst=1_000_000_000)
        self._simulation = simulation

    async def _log_in(self) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server="http://simulation")

    async def connect(self) -> kopf.ConnectionInfo:
        return await self._log_in()

    async def _send(
        self,
        info: kopf.ConnectionInfo,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        data: bytes | None,
        headers: dict[str, str],
        kind: str,
        seconds: float,
    ) -> tuple[int, Any, float]:
        query = {name: value for name, value in (params or {}).items() if name != "fieldValidation"}
        content_type = headers.get("Content-Type", "")
        return self._simulation.call(Ask(method, path, query, data or b"", content_type, headers["Accept"]))


class _Synchroniser(Synchroniser):
    """What the watches have not brought by now they have failed to bring: time stands still meanwhile."""

    async def _settle(self, lagging: list[Laggard]) -> list[Laggard]:
        return [(kind, meta) for kind, meta in lagging if not self._store.is_current(kind, meta)]


class _Cluster(KubeCluster):
    """The operator's cluster. Pods say what the test wants; Events are posted before anything else is done."""

    def __init__(self, simulation: Simulation, client: ApiClient, store: Store) -> None:
        super().__init__(client, store, on_change=simulation.want)
        self._simulation = simulation

    async def scrape(self, pod: Frozen, port: int) -> str | None:
        self._simulation.calls.append("scrape")
        self._simulation.die_if_due()
        return self._simulation.pages.get(labels_of(pod)[LABEL_JOB_NAME], self._simulation.page)

    async def emit(self, resource: Frozen, event: Event) -> None:
        number = len(self._simulation.events)
        body = build_event(resource, event, self._simulation.now, number)
        namespace = resource["metadata"]["namespace"]
        self._simulation.events.append(event.reason)
        try:
            await self._client.request("POST", path("Event", namespace), body=body, kind=plural("Event"))
        except (ApiError, ClusterError):
            self._simulation.events[number] = "lost"


@cache
def _definition() -> Object:
    loaded: Object = yaml.safe_load(CRD.read_text())
    return loaded


def index_of(pod: Object) -> int:
    """Return a pod's completion index."""
    return int((pod["metadata"].get("annotations") or {}).get(ANNOTATION_COMPLETION_INDEX, -1))


def node_of(pod: Object) -> str:
    """Return the node on which a pod runs here: one for each index and attempt."""
    return f"node-{labels_of(pod).get(LABEL_ATTEMPT)}-{index_of(pod)}"


def _matches(kind: str) -> Callable[[Mapping[str, str]], bool]:
    return parse("" if kind == KIND else CHILD_SELECTOR)
