"""Gathers everything that a decision rests on, once a pass: the children, and what others say of them.

Nodes, Events, queues and metrics pages are asked only where it matters, and not more often than their answers change.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import inf
from typing import Any

from ddp_operator import constants, names
from ddp_operator.api.errors import FieldError
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.profile import complete_spec
from ddp_operator.api.status import Profile, Straggler
from ddp_operator.cluster import Cluster, ClusterError, Key, Object, Refused, Snapshot, owner_uids
from ddp_operator.failures import Termination
from ddp_operator.kubeobjects import scheduling_gates
from ddp_operator.manifests.children import load_launcher
from ddp_operator.progress import Page, PageParser, RateMeter
from ddp_operator.reconcile.page_budget import (
    MAX_SECONDS_AT_ONCE,
    PAGES_AT_ONCE,
    CountedParser,
    PageBudget,
    PageTooLong,
)
from ddp_operator.status import conditions as c
from ddp_operator.status import kueue, lost_nodes, scheduling, stragglers
from ddp_operator.status.converge import scrape_interval
from ddp_operator.status.decide import is_finished
from ddp_operator.status.diagnosis import MOST_FAILURES, parse_restart_failures
from ddp_operator.status.node_health import LOOK_SECONDS, MOST_NODES, find_trouble, nodes_in_use
from ddp_operator.status.observation import Children, Observation, Problem, Stall, view_children
from ddp_operator.status.ownership import may_have_lost_labels
from ddp_operator.status.stragglers import Ranks
from ddp_operator.status.views import NodeView, PodView, view_node

# How long news of new children may be late before they are looked for, and between two looks.
_NEWS_DELAY, _RESTORE_INTERVAL = 2.0, 10.0
# How often a page that has not answered for long is requested.
_LOST_PAGE_INTERVAL = 60.0
# A timer that fires a little early shall not find that nothing is due yet.
_EARLY = 0.9


@dataclass(slots=True)
class Memory:
    """The times of what is not done in every pass, and the answers of then; nothing depends on it after a restart."""

    page_read: datetime | None = None
    page_lost: datetime | None = None
    """Since when it has not answered."""
    meter: RateMeter = field(default_factory=RateMeter)
    page_budget: PageBudget = field(default_factory=PageBudget)
    """Of the pages of all pods but pod 0's."""
    ranks_compared: tuple[datetime, int, Ranks] | None = None
    """When, in which attempt, and what the ranks had done by then."""
    stall: Stall | None = None
    pull_errors: Mapping[str, str] = field(default_factory=dict)
    events_read: tuple[datetime, Mapping[str, Problem]] | None = None
    checked: tuple[str, int] | None = None
    """UID and generation of the spec of which it is known that children can be built from it."""
    built: list[dict[str, Any]] | None = None
    """Those of attempt 1, where this pass has built them to find that out."""
    unseen_since: datetime | None = None
    """Since when children of the current attempt may be there that no watch shows."""
    labels_restored: datetime | None = None
    """When those were last looked for."""
    nodes_watched: datetime | None = None
    next_node: int = 0
    """Where in the list of the job's nodes the next look begins."""
    troubles: Mapping[str, str] = field(default_factory=dict)
    orphaned_since: datetime | None = None
    """Since when there have been pods whose Job is gone and that nobody deletes."""
    failing_since: datetime | None = None
    """Since when the API server has failed to create a child."""
    status_written: datetime | None = None
    status_refused: datetime | None = None
    """When the API server has last refused it."""
    status_shortened: bool = False
    """Whether it takes a shortened status only."""
    last_parsed: DDPTrainingJob | None = None

    locked: tuple[FieldError, ...] = ()
    """What of that spec is not as its profile has locked it."""

    def parse(self, resource: Object, profile: Profile | None = None) -> DDPTrainingJob:
        """Return the typed resource with its profile, parsing a generation's spec once. Raises: InvalidManifest."""
        last, meta = self.last_parsed, resource["metadata"]
        locked = profile.locked if profile is not None else ()
        if last is not None and (last.uid, last.generation, last.status.profile) == (
            meta.get("uid"),
            meta.get("generation"),
            profile,
        ):
            self.last_parsed = parse_resource(resource, last.spec, locked)
            return self.last_parsed
        errors: list[FieldError] = []
        if profile is not None:
            spec, errors = complete_spec(resource["spec"], profile)
            resource = {**resource, "spec": spec}
        self.last_parsed = parse_resource(resource, locked=locked)
        self.locked = tuple(errors)
        return self.last_parsed


