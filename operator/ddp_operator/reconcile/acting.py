"""What a pass gives a feature that acts, that observes pods, or that decides where the pods of a job run."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from ddp_operator.api.cluster import Cluster, Key, Object
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import ConditionStatus
from ddp_operator.decide.report import Page
from ddp_operator.decide.state import Children, Observation, Outcome
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


@dataclass(frozen=True, slots=True)
class PlacementContext:
    """A resource in one pass, for a feature that decides in which cluster, and when, its pods run.

    ``conditions``: the types of the features' conditions, each with the status that needs no attention.
    """

    key: Key
    resource: Object
    cluster: Cluster
    turns: Turns
    clock: Callable[[], datetime]
    conditions: Mapping[str, ConditionStatus]


@dataclass(frozen=True, slots=True)
class PodPages:
    """The reports of a job's pods in a pass in which that of pod 0 is due.

    ``page``: that report; None: it could not be read since ``page_lost_since``, or pod 0 does not run. ``read``:
    returns the reports of other pods that respond, within the job's budget.
    """

    job: DDPTrainingJob
    children: Children
    page: Page | None
    page_lost_since: datetime | None
    now: datetime
    read: Callable[[Sequence[PodView]], Awaitable[list[tuple[PodView, Page]]]]
