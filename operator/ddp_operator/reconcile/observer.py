"""Collect the observation of a pass: the children, and the nodes, Events and reports about them.

Nodes, Events and pages are read only if the decision needs them, at limited intervals.
"""

import asyncio
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from ddp_operator.api import child_names
from ddp_operator.api.cluster import Cluster, Key, Object, Snapshot
from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.faults import contain
from ddp_operator.api.job import DDPTrainingJob, select_kueue_keys
from ddp_operator.api.status import Profile, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import losses
from ddp_operator.decide.conditions import is_finished
from ddp_operator.decide.converge import compute_scrape_interval
from ddp_operator.decide.diagnosis import MOST_FAILURES, list_restart_failures
from ddp_operator.decide.failures import Termination
from ddp_operator.decide.refusals import may_have_lost_labels
from ddp_operator.decide.report import Page
from ddp_operator.decide.state import Causes, Children, KnownEnds, Observation
from ddp_operator.decide.views import NodeView, PodView
from ddp_operator.manifests.children import load_launcher_of
from ddp_operator.reading.objects import view_children, view_node
from ddp_operator.reading.pages import decode_report
from ddp_operator.reconcile.acting import FeatureHooks, NodeReadings, PodPages, ReconcileHooks
from ddp_operator.reconcile.limits import (
    MAX_SECONDS_AT_ONCE,
    PAGES_AT_ONCE,
    READ_INTERVAL,
    PageBudget,
    is_due,
    sample_pods,
    seconds_since,
)
from ddp_operator.reconcile.turns import Turns
from ddp_operator.reconcile.verdicts import LastRefusal, compute_digest

# Seconds that watch events of new children may be late before the operator searches children without labels.
_WATCH_DELAY = 2.0
# Seconds between two such searches.
_RESTORE_INTERVAL = 10.0
# Longest interval in seconds between requests of a page that does not respond.
_LOST_PAGE_INTERVAL = 60.0
# Maximum recorded UIDs of children.
_MOST_CHILDREN = 8


@dataclass(slots=True)
class Memory:
    """Results of steps that do not run in every pass, with their times. A restart of the operator may lose them."""

    page_read: datetime | None = None
    ended_pods: int = 0
    """Number of ended pods of the attempt at the last pass."""
    page_lost: datetime | None = None
    """Time since which the page of pod 0 has not responded."""
    page_budget: PageBudget = field(default_factory=PageBudget)
    """Budget for the pages of all pods except pod 0."""
    observed: Mapping[str, object] = field(default_factory=dict)
    """What features have observed of the pods, by the name of the feature."""
    failures_read: datetime | None = None
    """Time of the last read of the pods' failures before a restart in the same pods."""
    unreadable: LastRefusal = field(default_factory=LastRefusal)
    """Why the spec could not be parsed."""
    refused: LastRefusal = field(default_factory=LastRefusal)
    """Why no children could be built from the spec."""
    checked: tuple[str, int] | None = None
    """UID and generation of the last spec from which children could be built."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(10))
    """The end of the name of the rendezvous Secret of the attempts that this process starts."""
    created: set[tuple[str, str]] = field(default_factory=set)
    """Kind and name of the Secrets that this process has created for its next Job."""
    restored: set[tuple[str, str]] = field(default_factory=set)
    """Kind and name of the Secrets that this process has created again for a Job."""
    children: dict[str, None] = field(default_factory=dict)
    """UIDs of the shared children that this process has created or compared; the status may not have them yet."""
    built: list[dict[str, Any]] | None = None
    """Children of attempt 1, if the check of this pass has built them."""
    unseen_since: datetime | None = None
    """Time since which the current attempt may have children without labels, which no watch delivers."""
    labels_restored: datetime | None = None
    """Time of the last search for such children."""
    nodes: NodeReadings = field(default_factory=NodeReadings)
    faults: dict[tuple[str, str], str] = field(default_factory=dict)
    """Of the hooks of features."""
    orphaned_since: datetime | None = None
    """Time since which pods without a Job exist that are not being deleted."""
    failing_since: datetime | None = None
    """Time since which the API server has failed to create a child."""
    status_written: datetime | None = None
    status_refused: datetime | None = None
    """Time of the last refusal of the status by the API server."""
    status_shortened: bool = False
    """Whether the API server accepts only a shortened status."""
    left_out: tuple[str, ...] = ()
    """Fields of the stored status that could not be read in the last pass."""
    state_problem: str = ""
    """Why the operator's state could not be read from it."""

    def forget_causes(self) -> None:
        """Forget why objects do not start: features read it again."""
        self.observed = {name: value for name, value in self.observed.items() if not isinstance(value, Causes)}


