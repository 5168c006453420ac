"""One idempotent, level-triggered pass: observe, decide, act, and at most one status patch.

Every event calls the same ``reconcile``; it reads what is and moves it towards what the ledger in status says. It knows
only the ``Cluster`` protocol, so the same code runs jobs on an API server and on this machine.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import inf
from typing import Any

import msgspec

from ddp_operator import __version__, constants, names
from ddp_operator.api.errors import InvalidManifest, explain_refusal
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.status import Status
from ddp_operator.cluster import (
    AlreadyExists,
    Cluster,
    ClusterError,
    Conflict,
    Key,
    Refused,
    Snapshot,
    Unable,
)
from ddp_operator.kubeobjects.timestamps import utc_now
from ddp_operator.manifests.children import build_children, load_launcher
from ddp_operator.progress import Page, RateMeter, StalledRank, parse_page
from ddp_operator.status import conditions as c
from ddp_operator.status import lost_nodes, scheduling, stragglers
from ddp_operator.status.changes import can_wait
from ddp_operator.status.claims import exclusive_claim, refuse_second
from ddp_operator.status.decide import decide, is_finished, scrape_interval
from ddp_operator.status.decision import (
    Decision,
    DeleteJob,
    DeleteResource,
    EnsureChildren,
    FailPod,
    Refusal,
    ResizeJob,
    SuspendJob,
)
from ddp_operator.status.diagnosis import MOST_FAILURES, read_failures
from ddp_operator.status.events import transition_events
from ddp_operator.status.lost_labels import may_be_unseen
from ddp_operator.status.observation import NodeView, Observation, Trouble, observe_children, view_node
from ddp_operator.status.ownership import explain_conflict, is_owned
from ddp_operator.status.transitions import Mark, transition_marks

_WAIT_FOR_COLLECTOR = 1.0
# Whoever changed the resource meanwhile will be heard of by an event; this is in case that event was it.
_AFTER_CONFLICT = 0.5
# A single error of the API server passes; one that stays has to be told.
_SERVER_PATIENCE = 10.0
# Until a spec that this version cannot read is read again: what mends it is done to the definition.
_AFTER_UNREADABLE = 300.0
_UNREADABLE = (
    f"the definition {constants.CRD_NAME} in the cluster is not that of this operator (version {__version__}): upgrade "
    "the operator, or apply the definition of its version"
)
_UNATTENDED = "the job's pods go on, and nobody answers a failure, a suspension or a change of size"
# How long news of new children may be late before they are looked for, and between two looks.
_SUSPICION, _RECLAIM_INTERVAL = 2.0, 10.0
# Between two writes of one status that only bring counts and words up to date.
_DETAILS_INTERVAL = 1.0


@dataclass(slots=True)
class _Memory:
    """What is remembered of one resource: the times of what is not done in every pass, and the answers of then."""

    scraped: datetime | None = None
    meter: RateMeter = field(default_factory=RateMeter)
    written: datetime | None = None
    compared: tuple[datetime, int, stragglers.Ranks] | None = None
    stalled: dict[int, StalledRank] = field(default_factory=dict)
    asked: tuple[datetime, Mapping[str, Trouble]] | None = None
    built: tuple[str, int] | None = None
    """UID and generation of the spec of which it is known that children can be built from it."""
    suspected: datetime | None = None
    """Since when children of the current attempt may be there that are not seen."""
    reclaimed: datetime | None = None
    """When those were last looked for."""
    strays: datetime | None = None
    """Since when there have been pods whose Job is gone and that nobody deletes."""
    unable: datetime | None = None
    """Since when the API server has failed to create a child."""


class Reconciler:
    """Reconciles resources of one cluster. Holds no state that a restart would miss: when a page was last read and a
    status last written, and the answers to questions that are asked anew."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        clock: Callable[[], datetime] = utc_now,
        progress_interval: float = 10.0,
        on_mark: Callable[[Mark], None] | None = None,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._progress_interval = progress_interval
        self._on_mark = on_mark
        self._memory: defaultdict[Key, _Memory] = defaultdict(_Memory)
        self._waiting: set[Key] = set()

    async def reconcile(self, key: Key) -> float | None:
        """Make one pass.

        Returns seconds until the next pass is wanted without an event: None for never, 0 for at once.
        Raises: ClusterError where a call failed that may succeed later; call again after a back-off.
        """
        try:
            return await self._pass(key, await self._cluster.observe(key))
        except Conflict:
            return _AFTER_CONFLICT

    async def _pass(self, key: Key, snapshot: Snapshot | None, *, certain: bool = False) -> float | None:
        """Decide on a snapshot and act; a failure that is in doubt is counted only where the snapshot is certain.

        Every write names the version of what it was decided on. Raises: Conflict, ClusterError.
        """
        if snapshot is None:
            self._forget(key)
            return None
        try:
            job = parse_resource(snapshot.resource)
        except InvalidManifest as error:
            if not certain:
                # Another definition shows other fields of the same version of a resource, so that no watch tells of it.
                return await self._pass(key, await self._cluster.fetch(key), certain=True)
            return await self._report_unreadable(key, snapshot, error)
        if job.deleting:
            return None  # owner references take the children away
        snapshot, unseen = await self._reclaim(key, job, snapshot)
        refusal = await self._check(key, job, snapshot)
        asked, page = await self._scrape(key, job, snapshot)
        service = all(any(is_owned(job, raw) for raw in kind) for kind in (snapshot.services, snapshot.config_maps))
        if job.spec.network_policy.enabled:
            service = service and any(is_owned(job, raw) for raw in snapshot.policies)
        observation = observe_children(job, snapshot.jobs, snapshot.pods, page, asked=asked, service=service)
        observation = replace(
            observation,
            nodes=await self._ask_nodes(job, observation),
            waiting=len(self._waiting),
            strays_since=self._note_strays(key, observation),
            troubles=await self._ask_events(key, job, snapshot, observation),
        )
        snapshot, observation = _look_for_launcher(job, snapshot, observation)
        observation = await self._compare_ranks(key, job, observation)
        observation = await self._read_failures(job, observation)
        decision = self._decide(job, observation, refusal)
        if decision.needs_fresh_read and not certain:
            # Watches may bring the Job's end before that of the pod to blame, or of the one that tells the last step.
            return await self._pass(key, await self._cluster.fetch(key), certain=True)
        wait = _SUSPICION if unseen else None
        for action in decision.actions:
            match action:
                case EnsureChildren():
                    outcome = await self._ensure_children(key, job, snapshot, action)
                    if isinstance(outcome, Refusal):
                        return await self._write(key, snapshot, job, self._decide(job, observation, outcome))
                    wait = outcome
                case DeleteJob(name, uid):
                    version = _seen(snapshot, name)["metadata"]["resourceVersion"]
                    await self._cluster.delete("Job", job.namespace, name, uid=uid, resource_version=version)
                case SuspendJob(name, suspend):
                    try:
                        note = {"annotations": {constants.ANNOTATION_SUSPEND: str(suspend).lower()}}
                        patch = {"metadata": note, "spec": {"suspend": suspend}}
                        await self._cluster.patch_job(job.namespace, name, patch, seen=_seen(snapshot, name))
                    except Refused as error:
                        return await self._write(key, snapshot, job, self._decide(job, observation, _refusal(error)))
                case ResizeJob(name, nodes):
                    size = {"completions": nodes, "parallelism": nodes}
                    try:
                        await self._cluster.patch_job(job.namespace, name, {"spec": size}, seen=_seen(snapshot, name))
                    except Refused as error:
                        return await self._write(key, snapshot, job, self._decide(job, observation, _refusal(error)))
                case FailPod(_, uid, words):
                    for raw in snapshot.pods:
                        if raw["metadata"].get("uid") == uid:
                            await self._cluster.fail_pod(raw, lost_nodes.REASON, words)
                case DeleteResource():
                    version = snapshot.resource["metadata"]["resourceVersion"]
                    await self._cluster.delete_resource(key, uid=job.uid, resource_version=version)
                    return None
        requeue = await self._write(key, snapshot, job, decision)
        return requeue if wait is None else wait if requeue is None else min(wait, requeue)

    async def _reclaim(self, key: Key, job: DDPTrainingJob, snapshot: Snapshot) -> tuple[Snapshot, bool]:
        """Give children back the labels that somebody has taken away. Returns also whether that is in doubt."""
        memory, now = self._memory[key], self._clock()
        if is_finished(job.status) or not may_be_unseen(job, snapshot.jobs, snapshot.pods):
            memory.suspected = memory.reclaimed = None
            return snapshot, False
        memory.suspected = memory.suspected or now
        # While pods are made, news of them is often late; of those that train it seldom is.
        patience = 0.0 if job.status.is_true(c.RENDEZVOUSED) else _SUSPICION
        if _seconds(now, memory.suspected) >= patience and _seconds(now, memory.reclaimed) >= _RECLAIM_INTERVAL:
            memory.reclaimed = now
            labels = names.child_labels(job.name, job.status.attempt)
            with suppress(ClusterError, Refused):
                if await self._cluster.reclaim(job.uid, job.namespace, job.status.job_name, labels):
                    return await self._cluster.observe(key) or snapshot, True
        return snapshot, True

    def _note_strays(self, key: Key, observation: Observation) -> datetime | None:
        """Return since when the garbage collector has had pods to delete and does not."""
        memory = self._memory[key]
        left = any(pod.alive and not pod.deleting for pod in observation.strays)
        memory.strays = (memory.strays or self._clock()) if left else None
        return memory.strays

    def _decide(self, job: DDPTrainingJob, observation: Observation, refusal: Refusal | None) -> Decision:
        return decide(job, observation, self._clock(), refusal=refusal, progress_interval=self._progress_interval)

    async def _check(self, key: Key, job: DDPTrainingJob, snapshot: Snapshot) -> Refusal | None:
        """Return why the spec cannot be carried out: by our rules, and before attempt 1 by the API server's."""
        memory, spec = self._memory[key], (job.uid, job.generation)
        if is_finished(job.status) or (job.status.attempt > 0 and memory.built == spec):
            return None
        try:
            children = build_children(job, attempt=max(1, job.status.attempt), nodes=job.spec.nodes)
        except InvalidManifest as error:
            return Refusal("InvalidSpec", str(error))
        memory.built = spec
        if job.status.attempt > 0:
            return None
        claim = exclusive_claim(job)
        if claim is not None:
            others = await self._cluster.resources_on_claim(job.namespace, claim)
            if refusal := refuse_second(job, claim, others):
                return refusal
        for child in reversed(children):
            if child["kind"] == "ConfigMap":
                continue  # nothing in it comes from the user
            # The Service belongs to no attempt, so once nothing else is refused it is made at once, before the ledger
            # is written: a name that is taken shows as well as it would in a dry run.
            last = child["kind"] == "Service"
            if last and any(is_owned(job, raw) for raw in snapshot.services):
                continue
            try:
                await self._cluster.create(child, dry_run=not last or job.spec.suspend)
            except Refused as error:
                return _refusal(error)
            except Unable as error:
                return self._explain_inability(key, error)
            except AlreadyExists as error:
                conflict = explain_conflict(job, error.existing)
                if conflict is not None:
                    return conflict
        memory.unable = None
        return None

    def _explain_inability(self, key: Key, error: Unable) -> Refusal:
        """Return what to tell of an API server that has failed for a while. Raises: the error, until then."""
        memory, now = self._memory[key], self._clock()
        memory.unable = memory.unable or now
        if _seconds(now, memory.unable) < _SERVER_PATIENCE:
            raise error
        return Refusal("ServerError", f"the API server fails to create {error.message}")

    async def _ensure_children(
        self, key: Key, job: DDPTrainingJob, snapshot: Snapshot, action: EnsureChildren
    ) -> Refusal | float | None:
        """Create what is missing. Returns a refusal, or seconds to wait for a garbage collector, or None."""
        # What is shared by all attempts is not watched: somebody may have deleted it long ago.
        shared = () if action.attempt > 1 else (*snapshot.services, *snapshot.config_maps, *snapshot.policies)
        present = {(raw["kind"], raw["metadata"]["name"]) for raw in (*shared, *snapshot.jobs) if is_owned(job, raw)}
        for child in build_children(job, attempt=action.attempt, nodes=action.nodes):
            if (child["kind"], child["metadata"]["name"]) in present:
                continue
            if child["kind"] == constants.POD_GROUP and action.attempt > 1:
                await self._cluster.discard(_former(child, job, action.attempt))
            try:
                await self._cluster.create(child)
            except Refused as error:
                return _refusal(error)
            except Unable as error:
                return self._explain_inability(key, error)
            except AlreadyExists as error:
                existing = error.existing
                if is_owned(job, existing) and "deletionTimestamp" not in (existing.get("metadata") or {}):
                    continue  # created by a pass whose event has not come back yet
                conflict = explain_conflict(job, existing)
                if conflict is not None:
                    return conflict
                return _WAIT_FOR_COLLECTOR
        self._memory[key].unable = None
        return None

    async def _ask_nodes(self, job: DDPTrainingJob, observation: Observation) -> Mapping[str, NodeView]:
        """Return the nodes on which it depends whether a pod can still end by itself; seldom any."""
        found = {}
        for name in lost_nodes.nodes_in_doubt(job, observation, self._clock()):
            try:
                found[name] = view_node(await self._cluster.node(name))
            except Refused:
                found[name] = NodeView(None, "")
        return found

    async def _ask_events(
        self, key: Key, job: DDPTrainingJob, snapshot: Snapshot, observation: Observation
    ) -> Mapping[str, Trouble]:
        """Return what others say of the Job and the pods that do not get on; asked now, or not long ago."""
        now, memory = self._clock(), self._memory[key]
        uids = () if is_finished(job.status) else scheduling.in_doubt(job, observation, now)
        if not uids:
            memory.asked = None
            self._waiting.discard(key)
            return {}
        self._waiting.add(key)
        interval = scheduling.next_question(job, observation, now) or 0.0
        if memory.asked is not None and _seconds(now, memory.asked[0]) < interval * 0.9:
            return memory.asked[1]
        found: dict[str, Trouble] = {}
        for raw in (*snapshot.jobs, *snapshot.pods):
            if raw["metadata"].get("uid") in uids:
                with suppress(Refused):
                    if raw["kind"] == "Job" and raw["spec"].get("suspend"):
                        trouble = scheduling.view_workloads(raw, await self._cluster.workloads_of(raw))
                    else:
                        trouble = scheduling.view_trouble(await self._cluster.events_of(raw))
                    if trouble is not None:
                        found[raw["metadata"]["uid"]] = trouble
        memory.asked = now, found
        return found

    async def _compare_ranks(self, key: Key, job: DDPTrainingJob, observation: Observation) -> Observation:
        """Read the other pods' pages, once a minute and when steps have stopped, and compare the ranks."""
        page, now = observation.page, self._clock()
        stalled = stragglers.is_stalled(job, page)
        memory = self._memory[key]
        if page is None or not (stalled or (page.training and page.ranks)):
            return observation
        places = memory.stalled = {**memory.stalled, **{one.rank: one for one in page.stalled}} if stalled else {}
        observation = replace(observation, stalled=tuple(sorted(places.values())))
        asked_at, attempt, before = memory.compared or (None, 0, {})
        news = stalled and (
            not stragglers.is_said(job.status) or (places and not stragglers.is_explained(observation.stalled))
        )
        if _seconds(now, asked_at) < stragglers.WINDOW and not news:
            return observation
        others = stragglers.choose_pods(observation.pods_of(job.status.attempt))
        texts = await asyncio.gather(*(self._cluster.scrape(pod.raw, job.spec.metrics.port) for pod in others))
        found = dict(page.ranks)
        for other in (parse_page(text) for text in texts if text):
            found |= other.ranks
            places.update((one.rank, one) for one in other.stalled)
        same = attempt == job.status.attempt
        memory.compared = now, job.status.attempt, found
        slow = stragglers.find_stragglers(before, found) if same else None
        return replace(observation, ranks=found, stragglers=slow, stalled=tuple(sorted(places.values())))

    async def _read_failures(self, job: DDPTrainingJob, observation: Observation) -> Observation:
        """Read on the pods' pages why workers were restarted in place, when pod 0's counts a new such restart.

        A failure in any pod makes all pods restart their workers, but only that pod knows the cause.
        """
        page, restarts = observation.page, job.status.restarts
        if page is None or restarts.in_place_before + page.in_place_restarts <= restarts.in_place:
            return observation
        pods = observation.pods_of(job.status.attempt)
        others = stragglers.choose_pods(pods, MOST_FAILURES)
        texts = await asyncio.gather(*(self._cluster.scrape(pod.raw, job.spec.metrics.port) for pod in others))
        pages = [(pod, page) for pod in pods if pod.index == 0 and pod.phase == "Running"]
        pages += [(pod, parse_page(text)) for pod, text in zip(others, texts, strict=True) if text]
        return replace(observation, failed_in_place=read_failures(pages))

    async def _scrape(self, key: Key, job: DDPTrainingJob, snapshot: Snapshot) -> tuple[bool, Page | None]:
        """Read pod 0's page when it is due. Returns whether it was asked for, and what it said."""
        now, memory = self._clock(), self._memory[key]
        interval = scrape_interval(job.status, now, self._progress_interval)
        if is_finished(job.status) or _seconds(now, memory.scraped) < interval * 0.9:
            return False, None
        pods = observe_children(job, snapshot.jobs, snapshot.pods).pods_of(job.status.attempt)
        master = next((p for p in pods if p.index == 0 and p.phase == "Running" and not p.deleting), None)
        if master is None:
            return False, None
        memory.scraped = now
        text = await self._cluster.scrape(master.raw, job.spec.metrics.port)
        if text is None:
            return True, None
        page = parse_page(text)
        process = master.uid, page.in_place_restarts
        return True, replace(page, rates=memory.meter.measure(process, page.values, now.timestamp()))

    async def _write(self, key: Key, snapshot: Snapshot, job: DDPTrainingJob, decision: Decision) -> float | None:
        """Patch the status where it differs, then tell what changed. What can wait is written once a second."""
        if decision.status != job.status:
            now, memory = self._clock(), self._memory[key]
            since = _seconds(now, memory.written)
            if since < _DETAILS_INTERVAL and can_wait(job.status, decision.status):
                left = _DETAILS_INTERVAL - since
                return left if decision.requeue_after is None else min(left, decision.requeue_after)
            memory.written = now
            await self._patch_status(key, snapshot, decision.status)
            await self._tell(snapshot, job.status, decision.status)
        if is_finished(decision.status):
            self._forget(key)
        return decision.requeue_after

    def _forget(self, key: Key) -> None:
        self._memory.pop(key, None)
        self._waiting.discard(key)

    async def _report_unreadable(self, key: Key, snapshot: Snapshot, error: InvalidManifest) -> float | None:
        """Say Accepted=False about a spec that this version cannot read (an older or newer CRD let it in)."""
        metadata = snapshot.resource.get("metadata") or {}
        raw_status = snapshot.resource.get("status") or {}
        try:
            status = msgspec.convert(raw_status, Status)
        except msgspec.ValidationError:
            status = Status()
        if is_finished(status):
            return None
        words = f"{error}; {_UNREADABLE}" + (f"; until then {_UNATTENDED}" if status.attempt else "")
        fact = c.Fact(c.ACCEPTED, "False", c.INVALID_SPEC, words)
        generation = metadata.get("generation") or 0
        merged = c.merge_conditions(status.conditions, [fact], self._clock(), generation)
        new = msgspec.structs.replace(
            status,
            phase=status.phase if status.attempt else "Rejected",
            observed_generation=generation,
            conditions=merged,
        )
        if new != status:
            await self._patch_status(key, snapshot, new)
            await self._tell(snapshot, status, new)
        return _AFTER_UNREADABLE

    async def _tell(self, snapshot: Snapshot, old: Status, new: Status) -> None:
        """Tell what changed. The status is written, so an event that is lost now is lost; nothing else may be."""
        if self._on_mark is not None:
            for mark in transition_marks(old, new, self._clock()):
                self._on_mark(mark)
        with suppress(ClusterError):
            for event in transition_events(old, new):
                await self._cluster.emit(snapshot.resource, event)

    async def _patch_status(self, key: Key, snapshot: Snapshot, status: Status) -> None:
        version = snapshot.resource["metadata"]["resourceVersion"]
        body: dict[str, Any] = msgspec.to_builtins(status)
        await self._cluster.patch_status(key, body, resource_version=version)


