"""Carries out what was decided. What the API server refuses comes back as a refusal, which the status then tells.

Every write names the version of what it was decided on, so that one which comes late changes nothing.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from ddp_operator import constants, names
from ddp_operator.api.errors import InvalidManifest, explain_refusal
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.cluster import AlreadyExists, Cluster, Key, Refused, ServerError
from ddp_operator.manifests.children import build_children
from ddp_operator.reconcile.launchers import WAIT_FOR_COLLECTOR, Launchers
from ddp_operator.reconcile.memory import Memory, seconds_since
from ddp_operator.status import lost_nodes
from ddp_operator.status.decide import is_finished
from ddp_operator.status.decision import (
    Action,
    DeleteJob,
    DeleteResource,
    EnsureChildren,
    FailPod,
    Refusal,
    ResizeJob,
    SuspendJob,
)
from ddp_operator.status.observation import Observation
from ddp_operator.status.ownership import exclusive_claim, explain_conflict, is_owned, refuse_second
from ddp_operator.status.views import JobView

SERVER_PATIENCE = 10.0
"""Seconds. A single error of the API server passes; one that stays has to be told."""

Manifest = Mapping[str, Any]
Outcome = Refusal | float | None
"""Why the API server refuses it, or in how many seconds to look again; None: it is done."""


class Executor:
    """Acts on one cluster."""

    def __init__(self, cluster: Cluster, clock: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._launchers = Launchers(cluster)

    async def check(self, job: DDPTrainingJob, observation: Observation, memory: Memory) -> Refusal | None:
        """Return why the spec cannot be carried out: by our rules, and before attempt 1 by the API server's."""
        spec = job.uid, job.generation
        if is_finished(job.status) or (job.status.attempt > 0 and memory.checked == spec):
            return None
        try:
            children = build_children(job, attempt=max(1, job.status.attempt), nodes=job.spec.nodes)
        except InvalidManifest as error:
            return Refusal("InvalidSpec", str(error))
        memory.checked = spec
        if job.status.attempt > 0:
            return None
        outcome = await self._explain(memory, self._dry_run(job, observation, children, memory))
        return outcome if isinstance(outcome, Refusal) else None

    async def execute(
        self, job: DDPTrainingJob, observation: Observation, actions: Iterable[Action], memory: Memory
    ) -> tuple[Refusal | None, float | None]:
        """Carry out the actions in their order, up to one that is refused.

        Returns why it was refused, and in how many seconds to look again. Raises: Conflict, ClusterError.
        """
        wait: float | None = None
        for action in actions:
            outcome = await self._explain(memory, self._perform(job, observation, action, memory))
            if isinstance(outcome, Refusal):
                return outcome, None
            wait = wait or outcome
        return None, wait

    async def _explain(self, memory: Memory, work: Awaitable[Outcome]) -> Outcome:
        """Do the work; turn what the API server has against it into a refusal. Raises: Conflict, ClusterError."""
        try:
            return await work
        except Refused as error:
            return Refusal("InvalidSpec" if error.reason == "Invalid" else "Forbidden", explain_refusal(error.message))
        except ServerError as error:
            now = self._clock()
            memory.failing_since = memory.failing_since or now
            if seconds_since(memory.failing_since, now) < SERVER_PATIENCE:
                raise
            return Refusal("ServerError", f"the API server fails to create {error.message}")

    async def _dry_run(
        self, job: DDPTrainingJob, observation: Observation, children: Sequence[Manifest], memory: Memory
    ) -> Outcome:
        """Ask the API server whether it takes the children, before the status says that there is an attempt."""
        claim = exclusive_claim(job)
        if claim is not None:
            others = await self._cluster.resources_on_claim(job.namespace, claim)
            if refusal := refuse_second(job, claim, others):
                return refusal
        for child in reversed(children):
            kind, name = child["kind"], child["metadata"]["name"]
            # Nothing in the ConfigMaps comes from the user.
            if kind == "ConfigMap" or (kind == "Service" and (kind, name) in observation.shared):
                continue
            # The Service belongs to no attempt, so once nothing else is refused it is made at once: a name that is
            # taken shows as well as it would in a dry run.
            outcome = await self._create(job, child, dry_run=kind != "Service" or job.spec.suspend)
            if isinstance(outcome, Refusal):
                return outcome
        memory.failing_since = None
        return None

    async def _perform(self, job: DDPTrainingJob, observation: Observation, action: Action, memory: Memory) -> Outcome:
        match action:
            case EnsureChildren():
                return await self._ensure_children(job, observation, action, memory)
            case DeleteJob(name, uid):
                version = _job(observation, name).raw["metadata"]["resourceVersion"]
                await self._cluster.delete("Job", job.namespace, name, uid=uid, resource_version=version)
            case SuspendJob(name, suspend):
                note = {"annotations": {constants.ANNOTATION_SUSPEND: str(suspend).lower()}}
                patch = {"metadata": note, "spec": {"suspend": suspend}}
                await self._cluster.patch_job(job.namespace, name, patch, seen=_job(observation, name).raw)
            case ResizeJob(name, nodes):
                size = {"spec": {"completions": nodes, "parallelism": nodes}}
                await self._cluster.patch_job(job.namespace, name, size, seen=_job(observation, name).raw)
            case FailPod(_, uid, message):
                for pod in (*observation.pods, *observation.orphans):
                    if pod.uid == uid:
                        await self._cluster.fail_pod(pod.raw, lost_nodes.REASON, message)
            case DeleteResource():
                key = Key(job.namespace, job.name)
                await self._cluster.delete_resource(key, uid=job.uid, resource_version=job.resource_version)
        return None

    async def _ensure_children(
        self, job: DDPTrainingJob, observation: Observation, action: EnsureChildren, memory: Memory
    ) -> Outcome:
        """Create what is missing. Returns a refusal, or seconds to wait for a garbage collector, or None."""
        present = {("Job", view.name) for view in observation.jobs}
        if action.attempt == 1:  # what is shared by all attempts is not watched: it may have been deleted long ago
            present |= observation.shared
        for child in build_children(job, attempt=action.attempt, nodes=action.nodes):
            kind, name = child["kind"], child["metadata"]["name"]
            if name == constants.LAUNCHER_USERS:
                continue  # together with the launcher
            if kind == "ConfigMap":
                outcome = await self._launchers.ensure(job, seen=(kind, name) in present)
                if outcome is not None:
                    return outcome
                continue
            if (kind, name) in present:
                continue
            if kind == constants.POD_GROUP and action.attempt > 1:
                # That of the attempt before has no pods any more, and may still hold room in a queue.
                former = names.job_name(job.name, action.attempt - 1)
                await self._cluster.discard({**child, "metadata": child["metadata"] | {"name": former}})
            outcome = await self._create(job, child)
            if outcome is not None:
                return outcome
        memory.failing_since = None
        return None

    async def _create(self, job: DDPTrainingJob, child: Manifest, *, dry_run: bool = False) -> Outcome:
        """Create a child; it is no matter where it is there already. Raises: Refused, ClusterError."""
        try:
            await self._cluster.create(child, dry_run=dry_run)
        except AlreadyExists as error:
            if conflict := explain_conflict(job, error.existing):
                return conflict
            leaving = "deletionTimestamp" in (error.existing.get("metadata") or {})
            return WAIT_FOR_COLLECTOR if leaving or not is_owned(job, error.existing) else None
        return None


def _job(observation: Observation, name: str) -> JobView:
    return next(view for view in observation.jobs if view.name == name)
