"""Read and write the Workloads of jobs in several clusters; ``decide/multikueue`` decides about them.

No watch delivers them. Each job's Workload is read by its name, at intervals that all these jobs share.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Final

from ddp_operator.api import child_names, constants
from ddp_operator.api.cluster import (
    AlreadyExists,
    Cluster,
    ClusterError,
    Key,
    Object,
    Refused,
    controller_of,
)
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.job import DDPTrainingJob, find_prebuilt_workload, owner_reference
from ddp_operator.api.kubeobjects import find_worker_cluster
from ddp_operator.api.status import ConditionStatus, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.multikueue import (
    build_edits,
    build_release,
    build_report,
    describe_queueing,
    explain_foreign_workload,
    find_cluster,
    follow_admission,
    list_flavors,
)
from ddp_operator.decide.state import AT_ONCE, Children, Decision, Refusal
from ddp_operator.manifests.workload import build_workload, explain_other_pods
from ddp_operator.reconcile.observer import Memory, seconds_since
from ddp_operator.reconcile.prerequisites import refuse_invalid, refuse_read, refuse_write
from ddp_operator.reconcile.turns import Payer, Turns

# Seconds between two reads of a Workload that waits, and of one whose pods run.
_WAITING_INTERVAL: Final = 5.0
_RUNNING_INTERVAL: Final = 15.0
_READS_PER_SECOND: Final = 20.0
# Tolerance for timers that fire early.
_EARLY: Final = 0.9
_ROLE: Final = "set settings.multikueueWorker of the chart to true, or remove the label multikueue-origin of the job"
_LABELS: Final = "correct the labels multikueue-origin and prebuilt-workload-name of the job"
_REMEDY: Final = "grant the operator the permissions for Kueue's objects (docs/kueue.md)"


class MultiKueue:
    """The jobs of one cluster that MultiKueue runs in another one, or has copied from another one."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Callable[[], datetime],
        turns: Turns,
        conditions: Mapping[str, ConditionStatus],
        *,
        is_worker: bool = False,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._turns = turns
        self._alarms = tuple(kind for kind, expected in conditions.items() if expected == "False")
        """Conditions for which a feature may have suspended a job in its worker cluster."""
        self._is_worker = is_worker
        """Whether jobs of this cluster may become the owners of Workloads."""
        self._polled: set[Key] = set()

    def forget(self, key: Key) -> None:
        """Drop a job that has ended or was deleted."""
        self._polled.discard(key)

    async def find_workload(self, resource: Object) -> Object | Refusal | None:
        """Return the Workload of a job in the manager cluster. Raises: ClusterError."""
        meta = resource["metadata"]
        name = child_names.workload_name(meta["name"], meta["uid"])
        try:
            return await self._cluster.kueue_object(constants.WORKLOAD_KIND, meta["namespace"], name)
        except Refused as error:
            return refuse_read(f"Workload {name}", error, _REMEDY)

    async def name_cluster(self, key: Key, resource: Object, cluster: str) -> bool:
        """Name the worker cluster in an annotation of a job. Returns whether it had to be changed.

        Raises: VersionConflict, ClusterError.
        """
        if find_worker_cluster(resource) == cluster:
            return False
        patch = {"metadata": {"annotations": {constants.ANNOTATION_CLUSTER: cluster or None}}}
        await self._cluster.patch_resource(key, patch, resource_version=resource["metadata"]["resourceVersion"])
        return True

    async def follow_worker(self, key: Key, resource: Object, workload: Object, status: Status) -> float:
        """Suspend a job in its worker cluster if its spec, or a feature there, demands it.

        Returns the seconds until the next pass. Raises: VersionConflict, ClusterError.
        """
        if await self.name_cluster(key, resource, find_cluster(workload)):
            return AT_ONCE
        suspend = bool(resource["spec"].get("suspend"))
        if any(map(status.is_true, self._alarms)) and status.is_true(c.SUSPENDED) and not suspend:
            version = resource["metadata"]["resourceVersion"]
            await self._cluster.patch_resource(key, {"spec": {"suspend": True}}, resource_version=version)
            return AT_ONCE
        edits = build_edits(workload, suspend=suspend)
        if edits:
            await self._cluster.patch_workload(workload, edits)
        return self.plan_read(key, _RUNNING_INTERVAL)

    async def finish(self, job: DDPTrainingJob, workload: Object | None) -> None:
        """Finish the Workload of an ended job, if an eviction kept Kueue from that, so that it does not run again.

        Raises: VersionConflict, ClusterError.
        """
        if workload is not None and (report := build_report(workload, job.status, self._clock(), is_over=True)):
            await self._cluster.patch_workload(workload, report, part="status")

    async def queue(self, job: DDPTrainingJob, workload: Object | None) -> Status | Refusal:
        """Create or update the Workload of a job that runs in no cluster. Raises: VersionConflict, ClusterError."""
        name = job.labels.get(constants.KUEUE_QUEUE_LABEL)
        if not name:
            label = constants.KUEUE_QUEUE_LABEL
            problem = f"metadata.labels: {label} is missing, which spec.managedBy {constants.MULTIKUEUE} requires"
            return Refusal(c.INVALID_SPEC, f"{problem}; set it to a LocalQueue of namespace {job.namespace}")
        try:
            priority = await self._read_priority(job)
            if isinstance(priority, Refusal):
                return priority
            await self._write_workload(
                await self._turns.run(Payer(job.namespace), build_workload, job, priority),
                workload,
                suspend=job.spec.suspend,
            )
            queue = await self._cluster.kueue_object("LocalQueue", job.namespace, name)
        except InvalidManifest as error:
            return refuse_invalid(error)
        except Refused as error:
            return refuse_write(error)
        return describe_queueing(job, workload, queue, self._clock())

    async def _write_workload(self, manifest: Object, workload: Object | None, *, suspend: bool) -> None:
        """Create or change a Workload, or return the quota of an evicted one. Raises: Refused, ClusterError.

        Kueue deletes the job in the worker cluster when the Workload has no quota; its pods save and end.
        """
        if workload is None:
            with suppress(AlreadyExists):
                await self._cluster.create(manifest)
        elif edits := build_edits(workload, suspend=suspend, manifest=manifest):
            await self._cluster.patch_workload(workload, edits)
        elif release := build_release(workload, self._clock()):
            await self._cluster.patch_workload(workload, release, part="status")

    async def _read_priority(self, job: DDPTrainingJob) -> int | Refusal | None:
        """Return the priority of the class that a job names. Raises: Refused, ClusterError."""
        name = job.labels.get(constants.KUEUE_PRIORITY_LABEL)
        if not name:
            return None
        kind = "WorkloadPriorityClass"
        found = await self._cluster.kueue_object(kind, None, name)
        if found is None:
            problem = f"metadata.labels[{constants.KUEUE_PRIORITY_LABEL}]: {kind} {name} does not exist"
            return Refusal(c.INVALID_SPEC, f"{problem}; create it or correct the label")
        return int(found.get("value") or 0)

    async def admit(self, job: DDPTrainingJob, memory: Memory) -> DDPTrainingJob | Refusal:
        """Return a job as Kueue admits it in this worker cluster; unchanged if it is no copy of a manager's job.

        Raises: VersionConflict, ClusterError.
        """
        name = find_prebuilt_workload(job)
        if not name:
            return job
        now = self._clock()
        interval = _RUNNING_INTERVAL if memory.flavors else _WAITING_INTERVAL
        is_edited = memory.workload_generation != job.generation
        if memory.workload is None or is_edited or seconds_since(memory.workload[0], now) >= interval * _EARLY:
            try:
                workload, memory.workload_problem = await self._read_copy(job, name)
                await self._read_flavors(workload, memory)
            except InvalidManifest as error:
                return refuse_invalid(error)
            except Refused as error:
                return refuse_read(f"Workload {name}", error, _REMEDY)
            memory.workload = (now, workload and _trim_workload(workload))
            memory.workload_generation = job.generation
        return follow_admission(job, name, memory.workload[1], memory.flavors.values(), memory.workload_problem)

    async def _read_copy(self, job: DDPTrainingJob, name: str) -> tuple[Object | None, str]:
        """Return the Workload of a copied job, and why it does not cover the job's pods.

        The job becomes its controller: Kueue then deletes both together. None: it does not exist, or belongs to another
        object. Raises: InvalidManifest, Refused, VersionConflict, ClusterError.
        """
        workload = await self._cluster.kueue_object(constants.WORKLOAD_KIND, job.namespace, name)
        if workload is None:
            return None, ""
        is_own = controller_of(workload).get("uid") == job.uid
        if controller_of(workload) and not is_own:
            return None, f"Workload {name} belongs to another object"
        if not is_own:
            if not self._is_worker:
                return None, f"Workload {name} is not adopted, as this cluster is no worker of MultiKueue; {_ROLE}"
            problem = explain_foreign_workload(job, workload)
            if problem:
                return None, f"{problem}; {_LABELS}"
        problem = await self._turns.run(Payer(job.namespace), explain_other_pods, job, workload)
        if problem:
            return workload if is_own else None, f"Workload {name} does not cover the pods of this job: {problem}"
        if not is_own:
            await self._cluster.patch_workload(workload, {"metadata": {"ownerReferences": [owner_reference(job)]}})
            workload = await self._cluster.kueue_object(constants.WORKLOAD_KIND, job.namespace, name)
            if workload is None or controller_of(workload).get("uid") != job.uid:
                return None, ""
        return workload, ""

    async def _read_flavors(self, workload: Object | None, memory: Memory) -> None:
        names = list_flavors(workload)
        if names == tuple(memory.flavors):
            return
        flavors = {name: await self._cluster.kueue_object("ResourceFlavor", None, name) for name in names}
        memory.flavors = {name: flavor for name, flavor in flavors.items() if flavor is not None}
        if len(memory.flavors) < len(names):
            raise ClusterError(f"a ResourceFlavor of {', '.join(names)} does not exist")

    async def report(
        self, key: Key, job: DDPTrainingJob, decision: Decision, children: Children, memory: Memory
    ) -> float | None:
        """Report the state of a copied job to Kueue. Returns the seconds until the next read; None: it is no copy.

        ``decision``: its status is written. Raises: VersionConflict, ClusterError.
        """
        if memory.workload is None:
            return None
        workload = memory.workload[1]
        if workload is not None:
            is_empty = not any(pod.alive for pod in (*children.pods, *children.orphans))
            patch = build_report(workload, decision.status, self._clock(), is_over=decision.is_over)
            if not patch and is_empty and job.spec.suspend:
                patch = build_release(workload, self._clock())
            if patch:
                memory.workload = None  # also after a conflict it is read again
                await self._cluster.patch_workload(workload, patch, part="status")
        return self.plan_read(key, _WAITING_INTERVAL if job.held else _RUNNING_INTERVAL)

    def plan_read(self, key: Key, interval: float = _WAITING_INTERVAL) -> float:
        """Return the seconds until the Workload of a job is read again."""
        self._polled.add(key)
        return max(interval, len(self._polled) / _READS_PER_SECOND)


def _trim_workload(workload: Object) -> Object:
    """Return the fields of a Workload that are used until it is read again; users control the size of the others."""
    kept = ("name", "namespace", "uid", "resourceVersion", "generation")
    return {
        **{name: workload[name] for name in ("apiVersion", "kind")},
        "metadata": {name: workload["metadata"][name] for name in kept},
        "status": {"conditions": (workload.get("status") or {}).get("conditions") or []},
    }