def _seen(snapshot: Snapshot, name: str) -> Mapping[str, Any]:
    """Return the Job of that name as it was observed."""
    return next(raw for raw in snapshot.jobs if raw["metadata"]["name"] == name)


def _look_for_launcher(
    job: DDPTrainingJob, snapshot: Snapshot, observation: Observation
) -> tuple[Snapshot, Observation]:
    """Return both with what is known of the ConfigMap that the current attempt's pods mount the launcher from."""
    attempt_job = observation.job(job.status.attempt)
    if attempt_job is None or not attempt_job.launcher or attempt_job.finished:
        return snapshot, observation
    there = tuple(raw for raw in snapshot.config_maps if is_owned(job, raw))
    # Nobody watches ConfigMaps: a kubelet may know better.
    if any(f'configmap "{attempt_job.launcher}" not found' in said.message for said in observation.troubles.values()):
        there = tuple(raw for raw in there if raw["metadata"]["name"] != attempt_job.launcher)
        snapshot = replace(snapshot, config_maps=there)
    if any(raw["metadata"]["name"] == attempt_job.launcher for raw in there):
        return snapshot, observation
    ours = attempt_job.launcher == names.launcher_config_map_name(job.name, load_launcher().digest)
    return snapshot, replace(observation, service=observation.service and not ours, launcher_lost=not ours)


def _seconds(now: datetime, last: datetime | None) -> float:
    """Return how long ago it was; without a sign, for a clock that was set back must not put off what is due."""
    return inf if last is None else abs((now - last).total_seconds())


def _refusal(error: Refused) -> Refusal:
    return Refusal("InvalidSpec" if error.reason == "Invalid" else "Forbidden", explain_refusal(error.message))


def _former(group: Mapping[str, Any], job: DDPTrainingJob, attempt: int) -> dict[str, Any]:
    """Return the PodGroup of the attempt before, which has no pods any more and may still hold room in a queue."""
    return {**group, "metadata": group["metadata"] | {"name": names.job_name(job.name, attempt - 1)}}