def digest_resource(resource: Object, profile: Profile | None) -> bytes:
    """Return the digest of what the parsing of a resource and its completion by a profile read."""
    metadata = resource["metadata"]
    annotations = select_kueue_keys(metadata.get("annotations") or {})
    return compute_digest(
        resource.get("spec"), metadata.get("labels"), annotations, profile.digest if profile is not None else None
    )


class PageReading(NamedTuple):
    """One look at the page of pod 0. ``is_requested``: whether it was due and pod 0 runs."""

    is_due: bool
    is_requested: bool
    page: Page | None = None


class Observer:
    """Observes one resource at a time. It counts those whose pods do not all run."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Callable[[], datetime],
        turns: Turns,
        progress_interval: float,
        hooks: FeatureHooks,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._turns = turns
        self._progress_interval = progress_interval
        self._hooks = hooks
        self._waiting: set[Key] = set()

    def forget(self, key: Key) -> None:
        """Drop a resource that has ended or was deleted."""
        self._waiting.discard(key)

    async def observe(self, key: Key, job: DDPTrainingJob, snapshot: Snapshot, memory: Memory) -> Observation:
        """Return the input of ``decide``, except the resource. Raises: ClusterError."""
        hooks = self._hooks.observe(job, memory.faults)
        children = view_children(job, snapshot)
        unseen = not is_finished(job.status) and may_have_lost_labels(job, children)
        if await self._restore_labels(job, memory, unseen=unseen):
            snapshot = await self._cluster.observe(key) or snapshot
            children = view_children(job, snapshot)
        reading = await self._read_page(job, children, memory)
        page = reading.page
        failures = await self._read_failures(job, children, page, memory)
        self._note_waiting(key, job, children)
        pages = self._build_pages(job, children, page, memory, hooks)
        if not is_finished(job.status):
            memory.observed = await hooks.observe_pods(pages, memory.observed, is_due=reading.is_due)

        # The garbage collector should delete pods without a Job.
        has_orphans = any(pod.alive and not pod.deleting for pod in children.orphans)
        memory.orphaned_since = (memory.orphaned_since or self._clock()) if has_orphans else None
        observation = Observation(
            children.jobs,
            children.pods,
            children.orphans,
            children.feature_jobs,
            children.feature_pods,
            page=page,
            page_requested=reading.is_requested,
            page_lost_since=memory.page_lost,
            nodes=await self._read_nodes(job, children),
            troubles=await hooks.watch_nodes(pages, memory.nodes),
            departures=hooks.list_departures(key),
            suspicions=hooks.list_suspicions(key),
            returned_nodes=hooks.list_returned_nodes(),
            waiting_jobs=len(self._waiting),
            observed=memory.observed,
            failures_in_place=failures,
            orphaned_since=memory.orphaned_since,
            recheck_after=_WATCH_DELAY if unseen else None,
            faults=hooks.faults,
        )
        shared = _find_shared(job, snapshot, observation, {*job.status.operator_state.children, *memory.children})
        return replace(
            observation,
            pods=_complete_ends(observation),
            shared=shared.objects,
            launchers=shared.launchers,
            shared_complete=shared.complete,
            launcher_lost=shared.launcher_lost,
        )

    def _note_waiting(self, key: Key, job: DDPTrainingJob, children: Children) -> None:
        """Note whether pods of a job do not run that should."""
        view = children.job(job.status.attempt)
        is_waiting = view is not None and not view.finished and children.pods_of(view.attempt).running < view.nodes
        (self._waiting.add if is_waiting else self._waiting.discard)(key)

    def _build_pages(
        self, job: DDPTrainingJob, children: Children, page: Page | None, memory: Memory, hooks: ReconcileHooks
    ) -> PodPages:
        return PodPages(
            job,
            children,
            page,
            memory.page_lost,
            self._clock(),
            partial(self._read_pages, job, budget=memory.page_budget),
            self._cluster,
            self._turns,
            len(self._waiting),
            hooks,
        )

    async def _restore_labels(self, job: DDPTrainingJob, memory: Memory, *, unseen: bool) -> bool:
        """Restore removed labels of children. Returns whether any child had lost its labels."""
        now = self._clock()
        if not unseen:
            memory.unseen_since = None
            memory.labels_restored = None
            return False
        memory.unseen_since = memory.unseen_since or now
        # Watch events are often late while pods are created, and seldom while they train.
        delay = 0.0 if job.status.is_true(c.RENDEZVOUSED) else _WATCH_DELAY
        due = seconds_since(memory.labels_restored, now) >= _RESTORE_INTERVAL
        if not due or seconds_since(memory.unseen_since, now) < delay:
            return False
        memory.labels_restored = now
        labels = child_names.child_labels(job.name, job.status.attempt)
        with suppress(ClusterError, Refused):
            return await self._cluster.restore_labels(job.uid, job.namespace, job.status.job_name, labels)
        return False

    async def _read_page(self, job: DDPTrainingJob, children: Children, memory: Memory) -> PageReading:
        """Read the page of pod 0 when it is due."""
        now = self._clock()
        interval = compute_scrape_interval(job.status, now, self._progress_interval)
        if memory.page_lost is not None and memory.page_read is not None:
            # Each request occupies a worker for seconds.
            interval = max(interval, min(_LOST_PAGE_INTERVAL, seconds_since(memory.page_lost, memory.page_read)))
        pods = children.pods_of(job.status.attempt)
        ended = sum(not pod.alive for pod in pods)
        has_new_end = ended > memory.ended_pods  # pod 0 still reports the last step before it
        memory.ended_pods = ended
        is_page_due = has_new_end or is_due(memory.page_read, now, interval)
        if is_finished(job.status) or not is_page_due:
            return PageReading(is_due=False, is_requested=False)
        pod_zero = next((pod for pod in pods if pod.index == 0 and pod.running and not pod.trained), None)
        if pod_zero is None:
            memory.page_lost = None
            return PageReading(is_due=True, is_requested=False)
        memory.page_read = now
        report = await self._cluster.read_report(pod_zero.raw, job.spec.metrics.port)
        if report is None:
            memory.page_lost = memory.page_lost or now
            return PageReading(is_due=True, is_requested=True)
        page = decode_report(report)
        if not job.holds_pods:
            page = replace(page, dev=None)
        memory.page_lost = None
        return PageReading(is_due=True, is_requested=True, page=page)

    async def _read_pages(
        self, job: DDPTrainingJob, pods: Sequence[PodView], budget: PageBudget
    ) -> list[tuple[PodView, Page]]:
        """Read pods' reports within the budget. The result lacks pages beyond it and pages without a response."""
        pages: dict[str, Page] = {}
        gate = asyncio.Semaphore(PAGES_AT_ONCE)

        async def read(pod: PodView) -> None:
            async with gate:
                if budget.spent:
                    return
                report = await self._cluster.read_report(pod.raw, job.spec.metrics.port)
                if report is not None:
                    budget.bytes_left -= len(report)
                    pages[pod.uid] = decode_report(report)

        budget.renew(self._clock())
        loop = asyncio.get_running_loop()
        started = loop.time()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(MAX_SECONDS_AT_ONCE, max(0.0, budget.seconds_left))):
                await asyncio.gather(*map(read, pods))
        budget.seconds_left -= loop.time() - started
        return [(pod, pages[pod.uid]) for pod in pods if pod.uid in pages]

    async def _read_nodes(self, job: DDPTrainingJob, children: Children) -> Mapping[str, NodeView]:
        """Read the nodes of overdue pods, which a lost node may prevent from terminating."""
        nodes = {}
        for name in losses.list_nodes_to_inspect(job, children, self._clock()):
            nodes[name] = NodeView(None, "")
            with suppress(Refused), contain("Node", name):
                nodes[name] = view_node(await self._cluster.node(name))
        return nodes

    async def _read_failures(
        self, job: DDPTrainingJob, children: Children, page: Page | None, memory: Memory
    ) -> tuple[tuple[PodView, Termination], ...]:
        """Read the causes of a restart in the same pods from the pods' pages, if the page of pod 0 counts a new one.

        After a failure in one pod all pods restart their workers, but only the page of that pod has the cause.
        """
        now = self._clock()
        restarts = job.status.counts
        if page is None or restarts.in_place_before + page.restarts <= restarts.in_place:
            return ()
        if page.joining and not is_due(memory.failures_read, now, READ_INTERVAL):
            return ()
        memory.failures_read = now
        pods = children.pods_of(job.status.attempt)
        pages = [(pod, page) for pod in pods if pod.index == 0 and pod.phase == "Running"]
        sampled = sample_pods(pods, MOST_FAILURES)
        return list_restart_failures(pages + await self._read_pages(job, sampled, memory.page_budget))