def seconds_since(last: datetime | None, now: datetime) -> float:
    """Return how long ago it was; without a sign, for a clock that was set back must not put off what is due."""
    return inf if last is None else abs((now - last).total_seconds())


class Observer:
    """Observes one resource at a time; how many are waiting is what it knows of them all."""

    def __init__(self, cluster: Cluster, clock: Callable[[], datetime], progress_interval: float) -> None:
        self._cluster = cluster
        self._clock = clock
        self._progress_interval = progress_interval
        self._polling: set[Key] = set()

    def forget(self, key: Key) -> None:
        """Drop a resource that has ended or is gone."""
        self._polling.discard(key)

    async def observe(self, key: Key, job: DDPTrainingJob, snapshot: Snapshot, memory: Memory) -> Observation:
        """Return everything that ``decide`` looks at beside the resource. Raises: ClusterError."""
        children = view_children(job, snapshot)
        unseen = not is_finished(job.status) and may_have_lost_labels(job, children)
        if await self._restore_labels(job, memory, unseen=unseen):
            snapshot = await self._cluster.observe(key) or snapshot
            children = view_children(job, snapshot)
        requested, page = await self._read_page(job, children, memory)
        problems = await self._read_events(key, job, snapshot, children, memory)
        shared, complete, launcher_lost = _find_shared(job, snapshot, children, problems)
        slow, stall = await self._compare_ranks(job, children, page, memory)
        memory.pull_errors = scheduling.find_pull_errors(children.pods, memory.pull_errors)
        # Pods that the garbage collector has to delete and does not.
        left = any(pod.alive and not pod.deleting for pod in children.orphans)
        memory.orphaned_since = (memory.orphaned_since or self._clock()) if left else None
        return Observation(
            children.jobs,
            children.pods,
            children.orphans,
            page=page,
            page_requested=requested,
            page_lost_since=memory.page_lost,
            shared=shared,
            shared_complete=complete,
            launcher_lost=launcher_lost,
            nodes=await self._read_nodes(job, children),
            troubles=await self._watch_nodes(job, children, memory),
            problems=problems,
            polling_jobs=len(self._polling),
            stragglers=slow,
            stall=stall,
            pull_errors=memory.pull_errors,
            failures_in_place=await self._read_failures(job, children, page, memory),
            orphaned_since=memory.orphaned_since,
            recheck_after=_NEWS_DELAY if unseen else None,
        )

    async def _restore_labels(self, job: DDPTrainingJob, memory: Memory, *, unseen: bool) -> bool:
        """Give children back the labels that somebody has taken away. Returns whether any had lost them."""
        now = self._clock()
        if not unseen:
            memory.unseen_since = memory.labels_restored = None
            return False
        memory.unseen_since = memory.unseen_since or now
        # While pods are made, news of them is often late; of those that train it seldom is.
        delay = 0.0 if job.status.is_true(c.RENDEZVOUSED) else _NEWS_DELAY
        due = seconds_since(memory.labels_restored, now) >= _RESTORE_INTERVAL
        if not due or seconds_since(memory.unseen_since, now) < delay:
            return False
        memory.labels_restored = now
        labels = names.child_labels(job.name, job.status.attempt)
        with suppress(ClusterError, Refused):
            return await self._cluster.restore_labels(job.uid, job.namespace, job.status.job_name, labels)
        return False

    async def _read_page(self, job: DDPTrainingJob, children: Children, memory: Memory) -> tuple[bool, Page | None]:
        """Read pod 0's page when it is due. Returns whether it was requested, and what it said."""
        now = self._clock()
        interval = scrape_interval(job.status, now, self._progress_interval)
        if memory.page_lost is not None and memory.page_read is not None:
            # Each try holds up a worker for seconds, which other jobs wait for.
            interval = max(interval, min(_LOST_PAGE_INTERVAL, seconds_since(memory.page_lost, memory.page_read)))
        if is_finished(job.status) or seconds_since(memory.page_read, now) < interval * _EARLY:
            return False, None
        pods = children.pods_of(job.status.attempt)
        master = next((pod for pod in pods if pod.index == 0 and pod.running), None)
        if master is None:
            memory.page_lost = None
            return False, None
        memory.page_read = now
        parser = PageParser()
        if not await self._cluster.scrape(master.raw, job.spec.metrics.port, parser.feed):
            memory.page_lost = memory.page_lost or now
            return True, None
        page = parser.finish()
        memory.page_lost = None
        process = master.uid, page.in_place_restarts
        return True, replace(page, rates=memory.meter.measure(process, page.values, now.timestamp()))

    async def _read_pages(
        self, job: DDPTrainingJob, pods: Sequence[PodView], budget: PageBudget
    ) -> list[tuple[PodView, Page]]:
        """Read pods' metrics pages within the budget; pages beyond it and those that do not answer are left out."""
        found: dict[str, Page] = {}
        gate = asyncio.Semaphore(PAGES_AT_ONCE)

        async def read(pod: PodView) -> None:
            async with gate:
                if budget.spent:
                    return
                parser = CountedParser(budget)
                with suppress(PageTooLong):
                    if await self._cluster.scrape(pod.raw, job.spec.metrics.port, parser.feed):
                        found[pod.uid] = parser.finish()

        budget.renew(self._clock())
        loop = asyncio.get_running_loop()
        began = loop.time()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(MAX_SECONDS_AT_ONCE, max(0.0, budget.seconds_left))):
                await asyncio.gather(*map(read, pods))
        budget.use_seconds(loop.time() - began)
        return [(pod, found[pod.uid]) for pod in pods if pod.uid in found]

    async def _read_nodes(self, job: DDPTrainingJob, children: Children) -> Mapping[str, NodeView]:
        """Read the nodes on which it depends whether a pod can still end by itself; seldom any."""
        found = {}
        for name in lost_nodes.nodes_to_inspect(job, children, self._clock()):
            try:
                found[name] = view_node(await self._cluster.node(name))
            except Refused:
                found[name] = NodeView(None, "")
        return found

    async def _watch_nodes(self, job: DDPTrainingJob, children: Children, memory: Memory) -> Mapping[str, str]:
        """Return what the nodes of the pods report; some are asked in each look, the others as they said last."""
        used, now = nodes_in_use(job, children), self._clock()
        known = {name: what for name, what in memory.troubles.items() if name in used}
        if used and seconds_since(memory.nodes_watched, now) >= LOOK_SECONDS * _EARLY:
            memory.nodes_watched = now
            begin = memory.next_node % len(used)
            memory.next_node = begin + MOST_NODES
            for name in (*used[begin:], *used[:begin])[:MOST_NODES]:
                with suppress(Refused, ClusterError):
                    what = find_trouble(job, await self._cluster.node(name))
                    known = {one: said for one, said in known.items() if one != name} | ({name: what} if what else {})
        memory.troubles = known
        return known

    async def _read_events(
        self, key: Key, job: DDPTrainingJob, snapshot: Snapshot, children: Children, memory: Memory
    ) -> Mapping[str, Problem]:
        """Return what Events and Workloads say of the Job and pods that do not get on; read now, or not long ago."""
        now = self._clock()
        uids = () if is_finished(job.status) else scheduling.objects_to_inspect(job, children, now)
        if not uids:
            memory.events_read = None
            self._polling.discard(key)
            return {}
        self._polling.add(key)
        if memory.events_read is not None:
            # The interval grows with time: this one began at the last look.
            last, known = memory.events_read
            interval = scheduling.event_poll_delay(job, children, last, polling_jobs=len(self._polling)) or 0.0
            if seconds_since(last, now) < interval * _EARLY:
                return known
        found: dict[str, Problem] = {}
        gated = any(scheduling_gates(pod.raw) for pod in children.pods_of(job.status.attempt))
        for raw in (*snapshot.jobs, *snapshot.pods):
            uid = raw["metadata"].get("uid")
            if uid not in uids:
                continue
            with suppress(Refused):
                if raw["kind"] == "Job" and (gated or raw["spec"].get("suspend")):
                    problem = await self._ask_queue(raw)
                else:
                    problem = scheduling.latest_warning(await self._cluster.events_of(raw))
                if problem is not None:
                    found[uid] = problem
        memory.events_read = now, found
        return found

    async def _ask_queue(self, raw: Object) -> Problem | None:
        """Return what Kueue says of a Job. Raises: Refused where its Workloads may not be read."""
        workloads = await self._cluster.workloads_of(raw)
        queue, name = None, (raw["metadata"].get("labels") or {}).get(constants.KUEUE_QUEUE_LABEL)
        if name:
            with suppress(Refused):
                queue = await self._cluster.local_queue(raw["metadata"]["namespace"], name)
        return kueue.explain_waiting(raw, workloads, queue)

    async def _compare_ranks(
        self, job: DDPTrainingJob, children: Children, page: Page | None, memory: Memory
    ) -> tuple[tuple[Straggler, ...] | None, Stall | None]:
        """Read the other pods' pages, once a minute and when steps have stopped, and compare the ranks."""
        if page is None:
            return None, None
        now, stalled, known = self._clock(), stragglers.is_stalled(job, page), memory.stall
        memory.stall = None
        if not (stalled or (page.training and page.ranks)):
            return None, None
        places = {one.rank: one for one in (*(known.places if known else ()), *page.stalled)}
        compared, attempt, before = memory.ranks_compared or (None, 0, {})
        ranks, slow = dict(page.ranks), None
        explained = known is not None and (not places or stragglers.is_explained(places.values()))
        if seconds_since(compared, now) >= stragglers.WINDOW or (stalled and not explained):
            sampled = stragglers.sample_pods(children.pods_of(job.status.attempt))
            for _, other in await self._read_pages(job, sampled, memory.page_budget):
                ranks |= other.ranks
                places.update((one.rank, one) for one in other.stalled)
            memory.ranks_compared = now, job.status.attempt, ranks
            slow = stragglers.find_stragglers(before, ranks) if attempt == job.status.attempt else None
        if stalled:
            began = known or Stall(stragglers.stalled_since(page, now), ranks)
            memory.stall = replace(began, places=tuple(sorted(places.values())))
        return slow, memory.stall

    async def _read_failures(
        self, job: DDPTrainingJob, children: Children, page: Page | None, memory: Memory
    ) -> tuple[tuple[PodView, Termination], ...]:
        """Read on the pods' pages why workers were restarted in the same pods, when pod 0's counts a new such restart.

        A failure in any pod makes all pods restart their workers, but only that pod knows the cause.
        """
        restarts = job.status.restarts
        if page is None or restarts.in_place_before + page.in_place_restarts <= restarts.in_place:
            return ()
        pods = children.pods_of(job.status.attempt)
        pages = [(pod, page) for pod in pods if pod.index == 0 and pod.phase == "Running"]
        sampled = stragglers.sample_pods(pods, MOST_FAILURES)
        return parse_restart_failures(pages + await self._read_pages(job, sampled, memory.page_budget))


