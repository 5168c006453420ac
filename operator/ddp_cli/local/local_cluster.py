"""The cluster on this machine: objects in memory, a Job controller, a garbage collector, and pods as processes."""

import asyncio
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, Literal

from ddp_cli.local import adapt, machine, pods
from ddp_cli.local.container import MissingReference, build_environment
from ddp_cli.local.job_controller import JobDecision, decide_job, is_controlled_by
from ddp_cli.local.kubelet import Kubelet
from ddp_cli.local.store import Store, grace_of, place_of
from ddp_operator.api import constants
from ddp_operator.api.child_names import is_reserved_variable
from ddp_operator.api.cluster import ChildKind, Event, Key, Object, Snapshot, controller_of
from ddp_operator.api.cluster_errors import AlreadyExists, Refused, VersionConflict
from ddp_operator.api.kubeobjects import find_trainer, utc_now
from ddp_operator.api.resources import claim_of
from ddp_operator.features import SCHEMA
from ddp_operator.kube.scrape import fetch_report
from ddp_operator.manifests.children import build_pod

# The alphabet of Kubernetes for generated names: no vowels and no similar characters.
_ALPHABET: Final = "bcdfghjklmnpqrstvwxz2456789"
BACKOFF: Final = 10.0
"""Seconds that Kubernetes' Job controller waits after a pod's failure; the same here, for equal decisions."""
_DEPARTED_TIME: Final = timedelta(seconds=5)


