"""Read and write the Workloads of jobs in several clusters; ``admission`` decides about them.

No watch delivers them. Each job's Workload is read by its name, at intervals that all these jobs share.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from ddp_operator.api import constants, other_kinds
from ddp_operator.api.cluster import Cluster, Key, Object, controller_of
from ddp_operator.api.cluster_errors import AlreadyExists, ClusterError, Refused
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.job import DDPTrainingJob, find_prebuilt_workload, owner_reference
from ddp_operator.api.parse import parse_status
from ddp_operator.api.resources import find_worker_cluster
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import is_finished
from ddp_operator.decide.foreign_objects import refuse_read
from ddp_operator.decide.preparation import count_alive
from ddp_operator.decide.refusals import refuse_invalid, refuse_write
from ddp_operator.decide.state import AT_ONCE, Children, Decision, Refusal
from ddp_operator.features.multikueue.admission import (
    build_edits,
    build_release,
    build_report,
    describe_queueing,
    explain_foreign_workload,
    find_cluster,
    follow_admission,
    list_flavors,
)
from ddp_operator.features.multikueue.workload import build_workload, explain_other_pods, workload_name
from ddp_operator.reconcile.limits import seconds_since
from ddp_operator.reconcile.placing import PlacementContext, PlacingService, Queued
from ddp_operator.reconcile.turns import Payer

# Seconds between two reads of a Workload that waits, and of one whose pods run.
_WAITING_INTERVAL: Final = 5.0
_RUNNING_INTERVAL: Final = 15.0
_READS_PER_SECOND: Final = 20.0
# Tolerance for timers that fire early.
_EARLY: Final = 0.9
_ROLE: Final = "set settings.multikueueWorker of the chart to true, or remove the label multikueue-origin of the job"
_LABELS: Final = "correct the labels multikueue-origin and prebuilt-workload-name of the job"
_REMEDY: Final = "grant the operator the permissions for Kueue's objects (docs/kueue.md)"


@dataclass(frozen=True, slots=True)
class AdmittedCopy:
    """The Workload of a job that Kueue has copied to this cluster, as it was last read.

    ``workload``: the fields that are used until then; None: it does not exist, or is not the job's. ``problem``: why it
    does not cover the job's pods. ``generation``: of the job. ``flavors``: its ResourceFlavors by name.
    """

    time: datetime
    generation: int
    workload: Object | None
    problem: str
    flavors: Mapping[str, Object]

    def is_due(self, job: DDPTrainingJob, now: datetime) -> bool:
        """Return whether the Workload has to be read again."""
        interval = _RUNNING_INTERVAL if self.flavors else _WAITING_INTERVAL
        return self.generation != job.generation or seconds_since(self.time, now) >= interval * _EARLY


class MultiKueue(PlacingService):
    """The jobs of one cluster that MultiKueue runs in another one, or has copied from another one.

    ``is_worker``: whether jobs of this cluster may become the owners of Workloads. A restart may lose its memory.
    """

    manages = other_kinds.MULTIKUEUE

    def __init__(self, *, is_worker: bool = False) -> None:
        self._is_worker = is_worker
        self._polled: set[Key] = set()
        self._waiting: dict[Key, Object | None] = {}
        """The Workloads that the current passes have read of jobs without a cluster."""
        self._copies: dict[Key, AdmittedCopy] = {}

    def forget(self, key: Key) -> None:
        """Drop a job that has ended or was deleted."""
        self._polled.discard(key)
        self._waiting.pop(key, None)
        self._copies.pop(key, None)

    async def follow(self, context: PlacementContext) -> float | Refusal | None:
        """Suspend a job in its worker cluster if its spec, or a feature there, demands it. None: it has no cluster.

        Raises: VersionConflict, Refused, ClusterError.
        """
        meta = context.resource["metadata"]
        name = workload_name(meta["name"], meta["uid"])
        self._waiting.pop(context.key, None)
        try:
            workload = await context.cluster.kueue_object(other_kinds.WORKLOAD_KIND, meta["namespace"], name)
        except Refused as error:
            return refuse_read(f"Workload {name}", error, _REMEDY)
        if workload is not None and find_cluster(workload):
            return await self._follow_worker(workload, context)
        is_over = is_finished(parse_status(context.resource))
        if not is_over and await self._name_cluster(context, ""):
            return AT_ONCE
        self._waiting[context.key] = workload
        return None

    @staticmethod
    async def _name_cluster(context: PlacementContext, cluster: str) -> bool:
        """Name the worker cluster in an annotation of a job. Returns whether it had to be changed.

        Raises: VersionConflict, ClusterError.
        """
        resource = context.resource
        if find_worker_cluster(resource) == cluster:
            return False
        patch = {"metadata": {"annotations": {other_kinds.ANNOTATION_CLUSTER: cluster or None}}}
        version = resource["metadata"]["resourceVersion"]
        await context.cluster.patch_resource(context.key, patch, resource_version=version)
        return True

    async def _follow_worker(self, workload: Object, context: PlacementContext) -> float:
        resource = context.resource
        if await self._name_cluster(context, find_cluster(workload)):
            return AT_ONCE
        status = parse_status(resource)
        suspend = bool(resource["spec"].get("suspend"))
        alarms = (kind for kind, expected in context.conditions.items() if expected == "False")
        if any(map(status.is_true, alarms)) and status.is_true(c.SUSPENDED) and not suspend:
            version = resource["metadata"]["resourceVersion"]
            await context.cluster.patch_resource(context.key, {"spec": {"suspend": True}}, resource_version=version)
            return AT_ONCE
        edits = build_edits(workload, suspend=suspend)
        if edits:
            await context.cluster.patch_workload(workload, edits)
        return self._plan_read(context.key, _RUNNING_INTERVAL)

    async def enqueue(self, job: DDPTrainingJob, context: PlacementContext) -> Queued | Refusal:
        """Create or update the Workload of a job that runs in no cluster, or finish that of an ended job.

        Raises: VersionConflict, Refused, ClusterError.
        """
        workload = self._waiting.pop(context.key, None)
        if is_finished(job.status):
            await self._finish(job, workload, context)
            return Queued(job.status, AT_ONCE)
        name = job.labels.get(constants.KUEUE_QUEUE_LABEL)
        if not name:
            label = constants.KUEUE_QUEUE_LABEL
            problem = f"metadata.labels: {label} is missing, which spec.managedBy {other_kinds.MULTIKUEUE} requires"
            return Refusal(c.INVALID_SPEC, f"{problem}; set it to a LocalQueue of namespace {job.namespace}")
        try:
            priority = await self._read_priority(job, context.cluster)
            if isinstance(priority, Refusal):
                return priority
            manifest = await context.turns.run(Payer(job.namespace), build_workload, job, priority)
            await self._write_workload(manifest, workload, context, suspend=job.spec.suspend)
            queue = await context.cluster.kueue_object("LocalQueue", job.namespace, name)
        except InvalidManifest as error:
            return refuse_invalid(error)
        except Refused as error:
            return refuse_write(error)
        status = describe_queueing(job, workload, queue, context.clock())
        return Queued(status, self._plan_read(context.key, _WAITING_INTERVAL))

    @staticmethod
    async def _finish(job: DDPTrainingJob, workload: Object | None, context: PlacementContext) -> None:
        """Finish the Workload of an ended job, if an eviction kept Kueue from that, so that it does not run again.

        Raises: VersionConflict, ClusterError.
        """
        if workload is None:
            return
        report = build_report(workload, job.status, context.clock(), is_over=True)
        if report:
            await context.cluster.patch_workload(workload, report, part="status")

    async def _write_workload(
        self, manifest: Object, workload: Object | None, context: PlacementContext, *, suspend: bool
    ) -> None:
        """Create or change a Workload, or return the quota of an evicted one. Raises: Refused, ClusterError.

        Kueue deletes the job in the worker cluster when the Workload has no quota; its pods save and end.
        """
        if workload is None:
            with suppress(AlreadyExists):
                await context.cluster.create(manifest)
        elif edits := build_edits(workload, suspend=suspend, manifest=manifest):
            await context.cluster.patch_workload(workload, edits)
        elif release := build_release(workload, context.clock()):
            await context.cluster.patch_workload(workload, release, part="status")

    @staticmethod
    async def _read_priority(job: DDPTrainingJob, cluster: Cluster) -> int | Refusal | None:
        """Return the priority of the class that a job names. Raises: Refused, ClusterError."""
        name = job.labels.get(other_kinds.KUEUE_PRIORITY_LABEL)
        if not name:
            return None
        kind = "WorkloadPriorityClass"
        found = await cluster.kueue_object(kind, None, name)
        if found is None:
            problem = f"metadata.labels[{other_kinds.KUEUE_PRIORITY_LABEL}]: {kind} {name} does not exist"
            return Refusal(c.INVALID_SPEC, f"{problem}; create it or correct the label")
        return int(found.get("value") or 0)

    async def admit(self, job: DDPTrainingJob, context: PlacementContext) -> DDPTrainingJob | Refusal:
        """Return a job as Kueue admits it in this worker cluster; unchanged if it is no copy of a manager's job.

        Raises: VersionConflict, ClusterError.
        """
        name = find_prebuilt_workload(job)
        if not name:
            return job
        copied = self._copies.get(context.key)
        if copied is None or copied.is_due(job, context.clock()):
            try:
                copied = await self._read_admission(job, name, context)
            except InvalidManifest as error:
                return refuse_invalid(error)
            except Refused as error:
                return refuse_read(f"Workload {name}", error, _REMEDY)
            self._copies[context.key] = copied
        return follow_admission(job, name, copied.workload, copied.flavors.values(), copied.problem)

    async def _read_admission(self, job: DDPTrainingJob, name: str, context: PlacementContext) -> AdmittedCopy:
        """Read what Kueue has decided. Raises: InvalidManifest, Refused, VersionConflict, ClusterError."""
        now = context.clock()
        workload, problem = await self._read_copy(job, name, context)
        flavors = await self._read_flavors(workload, context)
        return AdmittedCopy(now, job.generation, workload and _trim_workload(workload), problem, flavors)

    async def _read_copy(self, job: DDPTrainingJob, name: str, context: PlacementContext) -> tuple[Object | None, str]:
        """Return the Workload of a copied job, and why it does not cover the job's pods.

        The job becomes its controller: Kueue then deletes both together. None: it does not exist, or belongs to another
        object. Raises: InvalidManifest, Refused, VersionConflict, ClusterError.
        """
        workload = await context.cluster.kueue_object(other_kinds.WORKLOAD_KIND, job.namespace, name)
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
        problem = await context.turns.run(Payer(job.namespace), explain_other_pods, job, workload)
        if problem:
            return workload if is_own else None, f"Workload {name} does not cover the pods of this job: {problem}"
        if not is_own:
            await context.cluster.patch_workload(workload, {"metadata": {"ownerReferences": [owner_reference(job)]}})
            workload = await context.cluster.kueue_object(other_kinds.WORKLOAD_KIND, job.namespace, name)
            if workload is None or controller_of(workload).get("uid") != job.uid:
                return None, ""
        return workload, ""

    async def _read_flavors(self, workload: Object | None, context: PlacementContext) -> Mapping[str, Object]:
        names = list_flavors(workload)
        known = self._copies.get(context.key)
        if known is not None and tuple(known.flavors) == names:
            return known.flavors
        flavors: dict[str, Object] = {}
        for name in names:
            flavor = await context.cluster.kueue_object("ResourceFlavor", None, name)
            if flavor is not None:
                flavors[name] = flavor
        if len(flavors) < len(names):
            raise ClusterError(f"a ResourceFlavor of {', '.join(names)} does not exist")
        return flavors

    async def report_pass(
        self, job: DDPTrainingJob, decision: Decision, children: Children, context: PlacementContext
    ) -> float | None:
        """Report the state of a copied job to Kueue. Returns the seconds until the next read; None: it is no copy.

        ``decision``: its status is written. Raises: VersionConflict, ClusterError.
        """
        copied = self._copies.get(context.key)
        if copied is None:
            return None
        workload = copied.workload
        if workload is not None:
            patch = build_report(workload, decision.status, context.clock(), is_over=decision.is_over)
            if not patch and not count_alive(children) and job.spec.suspend:
                patch = build_release(workload, context.clock())
            if patch:
                del self._copies[context.key]  # also after a conflict it is read again
                await context.cluster.patch_workload(workload, patch, part="status")
        return self._plan_read(context.key, _WAITING_INTERVAL if job.held else _RUNNING_INTERVAL)

    def _plan_read(self, key: Key, interval: float) -> float:
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
