"""The operator and its API server in one thread, without network and real time: the test controls every step.

The operator's parts are the real ones, down to the client, whose calls end in the stand-in instead of a socket. The
test decides when watches deliver, when a timer is due, where the process is killed or frozen and which call fails, so
that every run is the same.

A successor replaces a frozen operator after the end of its Lease. The frozen operator may resume later.

Omitted, and tested over HTTP: Kopf, the Lease (the simulation selects the leader), and the API server's expensive
checks of a Job's fields.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import msgspec
import yaml

from ddp_cli.local import pods
from ddp_cli.local.store import format_time
from ddp_operator.api.cluster import Event, Key
from ddp_operator.api.cluster import Object as Frozen
from ddp_operator.api.cluster_errors import ClusterError
from ddp_operator.api.constants import ANNOTATION_COMPLETION_INDEX, KIND, LABEL_ATTEMPT, LABEL_JOB_NAME
from ddp_operator.api.status import Status
from ddp_operator.kube.children import WHOLE_KINDS
from ddp_operator.kube.client import ResponseError
from ddp_operator.kube.events import build_event
from ddp_operator.kube.resources import kind_of, path, plural
from ddp_operator.kube.resync import CHILD_SELECTOR, Resync

from .controllers import Controllers
from .errors import ApiFailure
from .faults import Faults
from .kueue import LOCAL_QUEUE, WORKLOAD, Kueue, Manages
from .process import LEASE, Fence, Process
from .running import CRD
from .selectors import labels_of, parse
from .server import Ask, StandInApi
from .storage import Object, Storage, copied
from .validation import admit
from .watching import event_of

BEGIN = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)
FINISHED = ("Succeeded", "Failed")


class Killed(BaseException):
    """The operator's process ends here, during any action."""


class Deposed(Exception):
    """The operator's process is frozen here, and another one leads."""


