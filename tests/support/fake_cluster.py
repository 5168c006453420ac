"""A cluster in memory for the reconciler: the local cluster, with pods that tests run and end.

No process is started. Only tests advance the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ddp_cli.local import pods
from ddp_cli.local.job_controller import completion_index
from ddp_cli.local.kubelet import Kubelet
from ddp_cli.local.local_cluster import LocalCluster
from ddp_operator.api import constants, other_kinds
from ddp_operator.api.cel import check_rules
from ddp_operator.api.cluster import Event, Key, Object, Snapshot
from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.api.status import Condition, Status
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.job_events import report_changes
from ddp_operator.decide.transitions import Transition
from ddp_operator.features import SCHEMA
from ddp_operator.manager.reports import StatusReports
from ddp_operator.reconcile import Reconciler
from ddp_operator.reconcile.fair_turns import FairTurns
from ddp_operator.reconcile.placing import PlacingReconciler

from .builders import NOW, Json, page, resource, respond

NOWHERE = Path("nowhere")


class SteppedClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


class StillKubelet(Kubelet):
    """Starts no process. Tests run and end pods; a stopped pod ends at once if ``obedient``."""

    obedient: bool = True
    cluster: FakeCluster

    def start(self, pod: Object) -> None:
        pass

    def is_running(self, pod: Object) -> bool:
        return bool(pod["status"].get("phase") == "Running")

    def stop(self, pod: Object) -> None:
        if self.obedient:
            self.cluster.end(pod, constants.EXIT_PREEMPTED)

    def port_of(self, pod: Object) -> int | None:
        return None

    async def close(self) -> None:
        pass


class FakeCluster(LocalCluster):
    """The local cluster without processes."""

    def __init__(self, clock: SteppedClock) -> None:
        super().__init__(NOWHERE, NOWHERE, clock=clock, environ={})
        kubelet = StillKubelet(self.store, NOWHERE, NOWHERE, clock, {}, self._gpu_pool)
        kubelet.cluster = self
        self.kubelet = self.still = kubelet
        self.page: str | None = None
        self.log: str | Exception = ""
        """The log of every pod, each line after its time, or the error of reading it."""
        self.calls: list[str] = []
        self.hidden = False
        """Whether reads of profiles are refused."""
        self.changes = 0
        self.events: list[Event] = []
        self.on_event = lambda resource, event: self.events.append(event)

    async def read_profile(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return a stored profile, for the service of their feature."""
        self._note_read(kind)
        return self.store.get(kind, namespace if kind == other_kinds.PROFILE_KIND else "default", name)

    def _note_read(self, kind: str) -> None:
        self.calls.append(f"get {kind}")
        if self.hidden:
            raise Refused(f"{kind.lower()}s is forbidden", reason="Forbidden")

    async def create(self, manifest: Object, *, dry_run: bool = False) -> Object:
        self.calls.append(f"{'dry-run' if dry_run else 'create'} {manifest['kind']}")
        if manifest["kind"] == constants.KIND and dry_run:
            sent = msgspec.json.decode(msgspec.json.encode(manifest["spec"]))  # a tuple becomes a list
            errors = check_rules(manifest | {"spec": {"nodes": 1, "suspend": False} | sent}, SCHEMA)
            if errors:
                raise Refused("\n".join(map(str, errors)), reason="Invalid")
        return await super().create(manifest, dry_run=dry_run)

    async def patch_job(self, namespace: str, name: str, patch: Object, *, seen: Object | None = None) -> None:
        self.calls.append(f"patch {name}")
        await super().patch_job(namespace, name, patch, seen=seen)

    async def delete(
        self, kind: Any, namespace: str, name: str, *, uid: str, resource_version: str | None = None
    ) -> None:
        self.calls.append(f"delete {name}")
        await super().delete(kind, namespace, name, uid=uid, resource_version=resource_version)

    async def patch_status(self, key: Key, status: Object, *, resource_version: str) -> None:
        self.calls.append("status")
        await super().patch_status(key, status, resource_version=resource_version)

    async def read_log(self, pod: Object, container: str, lines: int, limit: int) -> bytes:
        self.calls.append(f"log {pod['metadata']['name']}")
        if isinstance(self.log, Exception):
            raise self.log
        return b"\n".join(self.log.encode().splitlines()[-lines:])[:limit]

    async def read_report(self, pod: Object, port: int) -> bytes | None:
        self.calls.append("report")
        return respond(self.page)

    def end(self, pod: Object, code: int, message: str = "", *, reason: str = "") -> None:
        """End a pod. Its final state and a pending deletion take effect at once."""
        reason = reason or ("Completed" if code == 0 else "Error")
        self.store.release(pod, status=pods.finished_status(pod, code, reason, message, self._clock()))
        self.settle()

    def settle(self) -> None:
        """Run the controllers."""
        self._settle()

    def _admit(self, job: Object) -> None:
        """Store resource claims too, for which a cluster has drivers and this machine none."""
        template = job["spec"]["template"]
        pod = {name: value for name, value in template["spec"].items() if name != "resourceClaims"}
        super()._admit({**job, "spec": {**job["spec"], "template": {**template, "spec": pod}}})

    def _changed(self, item: Object, gone: bool) -> None:
        self.changes += 1
        super()._changed(item, gone)