def _find_shared(
    job: DDPTrainingJob, snapshot: Snapshot, children: Children, problems: Mapping[str, Problem]
) -> tuple[frozenset[tuple[str, str]], bool, bool]:
    """Return what all attempts share and is there, whether that is all, and whether the Job's launcher is lost."""
    users = ("ConfigMap", constants.LAUNCHER_USERS)
    owners = {job.uid} | {raw["metadata"]["uid"] for raw in snapshot.config_maps if _place(raw) == users}
    raws = (*snapshot.services, *snapshot.config_maps, *snapshot.policies)
    shared = {_place(raw) for raw in raws if owner_uids(raw) & owners}
    needed = {"Service"} | ({"NetworkPolicy"} if job.spec.network_policy.enabled else set())
    complete = needed <= {kind for kind, _ in shared}
    attempt_job = children.job(job.status.attempt)
    if attempt_job is None or not attempt_job.launcher or attempt_job.finished:
        return frozenset(shared), complete, False
    # Nobody watches ConfigMaps: a kubelet may know better.
    if any(f'configmap "{attempt_job.launcher}" not found' in problem.message for problem in problems.values()):
        shared.discard(("ConfigMap", attempt_job.launcher))
    missing = ("ConfigMap", attempt_job.launcher) not in shared
    ours = attempt_job.launcher == names.launcher_config_map_name(load_launcher().digest)
    return frozenset(shared), complete and not (ours and (missing or users not in shared)), missing and not ours


def _place(raw: Object) -> tuple[str, str]:
    return str(raw["kind"]), str(raw["metadata"]["name"])