def _complete_ends(observation: Observation) -> tuple[PodView, ...]:
    """Return the pods of a job with what a feature knows of their ends."""
    known = observation.find_observed(KnownEnds)
    if known is None:
        return observation.pods
    return tuple(replace(pod, termination=known.ends.get(pod.uid, pod.termination)) for pod in observation.pods)


class SharedChildren(NamedTuple):
    """The children that all attempts share."""

    objects: frozenset[tuple[str, str]]
    """Kind and name of those that are known to be the job's own."""
    launchers: dict[str, str]
    """UIDs of the launchers' ConfigMaps of the namespace, by name."""
    complete: bool
    """Whether all exist that this version of the operator can create."""
    launcher_lost: bool
    """Whether the launcher of the current Job was deleted and is another version's, so it cannot be recreated."""


def _find_shared(
    job: DDPTrainingJob, snapshot: Snapshot, children: Observation, known: Collection[str]
) -> SharedChildren:
    """Return the shared children of a job. ``known``: UIDs of those that an operator has created or compared.

    Whoever may create a Service can write the job's name and UID into it, so its metadata prove nothing.
    """
    objects = (*snapshot.services, *snapshot.others)
    shared = {_identify(raw) for raw in objects if raw["metadata"].get("uid") in known}
    launchers = {raw["metadata"]["name"]: raw["metadata"]["uid"] for raw in snapshot.config_maps}

    required_kinds = {"Service", *_list_shared_kinds(job)}
    attempt_job = children.job(job.status.attempt)
    # The operator may not read Secrets; a kubelet reports a deleted one.
    secret = attempt_job.secret if attempt_job is not None else ""
    pods = children.pods_of(job.status.attempt)
    if secret and all(f'secret "{secret}" not found' not in pod.waiting_message for pod in pods):
        shared.add(("Secret", secret))
        secret = ""
    complete = not secret and required_kinds <= {kind for kind, _ in shared}

    if attempt_job is None or not attempt_job.launcher or attempt_job.finished:
        return SharedChildren(frozenset(shared), launchers, complete, launcher_lost=False)

    # The Event of a kubelet may be newer than the cache.
    launcher = attempt_job.launcher
    if any(f'configmap "{launcher}" not found' in problem.message for problem in children.problems.values()):
        launchers.pop(launcher, None)
    missing = launcher not in launchers
    is_own_version = launcher == child_names.launcher_config_map_name(load_launcher_of(job).digest)
    complete = complete and not (missing and is_own_version)
    return SharedChildren(frozenset(shared), launchers, complete, launcher_lost=missing and not is_own_version)


def _list_shared_kinds(job: DDPTrainingJob) -> Iterable[str]:
    """Return the kinds that features add. After a fault all: the job is told of it when they are built."""
    try:
        return [child.kind for _, child in job.schema.list_children(job) if child.is_shared]
    except InvalidManifest:
        return job.schema.shared_kinds


def record_children(status: Status, memory: Memory) -> Status:
    """Return the status with the UIDs of the latest shared children that are known to be the operator's."""
    known = status.operator_state.children
    new = [uid for uid in memory.children if uid not in known]
    return status.remember(children=(*known, *new)[-_MOST_CHILDREN:]) if new else status


def _identify(raw: Object) -> tuple[str, str]:
    """Return kind and name of an object."""
    return str(raw["kind"]), str(raw["metadata"]["name"])
