"""Carries out what was decided. What the API server refuses comes back as a refusal, which the status then tells.

Every write names the version of what it was decided on, so that one which comes late changes nothing.

The launcher's ConfigMap is shared by all jobs of a namespace, and Kubernetes deletes it with the last of them. Each job
is an owner of one small ConfigMap, LAUNCHER_USERS, and that owns the launchers: another job costs a patch of the small
one, and ConfigMaps of that single name are all that the operator must be allowed to patch.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import msgspec

from ddp_operator import constants, names
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.job import DDPTrainingJob, owner_reference
from ddp_operator.api.pod_fields import explain_refusal
from ddp_operator.cluster import AlreadyExists, Cluster, Key, Object, Refused, ServerError, owner_uids
from ddp_operator.manifests.children import (
    build_children,
    build_launcher_config_map,
    build_launcher_users,
    load_launcher,
)
from ddp_operator.manifests.job_pod import build_pod
from ddp_operator.reconcile.observer import Memory, seconds_since
from ddp_operator.status import lost_nodes
from ddp_operator.status.decide import is_finished
from ddp_operator.status.decision import (
    Action,
    CreatePod,
    DeleteJob,
    DeleteResource,
    EnsureChildren,
    FailPod,
    Refusal,
    RelabelJob,
    ResizeJob,
    SuspendJob,
    SuspendResource,
)
from ddp_operator.status.observation import Observation
from ddp_operator.status.ownership import (
    exclusive_claim,
    explain_conflict,
    explain_launcher_conflict,
    is_owned,
    refuse_second,
)
from ddp_operator.status.views import JobView

SERVER_PATIENCE = 10.0
"""Seconds. A single error of the API server passes; one that stays has to be told."""

_QUOTA = "exceeded quota"

Manifest = Mapping[str, Any]
Outcome = Refusal | float | None
"""Why the API server refuses it, or in how many seconds to look again; None: it is done."""
WAIT_FOR_COLLECTOR = 1.0
"""Seconds. What a deleted owner has left is being deleted: nothing tells when it is gone."""


class Executor:
    """Acts on one cluster."""

    def __init__(self, cluster: Cluster, clock: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._launchers = Launchers(cluster)

    async def check(self, job: DDPTrainingJob, observation: Observation, memory: Memory) -> Refusal | None:
        """Return why the spec cannot be carried out: by our rules, and before attempt 1 by those of other jobs.

        And by the API server's, where it is not told by the Job itself (``_is_tried_at_once``).
        """
        spec, memory.built = (job.uid, job.generation), None
        begun = job.status.attempt > 0 or observation.job(0) is not None
        if is_finished(job.status) or (begun and memory.checked == spec):
            return None
        try:
            children = build_children(job, attempt=max(1, job.status.attempt), nodes=job.spec.nodes)
        except InvalidManifest as error:
            return Refusal("InvalidSpec", str(error))
        if job.spec.profile_ref is not None:
            outcome = await self._explain(memory, self._check_rules(job))
            if isinstance(outcome, Refusal):
                return outcome
        memory.checked = spec
        if job.status.attempt > 0:
            return None
        memory.built = children
        claim = exclusive_claim(job)
        if claim is not None:
            others = await self._cluster.resources_on_claim(job.namespace, claim)
            if refusal := refuse_second(job, claim, others):
                return refusal
        if _is_tried_at_once(job, children):
            return None
        outcome = await self._explain(memory, self._dry_run(job, children, memory))
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
                if job.status.attempt == 0:  # of a job that has never begun nothing is left behind
                    [*_, made] = build_children(job, attempt=1, nodes=job.spec.nodes)
                    await self._cluster.discard(made)
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

    async def _check_rules(self, job: DDPTrainingJob) -> None:
        """Have the API server try the schema and the rules on a spec with its profile. Raises: Refused, ClusterError.

        There is a job of that name, which is found out last.
        """
        metadata = {"name": job.name, "namespace": job.namespace, "labels": dict(job.labels)}
        whole = {"apiVersion": constants.API_VERSION, "kind": constants.KIND, "metadata": metadata}
        try:
            await self._cluster.create(whole | {"spec": msgspec.to_builtins(job.spec)}, dry_run=True)
        except AlreadyExists:
            pass
        except Refused as error:
            if _QUOTA not in error.message:  # that the job itself has been counted in; the rules come before it
                raise

    async def _dry_run(self, job: DDPTrainingJob, children: Sequence[Manifest], memory: Memory) -> Outcome:
        """Ask the API server whether it takes the children, before there is any."""
        for child in reversed(children):
            if child["kind"] == "ConfigMap":
                continue  # nothing in it comes from the user
            outcome = await self._create(job, child, dry_run=True)
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
                memory.events_read = None  # what is known of the queue was about the other size
                size = {"spec": {"completions": nodes, "parallelism": nodes}}
                await self._cluster.patch_job(job.namespace, name, size, seen=_job(observation, name).raw)
            case RelabelJob(name, metadata):
                memory.events_read = None  # what the queue has said was about another one
                await self._cluster.patch_job(
                    job.namespace, name, {"metadata": metadata}, seen=_job(observation, name).raw
                )
            case CreatePod(name, index, serial):
                await self._create_pod(_job(observation, name), index, names.replacement_suffix(serial))
            case FailPod(_, uid, message):
                for pod in (*observation.pods, *observation.orphans):
                    if pod.uid == uid:
                        await self._cluster.fail_pod(pod.raw, lost_nodes.REASON, message)
            case SuspendResource():
                key = Key(job.namespace, job.name)
                await self._cluster.suspend_resource(key, resource_version=job.resource_version)
            case DeleteResource():
                key = Key(job.namespace, job.name)
                await self._cluster.delete_resource(key, uid=job.uid, resource_version=job.resource_version)
        return None

    async def _create_pod(self, view: JobView, index: int, suffix: str) -> None:
        """Create the pod of an index by its Job's template. Raises: ClusterError."""
        whole = await self._cluster.job(str(view.raw["metadata"]["namespace"]), view.name)
        if whole is None or whole["metadata"]["uid"] != view.uid:
            return
        manifest = build_pod(whole, index, suffix=suffix)
        # An admission plug-in lets nobody block an owner's deletion who may not change its finalizers.
        manifest["metadata"]["ownerReferences"][0]["blockOwnerDeletion"] = False
        # Where it may not, or is late, the Job controller makes one when its back-off is over.
        with suppress(AlreadyExists, Refused):
            await self._cluster.create(manifest)

    async def _ensure_children(
        self, job: DDPTrainingJob, observation: Observation, action: EnsureChildren, memory: Memory
    ) -> Outcome:
        """Create what is missing. Returns a refusal, or seconds to wait for a garbage collector, or None."""
        present = {("Job", view.name) for view in observation.jobs}
        if action.attempt == 1:  # what is shared by all attempts is not watched: it may have been deleted long ago
            present |= observation.shared
        children, memory.built = memory.built, None
        if children is None or (action.attempt, action.nodes) != (1, job.spec.nodes):
            children = build_children(job, attempt=action.attempt, nodes=action.nodes)
        if job.status.attempt == 0 and _is_tried_at_once(job, children):
            children.insert(0, children.pop())
        for child in children:
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


