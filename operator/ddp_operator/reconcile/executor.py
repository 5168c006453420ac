"""Execute the actions of a decision. A refusal of the API server is returned, and the status reports it.

Every write has the resource version of the observation as precondition, so a late write changes nothing.

All jobs of a namespace share the launcher's ConfigMap. Its owner is the definition of the custom resource, so
Kubernetes deletes it when no job can exist any more, and the operator needs no right to delete ConfigMaps.
"""

import asyncio
import dataclasses
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from ddp_operator.api import child_names, constants
from ddp_operator.api.cluster import Cluster, Key
from ddp_operator.api.cluster_errors import AlreadyExists, ClusterError, Refused, ServerError
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.job import DDPTrainingJob, inherited_labels, select_kueue_keys
from ddp_operator.decide import conditions as c
from ddp_operator.decide import losses
from ddp_operator.decide.avoidance import list_returned_nodes
from ddp_operator.decide.conditions import is_finished
from ddp_operator.decide.refusals import (
    explain_conflict,
    explain_difference,
    explain_launcher_conflict,
    explain_secret_conflict,
    is_owned,
    refuse_failing_server,
    refuse_invalid,
    refuse_write,
)
from ddp_operator.decide.state import (
    Action,
    CreatePod,
    DeleteJob,
    DeleteResource,
    EnsureChildren,
    EvictPod,
    FailPod,
    FeatureAction,
    Observation,
    Outcome,
    Refusal,
    RelabelJob,
    ResizeJob,
    SuspendJob,
    SuspendResource,
)
from ddp_operator.decide.views import JobView
from ddp_operator.manifests.children import (
    build_children,
    build_launcher_config_map,
    build_pod,
    build_trial_pod,
    load_launcher,
    raise_requests,
)
from ddp_operator.manifests.template import ResolvedTemplate, resolve_template
from ddp_operator.reconcile.acting import ActionContext, FeatureHooks
from ddp_operator.reconcile.limits import seconds_since
from ddp_operator.reconcile.observer import Memory
from ddp_operator.reconcile.turns import Payer, Turns
from ddp_operator.reconcile.verdicts import compute_digest

SERVER_PATIENCE = 10.0
"""Seconds for which an error of the API server is retried before the status reports it."""
WAIT_FOR_COLLECTOR = 1.0
"""Seconds until a retry while the garbage collector deletes children of a deleted owner; no watch reports its end."""

_QUOTA = "exceeded quota"

Manifest = Mapping[str, Any]


