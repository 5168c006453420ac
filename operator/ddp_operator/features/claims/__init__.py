"""Jobs with checkpoints at the same claim or URL run one after another, unless ``checkpoint.shared`` is set."""

from typing import Final

from ddp_operator.api.cluster import Cluster
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.decide.claims import exclusive_claim, refuse_second
from ddp_operator.decide.hooks import Feature
from ddp_operator.decide.state import Refusal


async def check_start(job: DDPTrainingJob, cluster: Cluster) -> Refusal | None:
    """Return a refusal while another job has the claim. Raises: ClusterError."""
    claim = exclusive_claim(job)
    if claim is None:
        return None
    return refuse_second(job, claim, await cluster.resources_on_claim(job.namespace, claim))


FEATURE: Final = Feature("claims", maturity="stable", page="checkpoints.md", check_start=check_start)