class LocalCluster:
    """Implements ``cluster.Cluster`` on this machine.

    ``folder`` is the run's folder (logs, pods' files); ``claims`` contains the folders of persistent volume claims.
    The event loop calls ``on_change`` whenever an object changes, and ``on_event`` with every emitted Event.
    """

    def __init__(
        self,
        folder: Path,
        claims: Path,
        *,
        clock: Callable[[], datetime] = utc_now,
        environ: Mapping[str, str] = os.environ,
        metrics_base: int | None = None,
        gpu_ids: Sequence[str] | None = None,
        backoff: float = BACKOFF,
    ) -> None:
        self._clock = clock
        self._backoff = backoff
        self.store = Store(clock)
        self.store.on_change = self._changed
        self.on_change: Callable[[], None] = lambda: None
        self.on_event: Callable[[Object, Event], None] = lambda resource, event: None
        self._pool = machine.GpuPool(gpu_ids) if gpu_ids is not None else None
        self._environ = environ
        self.kubelet = Kubelet(
            self.store,
            folder.absolute(),
            claims.absolute(),
            clock,
            pods.base_environment(environ),
            self._gpu_pool,
            metrics_base,
            on_exit=self._settle,
        )
        self._settling = False
        self._unsettled = False
        self.shared_kinds = SCHEMA.shared_kinds
        self._departed: dict[str, tuple[datetime | None, Object]] = {}

    def add(self, item: Object) -> Object:
        """Store an object of the user: the custom resource, or another object of its file. Raises: AlreadyExists."""
        return self.store.add(item)

    async def observe(self, key: Key) -> Snapshot | None:
        """Return the resource and its labelled children."""
        resource = self.store.get(constants.KIND, key.namespace, key.name)
        if resource is None:
            return None

        def children(kind: str, *, name: str = key.name) -> tuple[Object, ...]:
            return tuple(self.store.list(kind, key.namespace, {constants.LABEL_JOB_NAME: name}))

        return Snapshot(
            resource,
            services=children("Service"),
            config_maps=(*children("ConfigMap"), *children("ConfigMap", name="")),
            jobs=children("Job"),
            others=tuple(child for kind in self.shared_kinds for child in children(kind)),
            pods=(*self._recently_departed(key), *children("Pod")),
        )

    async def fetch(self, key: Key) -> Snapshot | None:
        """Return the same as ``observe``: there is no cache."""
        return await self.observe(key)

    async def create(self, manifest: Object, *, dry_run: bool = False) -> Object:
        """Check an object and store it; a Job's pods start before this returns."""
        if manifest["kind"] == "Job":
            self._admit(manifest)
        existing = self.store.get(*place_of(manifest))
        if existing is not None:
            raise AlreadyExists(existing=existing)
        if dry_run:
            return manifest
        stored = self.store.add(manifest)
        self._settle()
        return stored

    async def definition(self) -> Object | None:
        """Return None: nothing defines a resource here."""
        return None

    async def job(self, namespace: str, name: str) -> Object | None:
        """Return a Job."""
        return self.store.get("Job", namespace, name)

    async def patch_job(self, namespace: str, name: str, patch: Object, *, seen: Object | None = None) -> None:
        """Merge ``patch`` into a Job's labels, annotations and spec. Raises: VersionConflict."""
        job = self.store.get("Job", namespace, name)
        if job is not None:
            if seen is not None:
                _expect(job, seen["metadata"]["resourceVersion"])
            changed = patch.get("metadata", {})
            meta = {
                part: (job["metadata"].get(part) or {}) | changed.get(part, {}) for part in ("labels", "annotations")
            }
            self.store.change(job, meta=meta, spec={**job["spec"], **patch.get("spec", {})})
            self._settle()

    async def delete(
        self, kind: ChildKind, namespace: str, name: str, *, uid: str, resource_version: str | None = None
    ) -> None:
        """Delete a child and its dependents; pods get their grace period. Raises: VersionConflict."""
        item = self.store.get(kind, namespace, name)
        if item is not None and item["metadata"]["uid"] == uid:
            _expect(item, resource_version)
            self.store.delete(item, grace_seconds=grace_of(item))
            self._settle()

    async def resources_on_claim(self, namespace: str, claim: str) -> Iterable[Object]:
        """Return the resources of this run; other runs on this machine have their own stores."""
        resources = self.store.list(constants.KIND, namespace=namespace)
        return [item for item in resources if claim_of(item) == claim]

    async def discard(self, manifest: Object) -> None:
        """Delete the stored object of the manifest's name if its owner is the same."""
        item = self.store.get(*place_of(manifest))
        if item is not None and controller_of(item).get("uid") == controller_of(manifest).get("uid"):
            self.store.delete(item)
            self._settle()

    async def node(self, name: str) -> Object | None:
        """Return the only node, this machine, which is always ready."""
        ready = {"type": "Ready", "status": "True"}
        return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": {"conditions": [ready]}}

    async def disrupt_pod(self, pod: Object, reason: str, message: str, *, lost: bool) -> None:
        """Stop the pod. The reconcile never calls this here, because no node can be lost or drained."""
        metadata = pod["metadata"]
        current = self.store.get("Pod", metadata["namespace"], metadata["name"])
        if current is None or current["metadata"]["uid"] != metadata["uid"]:
            return
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
        conditions = [*(current["status"].get("conditions") or ()), condition]
        self.store.change(current, status={**current["status"], "conditions": conditions})
        self.store.delete(current)
        self._settle()

    async def patch_resource(self, key: Key, patch: Object, *, resource_version: str) -> None:
        """Merge fields into the spec. Raises: VersionConflict."""
        item = self._seen(key, resource_version)
        self.store.change(item, spec={**item["spec"], **patch["spec"]})

    async def delete_resource(self, key: Key, *, uid: str, resource_version: str | None = None) -> None:
        """Delete the custom resource and its dependents. Raises: VersionConflict."""
        item = self.store.get(constants.KIND, key.namespace, key.name)
        if item is not None and item["metadata"]["uid"] == uid:
            _expect(item, resource_version)
            self.store.delete(item)
            self._settle()

    async def patch_status(self, key: Key, status: Object, *, resource_version: str) -> None:
        """Replace the resource's status. Raises: VersionConflict."""
        self.store.change(self._seen(key, resource_version), status=dict(status))

    def _seen(self, key: Key, resource_version: str) -> Object:
        item = self.store.get(constants.KIND, key.namespace, key.name)
        if item is None:
            raise VersionConflict(f"{key} was deleted")
        _expect(item, resource_version)
        return item

    async def restore_labels(self, owner: str, namespace: str, name: str, labels: Mapping[str, str]) -> bool:
        """Do nothing: no other client writes to this store."""
        return False

    async def events_of(self, item: Object) -> tuple[Object, ...]:
        """Return no Events: the pod's status contains every problem."""
        return ()

    async def read_log(self, pod: Object, container: str, lines: int, limit: int) -> bytes:
        """Refuse: a run on this machine has its logs in its folder."""
        raise Refused("the run's folder has the logs", reason="Invalid")

    async def workloads_of(self, job: Object) -> tuple[Object, ...]:
        """Refuse: there is no Kueue on this machine."""
        raise Refused("Kueue is not installed", reason="Invalid")

    async def kueue_object(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """Return None: there is no Kueue on this machine."""
        return None

    async def patch_workload(self, workload: Object, patch: Object, *, part: Literal["status"] | None = None) -> None:
        """Refuse: there is no Kueue on this machine."""
        raise Refused("Kueue is not installed", reason="Invalid")

    async def emit(self, resource: Object, event: Event) -> None:
        """Pass the Event to ``on_event``."""
        self.on_event(resource, event)

    async def read_report(self, pod: Object, port: int) -> bytes | None:
        """Read the pod's report; the kubelet maps ``port`` of the pod to a port of this machine."""
        local_port = self.kubelet.port_of(pod)
        return None if local_port is None else await fetch_report("127.0.0.1", local_port)

    def stop(self) -> None:
        """Delete every Job: pods get SIGTERM and their grace period."""
        for job in self.store.list("Job"):
            self.store.delete(job)
        self._settle()

    async def close(self) -> None:
        """Delete every Job and kill all remaining processes."""
        self.on_change = lambda: None
        for job in self.store.list("Job"):
            self.store.delete(job)
        await self.kubelet.close()

    def _admit(self, job: Object) -> None:
        """Refuse a Job whose pods cannot run on this machine. Raises: Refused."""
        template = job["spec"]["template"]
        findings = adapt.check_template(template, find_trainer(template)["name"])
        reasons = [f"{finding.path}: {finding.refusal}" for finding in findings if finding.refusal]
        namespace = job["metadata"].get("namespace") or "default"
        try:
            pod = build_pod({**job, "metadata": {"uid": "", **job["metadata"]}}, 0, suffix="admit")
            pod["metadata"]["uid"] = ""
            trainer = find_trainer(pod)
            # The operator's own Secret does not exist yet in a dry run, nor before the first Job.
            written = [item for item in trainer.get("env") or () if not is_reserved_variable(item["name"])]
            container = {**trainer, "env": written}
            build_environment(pod, container, lambda kind, name: self.store.get(kind, namespace, name))
        except MissingReference as error:
            reasons.append(str(error))
        if reasons:
            raise Refused("; ".join(reasons), reason="Invalid")

    def _gpu_pool(self) -> machine.GpuPool:
        """Return the GPUs; the driver is queried on the first request."""
        if self._pool is None:
            self._pool = machine.GpuPool(machine.find_gpus(self._environ))
        return self._pool

    def _recently_departed(self, key: Key) -> tuple[Object, ...]:
        """Return the final state of pods that ended and were deleted within the last seconds.

        A deleted pod disappears here when its process ends, in a cluster about a second later. The reconcile needs the
        termination message of such a pod to find the root cause.
        """
        now = self._clock()
        departed = []
        for uid, (first_seen, pod) in list(self._departed.items()):
            owner = Key(
                pod["metadata"]["namespace"], pod["metadata"].get("labels", {}).get(constants.LABEL_JOB_NAME, "")
            )
            # The time counts from the first observation: this process may have had no CPU since the pod's end.
            is_over = first_seen is not None and now - first_seen >= _DEPARTED_TIME
            if is_over or self.store.get(constants.KIND, owner.namespace, owner.name) is None:
                del self._departed[uid]
            elif owner == key:
                self._departed[uid] = (first_seen or now, pod)
                departed.append(pod)
        return tuple(departed)

    def _changed(self, item: Object, gone: bool) -> None:
        if gone and item["kind"] == "Pod" and item.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            self._departed[item["metadata"]["uid"]] = (None, item)
        self._unsettled = True
        self.on_change()

    def _settle(self) -> None:
        """Run the controllers and the kubelet until nothing changes."""
        if self._settling:
            return
        self._settling = True
        try:
            self._unsettled = True
            while self._unsettled:
                self._unsettled = False
                for job in self.store.list("Job"):
                    self._control(job)
                for pod in self.store.list("Pod"):
                    self._run_pod(pod)
        finally:
            self._settling = False

    def _control(self, job: Object) -> None:
        """Apply the Job controller's decision."""
        namespace_pods = self.store.list("Pod", job["metadata"]["namespace"])
        decision: JobDecision = decide_job(job, namespace_pods, self._clock(), backoff=self._backoff)
        if decision.retry_after is not None:
            asyncio.get_running_loop().call_later(decision.retry_after, self._settle)
        if not decision.changes(job):
            return
        self.store.change(job, status=decision.status)
        by_name = {pod["metadata"]["name"]: pod for pod in namespace_pods}
        for name in decision.release:
            self._release(by_name[name])
        for name in decision.delete:
            self.store.delete(by_name[name], grace_seconds=grace_of(by_name[name]))
        for index in decision.create:
            self.store.add(build_pod(job, index, suffix="".join(random.choices(_ALPHABET, k=5))))

    def _run_pod(self, pod: Object) -> None:
        """Start, stop or release a pod, as the kubelet and the garbage collector would."""
        metadata = pod["metadata"]
        phase = pod["status"].get("phase")
        jobs = self.store.list("Job", metadata["namespace"])
        owned = any(is_controlled_by(pod, job["metadata"]["uid"]) for job in jobs)
        if not owned and constants.JOB_TRACKING_FINALIZER in (metadata.get("finalizers") or ()):
            self._release(pod)
        elif metadata.get("deletionTimestamp"):
            if self.kubelet.is_running(pod):
                self.kubelet.stop(pod)
            elif phase == "Pending":
                self.store.change(pod, status={**pod["status"], "phase": "Failed"})
        elif phase == "Pending" and not self.kubelet.is_running(pod) and self._has_launcher(pod):
            self.kubelet.start(pod)

    def _has_launcher(self, pod: Object) -> bool:
        """Return whether the launcher's ConfigMap exists: the first Job is created before it."""
        volumes = pod["spec"].get("volumes") or ()
        launchers = [volume for volume in volumes if volume["name"] == constants.LAUNCHER_VOLUME]
        names = [volume["configMap"]["name"] for volume in launchers if "configMap" in volume]
        return all(self.store.get("ConfigMap", pod["metadata"]["namespace"], name) for name in names)

    def _release(self, pod: Object) -> None:
        finalizers = pod["metadata"].get("finalizers") or ()
        remaining = [name for name in finalizers if name != constants.JOB_TRACKING_FINALIZER]
        self.store.change(pod, meta={"finalizers": remaining})


def _expect(item: Object, version: str | None) -> None:
    if version is not None and item["metadata"]["resourceVersion"] != version:
        raise VersionConflict(f"{item['kind']} {item['metadata']['name']} has changed since it was observed")
