"""What a pass gives a feature that acts or that observes pods."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from ddp_operator.api.cluster import Cluster, Object
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.decide.hooks import JobHooks
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
    hooks: JobHooks
