"""What the executor gives a feature that carries out one of its actions (``Service.act``)."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ddp_operator.api.cluster import Cluster, Object
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.decide.state import Observation, Outcome
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