class Executor:
    """Executes decisions on one cluster."""

    def __init__(self, cluster: Cluster, clock: Callable[[], datetime], turns: Turns, hooks: FeatureHooks) -> None:
        self._cluster = cluster
        self._clock = clock
        self._turns = turns
        self._hooks = hooks
        self._launchers: set[str] = set()
        """UIDs of the launchers' ConfigMaps that this process has created or compared. They are immutable."""
        self._creations: dict[Key, asyncio.Lock] = {}
        """Held while a launcher is created: jobs that start at the same time need one request, not one each."""

    async def check(self, job: DDPTrainingJob, observation: Observation, memory: Memory) -> Refusal | None:
        """Return the reason why the spec is not acceptable, or None.

        Before attempt 1 this includes what features refuse, and a dry run of the children unless the first Job itself
        is the test (``_creates_job_first``). Raises: Conflict, ClusterError.
        """
        memory.built = None
        generation = (job.uid, job.generation)
        has_started = job.status.attempt > 0 or observation.job(0) is not None
        if is_finished(job.status) or (has_started and memory.checked == generation):
            return None

        try:
            children = await self._check_build(job, memory)
        except InvalidManifest as error:
            return refuse_invalid(error)
        if job.is_completed:
            outcome = await self._catch_refusal(memory, self._check_rules(job))
            if isinstance(outcome, Refusal):
                return outcome
        memory.checked = generation
        if job.status.attempt > 0:
            return None

        refusal = await self._hooks.observe(job, memory.faults).check_start(self._cluster)
        if refusal is not None:
            return refusal
        if not _creates_job_first(job, children):
            outcome = await self._catch_refusal(memory, self._dry_run(job, children, memory))
            if isinstance(outcome, Refusal):
                return outcome
        memory.built = children
        return None

    async def _check_build(self, job: DDPTrainingJob, memory: Memory) -> list[dict[str, Any]]:
        """Return the children of the current attempt, or of attempt 1. Raises: InvalidManifest."""
        annotations = select_kueue_keys(job.annotations)
        digest = compute_digest(job.uid, job.spec, job.labels, annotations)
        memory.refused.repeat_refusal(digest, self._clock())
        try:
            return await self._build(job, memory, attempt=max(1, job.status.attempt), nodes=job.spec.nodes)
        except InvalidManifest as error:
            memory.refused.refuse(digest, error, self._clock())
            raise

    async def _build(self, job: DDPTrainingJob, memory: Memory, *, attempt: int, nodes: int) -> list[dict[str, Any]]:
        """Return the children of an attempt. Raises: InvalidManifest."""
        named = dataclasses.replace(job, nonce=memory.nonce)  # names the Secret that its next Job uses
        return await self._turns.run(Payer(job.namespace), build_children, named, attempt=attempt, nodes=nodes)

    async def execute(
        self, job: DDPTrainingJob, observation: Observation, actions: Iterable[Action], memory: Memory
    ) -> tuple[Refusal | None, float | None]:
        """Execute the actions in order, up to the first refused one.

        Returns the refusal, and the seconds until a retry. Raises: Conflict, ClusterError.
        """
        wait: float | None = None
        for action in actions:
            outcome = await self._catch_refusal(memory, self._execute_action(job, observation, action, memory))
            if isinstance(outcome, Refusal):
                if job.status.attempt == 0:  # a refused job must not have a Job
                    with suppress(InvalidManifest):  # then none was created
                        children = await self._build(job, memory, attempt=1, nodes=job.spec.nodes)
                        await self._cluster.discard(children[-1])
                return outcome, None
            wait = wait or outcome
        return None, wait

    async def _catch_refusal(self, memory: Memory, work: Awaitable[Outcome]) -> Outcome:
        """Await the work and return an error of the API server as a refusal. Raises: Conflict, ClusterError."""
        try:
            return await work
        except Refused as error:
            return refuse_write(error)
        except InvalidManifest as error:  # a feature has a fault since the last check
            return refuse_invalid(error)
        except ServerError as error:
            now = self._clock()
            memory.failing_since = memory.failing_since or now
            if seconds_since(memory.failing_since, now) < SERVER_PATIENCE:
                raise
            return refuse_failing_server(error)

    async def _check_rules(self, job: DDPTrainingJob) -> None:
        """Check a spec, completed by its profile, with the API server's schema and CEL rules in a dry run.

        The API server validates an object before it finds that the name exists. Raises: Refused, ClusterError.
        """
        metadata = {"name": job.name, "namespace": job.namespace, "labels": dict(job.labels)}
        resource = {"apiVersion": constants.API_VERSION, "kind": constants.KIND, "metadata": metadata}
        try:
            await self._cluster.create(resource | {"spec": msgspec.to_builtins(job.spec)}, dry_run=True)
        except AlreadyExists:
            pass
        except Refused as error:
            if _QUOTA not in error.message:  # checked after the rules; the quota already includes the job
                raise

    async def _dry_run(self, job: DDPTrainingJob, children: Sequence[Manifest], memory: Memory) -> Outcome:
        """Check the children with the API server in a dry run."""
        for child in reversed(children):
            if child["kind"] in ("ConfigMap", "Secret"):
                continue  # it has no content of the user
            outcome = await self._create(job, child, memory, dry_run=True)
            if isinstance(outcome, Refusal):
                return outcome
        memory.failing_since = None
        return None

    async def _execute_action(
        self, job: DDPTrainingJob, observation: Observation, action: Action, memory: Memory
    ) -> Outcome:
        match action:
            case EnsureChildren():
                return await self._ensure_children(job, observation, action, memory)
            case DeleteJob(name, uid):
                version = _find_job(observation, name).raw["metadata"]["resourceVersion"]
                await self._cluster.delete("Job", job.namespace, name, uid=uid, resource_version=version)
            case SuspendJob(name, suspend):
                metadata = {"annotations": {constants.ANNOTATION_SUSPEND: str(suspend).lower()}}
                patch = {"metadata": metadata, "spec": {"suspend": suspend}}
                await self._cluster.patch_job(job.namespace, name, patch, seen=_find_job(observation, name).raw)
            case ResizeJob(name, nodes):
                memory.forget_causes()  # what was read of the queue concerned the former size
                patch = {"spec": {"completions": nodes, "parallelism": nodes}}
                await self._cluster.patch_job(job.namespace, name, patch, seen=_find_job(observation, name).raw)
            case RelabelJob(name, metadata):
                memory.forget_causes()  # what was read concerned the former queue
                patch = {"metadata": metadata}
                await self._cluster.patch_job(job.namespace, name, patch, seen=_find_job(observation, name).raw)
            case CreatePod(name, index, serial):
                await self._create_pod(job, _find_job(observation, name), index, child_names.replacement_suffix(serial))
            case FailPod() | EvictPod():
                await self._disrupt_pod(observation, action)
            case SuspendResource():
                key = Key(job.namespace, job.name)
                patch = {"spec": {"suspend": True}}
                await self._cluster.patch_resource(key, patch, resource_version=job.resource_version)
            case DeleteResource():
                key = Key(job.namespace, job.name)
                await self._cluster.delete_resource(key, uid=job.uid, resource_version=job.resource_version)
            case FeatureAction():
                create = partial(self._create_feature_job, job, observation, memory)
                context = ActionContext(job, observation, self._cluster, self._turns, create)
                with self._turns.lend_worker():  # a feature that takes its time delays no other job
                    return await self._hooks.observe(job, memory.faults).act(action, context)
        return None

    async def _disrupt_pod(self, observation: Observation, action: FailPod | EvictPod) -> None:
        """Remove a pod on a lost node, or delete one on a drained node. Raises: ClusterError."""
        lost = isinstance(action, FailPod)
        reason = losses.REASON if lost else c.DRAINED
        for pod in (*observation.pods, *observation.orphans):
            if pod.uid == action.uid:
                await self._cluster.disrupt_pod(pod.raw, reason, action.message, lost=lost)

    async def _create_feature_job(
        self, job: DDPTrainingJob, observation: Observation, memory: Memory, child: Manifest, template: ResolvedTemplate
    ) -> Outcome:
        """Create a Job that a feature has built, after the launcher that its pods start. Raises: as ``_create``."""
        launcher = build_launcher_config_map(job, load_launcher())
        outcome = await self._ensure_launcher(job, launcher, observation.launchers.get(launcher["metadata"]["name"]))
        return await self._create_small_job(job, child, template, memory) if outcome is None else outcome

    async def _create_small_job(
        self, job: DDPTrainingJob, child: Manifest, template: ResolvedTemplate, memory: Memory
    ) -> Outcome:
        """Create a Job of small pods, with the template's requests if only those are admitted. Raises: as ``_create``.

        A LimitRange refuses pods, not Jobs, and the Job controller would retry without end.
        """
        pods = child["spec"]["template"]
        for spec in (pods["spec"], raise_requests(pods["spec"], template.pod, template.trainer)):
            candidate = {**child, "spec": child["spec"] | {"template": pods | {"spec": spec}}}
            with suppress(Refused, ClusterError):  # a webhook without dry runs refuses both
                await self._cluster.create(build_trial_pod(candidate), dry_run=True)
                child = candidate
                break
        return await self._create(job, child, memory)

    async def _create_pod(self, job: DDPTrainingJob, view: JobView, index: int, suffix: str) -> None:
        """Create the pod of an index from the template of its Job. Raises: ClusterError."""
        current = await self._cluster.job(str(view.raw["metadata"]["namespace"]), view.name)
        if current is None or current["metadata"]["uid"] != view.uid:
            return
        avoided = job.status.failed_nodes if job.spec.recovery.avoid_failed_nodes else ()
        returned = list_returned_nodes(job.status)
        manifest = build_pod(current, index, suffix=suffix, avoided=avoided, returned=returned)
        # OwnerReferencesPermissionEnforcement refuses `true` from accounts that may not change the owner's finalizers.
        manifest["metadata"]["ownerReferences"][0]["blockOwnerDeletion"] = False
        # If the pod exists or is refused, the Job controller creates one after its back-off.
        with suppress(AlreadyExists, Refused):
            await self._cluster.create(manifest)

    async def _ensure_children(
        self, job: DDPTrainingJob, observation: Observation, action: EnsureChildren, memory: Memory
    ) -> Outcome:
        """Create missing children. Returns a refusal, or seconds to wait, or None."""
        view = observation.job(action.attempt)
        present = {("Job", view.name) for view in observation.jobs}
        if action.attempt == 1:  # later a watch may be late
            present |= observation.shared
        # The Secret of an existing Job exists, unless a kubelet does not find it.
        present |= {("Secret", view.secret)} & observation.shared if view is not None else memory.created

        children = memory.built
        memory.built = None
        if children is None or (action.attempt, action.nodes) != (1, job.spec.nodes):
            children = await self._build(job, memory, attempt=action.attempt, nodes=action.nodes)
        if view is not None and view.secret:
            children[0]["metadata"]["name"] = view.secret  # an earlier process may have named it
        if job.status.attempt == 0 and _creates_job_first(job, children):
            children.sort(key=_rank_first)

        for child in children:
            kind = child["kind"]
            name = child["metadata"]["name"]
            if (kind, name) in present:
                continue
            if kind == "ConfigMap":
                outcome = await self._ensure_launcher(job, child, observation.launchers.get(name))
            elif kind == "Secret":
                outcome = await self._create_secret(job, child, memory, is_used=view is not None)
            else:
                await self._discard_former(job, child, action.attempt)
                if (kind, action.attempt) == ("Job", 0):
                    template = await self._turns.run(Payer(job.namespace), resolve_template, job)
                    outcome = await self._create_small_job(job, child, template, memory)
                else:
                    outcome = await self._create(job, child, memory)
            if outcome is not None:
                return outcome
        memory.failing_since = None
        return None

    async def _discard_former(self, job: DDPTrainingJob, child: Manifest, attempt: int) -> None:
        """Delete a feature's child of the previous attempt: it has no pods left, but may still hold quota of a queue.

        Raises: Refused, ClusterError.
        """
        if child["kind"] in job.schema.attempt_kinds and attempt > 1:
            former = child_names.job_name(job.name, attempt - 1)
            await self._cluster.discard({**child, "metadata": child["metadata"] | {"name": former}})

    async def _create_secret(self, job: DDPTrainingJob, child: Manifest, memory: Memory, *, is_used: bool) -> Outcome:
        """Create the rendezvous Secret. The operator may not read what an existing one has.

        ``is_used``: pods of a Job name it, so that other clients know its name. Raises: Refused, ClusterError.
        """
        name = child["metadata"]["name"]
        try:
            await self._cluster.create({**child, "stringData": {constants.RENDEZVOUS_KEY: secrets.token_hex()}})
        except AlreadyExists:
            # A name that no Job has was only sent to the API server: the response to the earlier call was lost. For a
            # name in a Job the report of a kubelet may be older than the Secret that this process has created since.
            if is_used and ("Secret", name) not in memory.restored:
                return explain_secret_conflict(job, name)
        (memory.restored if is_used else memory.created).add(("Secret", name))
        return None

    async def _ensure_launcher(self, job: DDPTrainingJob, manifest: Manifest, observed: str | None) -> Outcome:
        """Create this version's launcher in a namespace. Another object of its name is refused.

        ``observed``: the UID of the existing one. Returns a refusal, or seconds to wait for its deletion, or None.
        """
        if observed in self._launchers:
            return None
        metadata = manifest["metadata"]
        key = Key(metadata["namespace"], metadata["name"])
        lock = self._creations.setdefault(key, asyncio.Lock())
        has_waited = lock.locked()
        async with lock:
            # A lock is dropped with its success, so it is in the table for those who waited in vain only.
            if has_waited and self._creations.get(key) is not lock:
                return None
            outcome = await self._create_or_compare_launcher(job, manifest)
            if outcome is None:
                self._creations.pop(key, None)
            return outcome

    async def _create_or_compare_launcher(self, job: DDPTrainingJob, manifest: Manifest) -> Outcome:
        owner = await self._cluster.definition()
        owners = {} if owner is None else {"ownerReferences": [owner]}
        manifest = {**manifest, "metadata": manifest["metadata"] | owners}
        try:
            stored = await self._create_launcher(job, manifest)
        except AlreadyExists as error:
            stored = error.existing
            refusal = explain_launcher_conflict(manifest, stored)
            if refusal is not None:
                return refusal
            if "deletionTimestamp" in stored["metadata"]:
                return WAIT_FOR_COLLECTOR
        self._launchers.add(stored["metadata"]["uid"])
        return None

    async def _create_launcher(self, job: DDPTrainingJob, manifest: Manifest) -> Manifest:
        """Create the launcher's ConfigMap, with the job's labels if it is refused without: a policy may demand them.

        Returns the stored object. Raises: AlreadyExists, Refused, ClusterError.
        """
        try:
            return await self._cluster.create(manifest)
        except Refused:
            labels = inherited_labels(job) | manifest["metadata"]["labels"]
            return await self._cluster.create({**manifest, "metadata": manifest["metadata"] | {"labels": labels}})

    async def _create(self, job: DDPTrainingJob, child: Manifest, memory: Memory, *, dry_run: bool = False) -> Outcome:
        """Create a child; an existing child of the same job is accepted. Raises: Refused, ClusterError.

        A shared child is accepted if its UID is known, or if it is as the operator would create it.
        """
        is_shared = child["kind"] == "Service" or child["kind"] in job.schema.shared_kinds
        try:
            stored = await self._cluster.create(child, dry_run=dry_run)
        except AlreadyExists as error:
            stored = error.existing
            conflict = explain_conflict(job, stored)
            if conflict is not None:
                return conflict
            metadata = stored.get("metadata") or {}
            if "deletionTimestamp" in metadata or not is_owned(job, stored):
                return WAIT_FOR_COLLECTOR
            is_known = metadata.get("uid") in (*job.status.operator_state.children, *memory.children)
            if is_shared and not is_known:
                conflict = explain_difference(job, child, stored)
                if conflict is not None:
                    return conflict
        if is_shared and not dry_run:
            memory.children[str(stored["metadata"]["uid"])] = None
        return None


def _creates_job_first(job: DDPTrainingJob, children: Sequence[Manifest]) -> bool:
    """Return whether the first Job is created before the other children, to test if the API server accepts the job.

    Otherwise a dry run tests it: for a job that must not have a Job yet (suspended, or prepared first), for
    one that was refused before, and for one with a feature's child, which precedes its first pod.
    """
    has_common_children_only = {child["kind"] for child in children} == {"Job", "Secret", "Service", "ConfigMap"}
    if job.spec.suspend or job.schema.find_preparing(job.spec) is not None:
        return False
    return has_common_children_only and not job.status.conditions


def _rank_first(child: Manifest) -> int:
    """Return the place of a child in the first pass: what pods of the Job use precedes it, so that nobody is first."""
    order = ("Secret", "ConfigMap", "Job")
    return order.index(child["kind"]) if child["kind"] in order else len(order)


def _find_job(observation: Observation, name: str) -> JobView:
    return next(view for view in observation.jobs if view.name == name)