def _is_tried_at_once(job: DDPTrainingJob, children: Sequence[Manifest]) -> bool:
    """Tell whether the API server is asked by the first Job itself, ahead of what its pods need when they start.

    By a dry run instead where there shall be no Job yet, also as inputs come first, where it has said no before (a
    namesake's Service would cost a Job with each question), and where something has to be there before the first pod: a
    policy, a gang.
    """
    simple = {child["kind"] for child in children} == {"Job", "Service", "ConfigMap"}
    return simple and not job.spec.suspend and not job.spec.inputs and not job.status.conditions


def _job(observation: Observation, name: str) -> JobView:
    return next(view for view in observation.jobs if view.name == name)


class Launchers:
    """Knows what this process has seen of them. A restart may forget it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._users: dict[str, Object] = {}
        """By namespace."""
        self._known: set[tuple[str, str, str]] = set()
        """Namespace, name and owner's UID of each launcher whose content is ours."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._joining: defaultdict[str, dict[str, Object]] = defaultdict(dict)
        """By namespace and UID the jobs that are no users yet, as owner references."""

    async def ensure(self, job: DDPTrainingJob, *, seen: bool) -> Refusal | float | None:
        """Make the job a user of its namespace's launchers, and have this version's among them.

        ``seen``: it was there lately. Returns a refusal, or seconds to wait for the garbage collector, or None.
        Raises: Refused, ClusterError.
        """
        # Jobs that come meanwhile go together in the next patch: each writes the references of all jobs anew, and of
        # two at the same time the API server does one again.
        joining = self._joining[job.namespace]
        joining[job.uid] = owner_reference(job, controller=False)
        async with self._locks[job.namespace]:
            if job.uid not in joining:
                return None  # gone with another's
            together = tuple(joining.items())
            outcome = await self._ensure(job, [reference for _, reference in together], seen=seen)
            if outcome is None:
                for uid, _ in together:
                    joining.pop(uid, None)
            return outcome

    async def _ensure(self, job: DDPTrainingJob, references: list[Object], *, seen: bool) -> Refusal | float | None:
        users = await self._join(job, references)
        if users is None or isinstance(users, Refusal):
            return users or WAIT_FOR_COLLECTOR
        owner = users["metadata"]["uid"]
        manifest = build_launcher_config_map(job, load_launcher(), owner)
        known = job.namespace, manifest["metadata"]["name"], owner
        if seen and known in self._known:
            return None
        try:
            await self._cluster.create(manifest)
        except AlreadyExists as error:
            if refusal := explain_launcher_conflict(manifest, error.existing):
                return refusal
            if owner not in owner_uids(error.existing) or "deletionTimestamp" in error.existing["metadata"]:
                return WAIT_FOR_COLLECTOR
        self._known.add(known)
        return None

    async def _join(self, job: DDPTrainingJob, references: list[Object]) -> Object | Refusal | None:
        """Make jobs owners of LAUNCHER_USERS, and return that. None: it is being deleted."""
        manifest = build_launcher_users(job)
        manifest["metadata"]["ownerReferences"] = references
        former = self._users.get(job.namespace)
        found = await self._cluster.add_owners(former, references) if former is not None else None
        if found is None:
            try:
                found = await self._cluster.create(manifest)
            except AlreadyExists as error:
                if refusal := explain_launcher_conflict(manifest, error.existing):
                    return refusal
                found = await self._cluster.add_owners(error.existing, references)
        if found is None or "deletionTimestamp" in found["metadata"]:
            return None
        # Without the list of its owners, which grows with the jobs.
        identity = {name: found["metadata"][name] for name in ("namespace", "name", "uid")}
        self._users[job.namespace] = {"kind": "ConfigMap", "metadata": identity}
        return found