class OperatorSimulation:
    """An API server, its controllers and kubelets, and one operator that leads."""

    def __init__(self) -> None:
        self.now = BEGIN
        self.storage = Storage(self.clock)
        numbers = itertools.count(1)
        self.storage.new_uid = lambda: f"00000000-0000-0000-0000-{next(numbers):012x}"
        self.faults = Faults()
        self.api = StandInApi(self.storage, self.faults)
        self.api.install(_definition())
        self.controllers = Controllers(self.storage, self.api.kind)
        suffixes = itertools.count()
        self.controllers.suffix = lambda: f"{next(suffixes):05x}"
        self.storage.create(self.api.kind("Namespace"), {"metadata": {"name": "default"}, "spec": {}})
        self.page: str | None = None
        """The pods' reports."""
        self.pages: dict[str, str | None] = {}
        """The reports of single jobs instead, by the job's name."""
        self.calls: list[str] = []
        """Every call of the operator: verb and resource."""
        self.kill_after = 0
        """The operator is killed right after this call, counted from the first; 0: never."""
        self.stop_at = 0
        """The operator is frozen at this call, counted from the first, and is deposed; 0: never."""
        self.fence: Fence = "closed"
        """The call of an operator that is frozen at ``stop_at``; an open fence sends it when the operator resumes."""
        self.wake_after: int | None = None
        """Number of calls after which it resumes; None: when the test resumes it."""
        self.stale_passes = 0
        """Number of passes that a deposed operator with an open fence runs after the one in which it was stopped."""
        self.deposed: list[Process] = []
        """Frozen operators, the oldest first."""
        self.late: list[str] = []
        """Every call that was made by a deposed operator: verb and resource."""
        self.late_writes: dict[int, tuple[str, str, str, str]] = {}
        """The results of these calls, by the version that each write created: verb, plural, namespace, name."""
        self.frozen = False
        """The watches deliver nothing: only the comparison with lists finds changes."""
        self.echo = 0
        """Number of changes that a watch delivers again before it continues."""
        self.lives = 0
        """How often the operator has started."""
        self.refused: list[str] = []
        """The validation errors of the operator's writes."""
        self.events: list[str] = []
        """The reasons of all Events that the operator has posted."""
        self._begin()

    def clock(self) -> datetime:
        """Return the time, which only ``advance`` moves."""
        return self.now

    # The operator

    def _begin(self) -> None:
        """Create a new process of the operator without memory."""
        self.lives += 1
        self.process = Process(self)

    @property
    def sync(self) -> Resync:
        """The comparison of the leading operator's cache with lists."""
        return self.process.sync

    def want(self, key: Key, seconds: float = 0.0, *, of: Process | None = None) -> None:
        """Schedule a pass of an operator (the leader) in some seconds."""
        (of or self.process).wanted[key] = self.now + timedelta(seconds=seconds)

    async def restart(self) -> None:
        """Restart the operator: it lists everything, compares, and processes every resource."""
        while True:
            self._begin()
            for kind in WHOLE_KINDS:
                self.process.seen[kind] = len(self.storage.history)
                for obj in self.storage.list(self.api.kind(kind)):
                    if _matches(kind)(labels_of(obj)):
                        self._take(kind, "ADDED", obj)
            try:
                while True:
                    try:
                        await self._run(self.sync.resync())
                    except ClusterError:
                        continue
                    return
            except (Killed, Deposed):
                continue

    async def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run an action of the leading operator. Raises: Deposed if it is frozen meanwhile; Killed."""
        process = self.process
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(process.stands.wait())
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if process.fence is None:
            return await task
        process.work = task
        self.deposed.append(process)
        self.now += timedelta(seconds=LEASE)
        raise Deposed

    async def stand_still(self, process: Process) -> None:
        """Freeze an operator here until it is resumed, so that its successor starts."""
        process.fence = self.fence
        process.stands.set()
        await process.goes_on.wait()

    async def forget_deposed(self) -> None:
        """End the frozen operators."""
        work = [process.work for process in self.deposed if process.work is not None]
        self.deposed.clear()
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    async def wake(self, process: Process) -> None:
        """Resume a deposed operator, which finishes its current action and then finds that it is not the leader."""
        self.deposed.remove(process)
        process.goes_on.set()
        assert process.work is not None
        await asyncio.gather(process.work, return_exceptions=True)
        for _ in range(self.stale_passes if process.fence == "open" else 0):
            for key in {Key("default", str(item["metadata"]["name"])) for item in self.list(KIND)}:
                with contextlib.suppress(ClusterError):
                    await process.reconciler.reconcile(key)

    def _take(self, kind: str, event: str, obj: Object) -> None:
        store = self.process.store
        key = store.remove(kind, obj) if event == "DELETED" else store.apply(kind, obj)
        if key is not None:
            self.want(key)

    def deliver(self, kind: str, count: int | None = None) -> bool:
        """Deliver the next changes (all) of the watch of a kind; return whether there were any."""
        history = self.storage.history
        first = self.process.seen.get(kind, 0)
        last = len(history) if count is None else min(len(history), first + count)
        for change in history[max(0, first - self.echo) : last]:
            event = event_of(change, self.api.kind(kind), None, _matches(kind))
            if event is not None:
                self._take(kind, event["type"], copied(event["object"]))
        self.process.seen[kind] = last
        return last > first

    def repeat(self, kind: str, count: int) -> None:
        """Deliver the last changes of the watch of a kind again, as after an interruption."""
        self.process.seen[kind] = max(0, self.process.seen.get(kind, 0) - count)

    def due(self) -> Iterator[Key]:
        """Yield the resources that are due for a pass."""
        yield from sorted(key for key, when in self.process.wanted.items() if when <= self.now)

    async def reconcile(self, key: Key) -> BaseException | None:
        """Run one pass, as the queue would. Return the exception that ended it, if any."""
        self.process.wanted.pop(key, None)
        try:
            wait = await self._run(self.process.reconciler.reconcile(key))
        except ClusterError as error:
            self.want(key)
            return error
        except (Killed, Deposed) as death:
            await self.restart()
            return death
        if wait is not None and key not in self.process.wanted:
            self.want(key, wait)
        return None

    async def settle(self, seconds: float = 2.0) -> None:
        """Run all actors for some seconds: each processes its work at once and then waits."""
        if self.lives == 1:
            await self.restart()
        end = self.now + timedelta(seconds=seconds)
        rounds = 0
        while rounds < 40:
            rounds += 1
            self.controllers.round()
            if self.frozen:
                await self._compare()
            moved = [] if self.frozen else [kind for kind in WHOLE_KINDS if self.deliver(kind)]
            keys = list(self.due())
            for key in keys:
                await self.reconcile(key)
            if not moved and not keys:
                following = min(self.process.wanted.values(), default=end)
                if following >= end:
                    self.now = max(self.now, end)
                    return
                self.now = max(self.now, following)
                rounds = 0
        raise AssertionError(f"no rest at {self.now}: {self.calls[-20:]}")

    async def _compare(self) -> None:
        try:
            await self._run(self.sync.resync())
        except (Killed, Deposed):
            await self.restart()

    def install_kueue(self, manages: Manages = "labelled", *, quota: int = 10**6) -> Kueue:
        """Enable Kueue for Jobs from now on."""
        kueue = Kueue(self.storage, self.api.kind, manages, quota=quota)
        # Two versions, because the operator reads the next one if all kinds may be missing.
        newest = [replace(kind, version="v1beta2") for kind in (WORKLOAD, LOCAL_QUEUE)]
        self.api.kinds += [LOCAL_QUEUE, *newest]
        self.api.webhook = kueue.default
        self.controllers.kueue = kueue
        return kueue

    @property
    def kueue(self) -> Kueue | None:
        """Kueue, if it is installed."""
        return self.controllers.kueue

    def move_clock(self, seconds: float) -> None:
        """Advance the clock while no actor runs."""
        self.now += timedelta(seconds=seconds)

    # Calls

    async def answer(self, ask: Ask, process: Process) -> tuple[int, Any, float]:
        """Process one call of an operator, at once or after its resumption. Raises: Killed; ClusterError."""
        if process.fence is not None:
            return self._call_late(ask)
        if len(self.calls) + 1 == self.stop_at:
            self.calls.append("stopped")
            await self.stand_still(process)
            if process.fence == "closed" and ask.method != "GET":
                raise ClusterError("not sent, because this operator is not the leader")
            return self._call_late(ask)
        answer = self.call(ask)
        if self.wake_after is not None and self.deposed and len(self.calls) >= self.stop_at + self.wake_after:
            await self.wake(self.deposed[0])
        return answer

    async def page_of(self, pod: Frozen, process: Process) -> str | None:
        """Respond to an operator's request of a pod's report. Raises: Killed."""
        if process.fence is None:
            self.calls.append("report")
            if len(self.calls) == self.stop_at:
                await self.stand_still(process)
            else:
                self.die_if_due()
        return self.pages.get(labels_of(pod)[LABEL_JOB_NAME], self.page)

    async def post(self, resource: Frozen, event: Event, process: Process) -> None:
        """Post an Event for an operator, before any other action."""
        number = len(self.events)
        body = build_event(resource, event, self.now, number)
        namespace = resource["metadata"]["namespace"]
        self.events.append(event.reason)
        try:
            await process.client.request("POST", path(kind_of(body), namespace), body=body, kind=plural(kind_of(body)))
        except (ResponseError, ClusterError):
            self.events[number] = "lost"

    def _call_late(self, ask: Ask) -> tuple[int, Any, float]:
        """Process a call of an operator that is not the leader any more."""
        place = self.api.route(ask)
        self.late.append(f"{place.verb} {place.resource}")
        before = len(self.storage.history)
        try:
            return *self.api.perform(ask, place), 0.0
        except ApiFailure as failure:
            return failure.code, failure.body(), 0.0
        finally:
            made = self.storage.history[before:]
            if made:
                self.late_writes |= dict(zip((c.version for c in made), self.storage.writes[-len(made) :], strict=True))

    def call(self, ask: Ask) -> tuple[int, Any, float]:
        """Process one call of the operator. Raises: Killed; ClusterError without a response."""
        place = self.api.route(ask)
        fault = self.faults.match(place.verb, place.resource, place.name or "")
        self.calls.append(f"{place.verb} {place.resource}")
        try:
            if fault is not None and fault.status in ("drop", "timeout"):
                raise ClusterError("no answer")
            try:
                if fault is not None and isinstance(fault.status, int):
                    raise ApiFailure(fault.status, fault.message)
                answer: tuple[int, Any, float] = (*self.api.perform(ask, place), 0.0)
            except ApiFailure as failure:
                if failure.code in (400, 422) and fault is None:
                    self.refused.append(f"{place.verb} {place.resource}: {failure.body()['message']}")
                answer = failure.code, failure.body(), 0.0
            if fault is not None and fault.status == "lost answer":
                raise ClusterError("the answer was lost")
            return answer
        finally:
            self.die_if_due()

    def die_if_due(self) -> None:
        """End the process if it is configured to end after this call. Raises: Killed."""
        if len(self.calls) == self.kill_after:
            raise Killed

    # State

    def get(self, kind: str, name: str) -> Object | None:
        """Return an object as stored, or None."""
        return self.storage.find(self.api.kind(kind), "default", name)

    def list(self, kind: str) -> list[Object]:
        """Return the objects of a kind."""
        return self.storage.list(self.api.kind(kind))

    def status(self, name: str = "train") -> Status:
        """Return a resource's status."""
        result = self.get(KIND, name)
        assert result is not None, name
        return msgspec.convert(result.get("status") or {}, Status)

    def pods(self, attempt: int | None = None, *, living: bool = True, name: str = "train") -> list[Object]:
        """Return a job's pods of an attempt (the current one) by index."""
        expected = str(attempt if attempt is not None else self.status(name).attempt)
        results = [
            pod
            for pod in self.list("Pod")
            if labels_of(pod).get(LABEL_ATTEMPT) == expected and labels_of(pod).get(LABEL_JOB_NAME) == name
            if not living or pod["status"]["phase"] not in FINISHED
        ]
        return sorted(results, key=index_of)

    # Users

    def create(self, resource: Mapping[str, Any]) -> Object:
        """Create an object; a training job's CEL rules are not checked."""
        kind = self.api.kind(str(resource["kind"]))
        return self.storage.create(kind, admit(kind, copied(dict(resource)), None, status_only=True))

    def edit(self, name: str = "train", **spec: Any) -> None:
        """Change members of a training job's spec."""
        kind = self.api.kind(KIND)
        before = self.get(KIND, name)
        assert before is not None, name
        after = copied(before)
        after["spec"] |= spec
        self.storage.update(kind, before, admit(kind, after, before, status_only=True))

    def delete(self, kind: str, name: str) -> None:
        """Delete an object and the objects that it owns."""
        result = self.get(kind, name)
        if result is not None:
            self.storage.delete(self.api.kind(kind), result)

    # Nodes and kubelets

    def _write_pod(self, pod: Object, status: Mapping[str, Any], **spec: Any) -> None:
        before = self.get("Pod", pod["metadata"]["name"])
        if before is not None and before["metadata"]["uid"] == pod["metadata"]["uid"]:
            after = copied(before) | {"status": copied(dict(status))}
            after["spec"] |= spec
            self.storage.update(self.api.kind("Pod"), before, after, verb="kubelet")

    def run_pod(self, pod: Object) -> None:
        """Run a pod on the node of its index."""
        status = pods.running_status(pod, self.now)
        conditions = [{"type": "Ready", "status": "True", "lastTransitionTime": format_time(self.now)}]
        self._write_pod(pod, {**status, "podIP": "10.0.0.1", "conditions": conditions}, nodeName=node_of(pod))

    def end_pod(self, pod: Object, code: int = 0, message: Any = "", *, reason: str = "") -> None:
        """End a pod's container."""
        text = message if isinstance(message, str) else msgspec.json.encode(message).decode()
        reason = reason or ("Error" if code else "Completed")
        self._write_pod(pod, pods.finished_status(pod, code, reason, text, self.now))

    def evict(self, pod: Object, reason: str = "EvictionByEvictionAPI") -> None:
        """Announce a disruption, then delete the pod."""
        reports = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "words"}
        status = pod["status"]
        reports["lastTransitionTime"] = format_time(self.now)
        self._write_pod(pod, {**status, "conditions": [*(status.get("conditions") or []), reports]})
        marked = self.get("Pod", pod["metadata"]["name"])
        if marked is not None and "deletionTimestamp" not in marked["metadata"]:
            grace = marked["spec"].get("terminationGracePeriodSeconds", 30)
            self.storage.delete(self.api.kind("Pod"), marked, grace=grace if marked["spec"].get("nodeName") else None)

    def lose_node(self, name: str) -> None:
        """Silence a node: its pods are no longer ready, and deleted pods on it do not end."""
        self.controllers.dead_nodes.add(name)
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        ready = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "silent"}
        if not any(result["metadata"]["name"] == name for result in self.list("Node")):
            self.storage.create(self.api.kind("Node"), node | {"status": {"conditions": [ready]}})
        unready = {"type": "Ready", "status": "False", "lastTransitionTime": format_time(self.now)}
        for pod in self.list("Pod"):
            if pod["spec"].get("nodeName") == name and pod["status"]["phase"] not in FINISHED:
                self._write_pod(pod, pod["status"] | {"conditions": [unready]})


@cache
def _definition() -> Object:
    loaded: Object = yaml.safe_load(CRD.read_text())
    return loaded


def index_of(pod: Object) -> int:
    """Return a pod's completion index."""
    return int((pod["metadata"].get("annotations") or {}).get(ANNOTATION_COMPLETION_INDEX, -1))


def node_of(pod: Object) -> str:
    """Return the node of a pod here: one for each index and attempt."""
    return f"node-{labels_of(pod).get(LABEL_ATTEMPT)}-{index_of(pod)}"


def _matches(kind: str) -> Callable[[Mapping[str, str]], bool]:
    return parse("" if kind == KIND else CHILD_SELECTOR)