class ReconcilerHarness:
    """One job in a cluster in memory, its user, and its reconciler."""

    def __init__(self, item: Mapping[str, Any] | None = None, hooks: Hooks | None = None, **spec: Any) -> None:
        self.hooks = hooks or Hooks()
        self.clock = SteppedClock()
        self.cluster = FakeCluster(self.clock)
        item = item or resource(**{"nodes": 2, **spec})
        self.key = Key(item["metadata"].get("namespace", "default"), item["metadata"]["name"])
        self.item = item
        self.cluster.add(item)
        self.transitions: list[Transition] = []
        self.reconciler = self.restart_operator()
        self.requeue: float | None = None

    def restart_operator(self, cluster: Any = None) -> Reconciler:
        """Restart with a reconciler without memory."""
        self.reconciler = PlacingReconciler(
            cluster or self.cluster,
            turns=FairTurns(),
            clock=self.clock,
            hooks=self.hooks,
            followers=(
                partial(report_changes, self.hooks.conditions),
                StatusReports(lambda _, transition: self.transitions.append(transition)).follow,
            ),
        )
        return self.reconciler

    async def reconcile(self) -> float | None:
        """Run one pass."""
        self.requeue = await self.reconciler.reconcile(self.key)
        return self.requeue

    async def settle(self, limit: int = 20) -> ReconcilerHarness:
        """Run passes until one writes nothing, as a queue driven by events would; failed calls are retried."""
        for _ in range(limit):
            before = self.cluster.changes
            try:
                requeue = await self.reconcile()
            except ClusterError:
                continue
            if before == self.cluster.changes and requeue != 0:
                return self
        raise AssertionError(f"still writing after {limit} passes: {self.cluster.calls[-12:]}")

    # State

    @property
    def raw(self) -> Json | None:
        """The resource as stored."""
        return self.cluster.store.get(constants.KIND, self.key.namespace, self.key.name)

    @property
    def version(self) -> str:
        """The version, which changes with every write of the resource."""
        return "" if self.raw is None else str(self.raw["metadata"]["resourceVersion"])

    @property
    def status(self) -> Status:
        """The resource's status."""
        assert self.raw is not None
        return msgspec.convert(self.raw.get("status") or {}, Status)

    def condition(self, kind: str) -> Condition:
        """Return a condition that must exist."""
        return next(c for c in self.status.conditions if c.type == kind)

    def state(self, kind: str) -> tuple[str, str]:
        """Return a condition's status and reason."""
        condition = self.condition(kind)
        return condition.status, condition.reason

    def children(self) -> dict[str, list[str]]:
        """Return the names of the objects that the operator has created, by kind."""
        kinds = ("Service", "ConfigMap", "Job")
        return {kind: [item["metadata"]["name"] for item in self.cluster.store.list(kind)] for kind in kinds}

    def jobs(self) -> list[str]:
        """Return the names of the Jobs."""
        return self.children()["Job"]

    def pods(self, attempt: int | None = None, *, living: bool = True) -> list[Json]:
        """Return the pods of an attempt (the current one) by index."""
        labels = {constants.LABEL_ATTEMPT: str(attempt or self.status.attempt)}
        results = self.cluster.store.list("Pod", labels=labels)
        expected = [p for p in results if not living or p["status"]["phase"] in ("Pending", "Running")]
        return sorted(expected, key=lambda pod: completion_index(pod) or 0)

    @property
    def events(self) -> list[str]:
        """The reasons of all events so far."""
        return [event.reason for event in self.cluster.events]

    async def observe(self) -> Snapshot:
        """Return the reconciler's observation."""
        snapshot = await self.cluster.observe(self.key)
        assert snapshot is not None
        return snapshot

    # Actions of users and nodes

    def edit(self, **spec: Any) -> None:
        """Change members of the spec; None removes one."""
        assert self.raw is not None
        merged = {**self.raw["spec"], **spec}
        self.cluster.store.change(self.raw, spec={k: v for k, v in merged.items() if v is not None})

    def run_pods(self, *indexes: int) -> None:
        """Run the pending pods (all, or these) of the current attempt on a node."""
        for pod in self.pods():
            if pod["status"]["phase"] == "Pending" and (not indexes or completion_index(pod) in indexes):
                self.cluster.store.hold(pod)
                status = pods.running_status(pod, self.clock())
                self.cluster.store.change(pod, status=status, spec={**pod["spec"], "nodeName": "node-a"})
        self.cluster.settle()

    def tell_end(self, index: int, code: int, message: Any = "") -> None:
        """Report a pod's end before the Job controller has counted it."""
        pod = next(pod for pod in self.pods() if completion_index(pod) == index)
        text = message if isinstance(message, str) else msgspec.json.encode(message).decode()
        self.cluster.store.change(pod, status=pods.finished_status(pod, code, "Error", text, self.clock()))

    def end_pod(self, index: int, code: int = 0, message: Any = "", *, reason: str = "") -> None:
        """End the running pod of an index."""
        pod = next(pod for pod in self.pods() if completion_index(pod) == index)
        text = message if isinstance(message, str) else msgspec.json.encode(message).decode()
        self.cluster.end(pod, code, text, reason=reason)

    async def train(self, text: str | None = None) -> ReconcilerHarness:
        """Continue until the current attempt trains."""
        await self.settle()
        self.run_pods()
        self.cluster.page = text or page(step=5, total_steps=10, phase="Running")
        self.clock.advance(11)
        return await self.settle()
