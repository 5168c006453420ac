"""What a pass asks features for, and what it gives those that act or observe pods.

``decide/hooks`` knows the features: it calls them, checks what they return, and contains their faults. Without features
a pass has ``NO_FEATURES``.
"""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Protocol

from ddp_operator.api.cluster import Cluster, Key, Object, Snapshot
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parts import NO_PARTS, SpecSchema
from ddp_operator.api.status import Status
from ddp_operator.decide.report import Page
from ddp_operator.decide.state import (
    Children,
    FeatureAction,
    Observation,
    Outcome,
    PassHooks,
    Refusal,
    Suspicion,
    Trouble,
)
from ddp_operator.decide.views import PodView
from ddp_operator.manifests.template import ResolvedTemplate
from ddp_operator.reconcile.turns import Turns


@dataclass(frozen=True, slots=True)
class ActionContext:
    """A job in one pass, and what may be done for it.

    ``turns``: for steps that read the user's input. ``create_job``: creates a Job of small pods from its manifest and
    the job's template, after the launcher. It raises Refused, ClusterError.
    """

    job: DDPTrainingJob
    observation: Observation
    cluster: Cluster
    turns: Turns
    create_job: Callable[[Object, ResolvedTemplate], Awaitable[Outcome]]


@dataclass(slots=True)
class NodeReadings:
    """What was read of a job's nodes when it was due last. ``next_index``: of the first node to read next."""

    time: datetime | None = None
    next_index: int = 0
    troubles: Mapping[str, Trouble] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PodPages:
    """What a feature may read of a job's pods in a pass.

    ``page``: the report of pod 0; None: it was not due, it could not be read since ``page_lost_since``, or pod 0 does
    not run. ``read``: returns the reports of other pods that respond, within the job's budget. ``waiting_jobs``: number
    of jobs whose pods do not all run. ``hooks``: of the pass, for what another feature knows (``decide/queue_places``).
    """

    job: DDPTrainingJob
    children: Children
    page: Page | None
    page_lost_since: datetime | None
    now: datetime
    read: Callable[[Sequence[PodView]], Awaitable[list[tuple[PodView, Page]]]]
    cluster: Cluster
    turns: Turns
    waiting_jobs: int
    hooks: "ReconcileHooks"


class ReconcileHooks(PassHooks, Protocol):
    """What features add to one pass over a job: here nothing."""

    @property
    def faults(self) -> Mapping[str, str]:
        """What hooks have raised, by the name of the feature."""
        return {}

    async def check_start(self, cluster: Cluster) -> Refusal | None:
        """Return why a job that has not started must not start now; None: it may. Raises: Refused, ClusterError."""
        return None

    async def observe_pods(
        self, pages: PodPages, before: Mapping[str, object], *, is_due: bool = True
    ) -> Mapping[str, object]:
        """Return what features observe of the pods, by their names. ``before``: the same of the last pass.

        ``is_due``: whether the report of pod 0 is. Raises: ClusterError.
        """
        return {}

    async def watch_nodes(self, pages: PodPages, readings: NodeReadings) -> Mapping[str, Trouble] | None:
        """Return what is wrong with the nodes of the pods, by node; None: no feature judges nodes.

        ``readings``: those before, which this one updates.
        """
        return None

    def list_departures(self, key: Key) -> Mapping[str, str]:
        """Return who requests that pods leave their nodes, and why, by the name of the pod."""
        return {}

    def list_suspicions(self, key: Key) -> Mapping[str, Suspicion]:
        """Return the pods of the job that may be lost with their nodes, by the UID of the pod."""
        return {}

    def list_returned_nodes(self) -> frozenset[str]:
        """Return the lost nodes, of any job, that are ready again."""
        return frozenset()

    async def act(self, action: FeatureAction, context: ActionContext) -> Outcome:
        """Let a feature carry out its action. Raises: Refused, ClusterError."""
        return None


class FeatureHooks(Protocol):
    """What features add to all passes: here nothing."""

    @property
    def schema(self) -> SpecSchema:
        """The fields of the kernel and of the features."""
        return NO_PARTS

    def observe(self, job: DDPTrainingJob, faults: MutableMapping[tuple[str, str], str]) -> ReconcileHooks:
        """Return what they add to one pass over a job. ``faults``: of its former passes, which this one updates."""
        return _NoReconcileHooks()

    def extend(self, key: Key, status: Status, now: datetime) -> Status:
        """Return a status that is being written with what they add at each write."""
        return status

    def note_status(self, snapshot: Snapshot, old: Status, new: Status, now: datetime) -> None:
        """Take note that a status was written."""
        return

    def forget(self, key: Key) -> None:
        """Drop a job that has ended or was deleted."""
        return


class _NoReconcileHooks(ReconcileHooks):
    pass


class _NoFeatures(FeatureHooks):
    pass


NO_FEATURES: Final = _NoFeatures()
