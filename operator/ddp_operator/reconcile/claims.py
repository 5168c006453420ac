"""Find the number of GPUs that a job's pods get by resource claims (DRA).

The operator stores the number in the status before it creates any child, and keeps it: later edits of a
ResourceClaimTemplate do not change a started job.
"""

from ddp_operator.api.claims import count_claimed, digest_claims, find_claims, is_counted
from ddp_operator.api.cluster import Cluster, Refused
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import ClaimedGpus
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import is_finished
from ddp_operator.decide.state import Refusal
from ddp_operator.reconcile.refusals import refuse_invalid, refuse_read

_MAY_NOT_READ = "grant the operator get on it (docs/security.md), or set spec.procPerNode to a number"


async def find_claimed_gpus(cluster: Cluster, job: DDPTrainingJob, *, has_job: bool) -> ClaimedGpus | Refusal | None:
    """Return the GPUs that each pod claims, or the reason why the job has to wait. None: the pods claim nothing.

    ``has_job``: whether a Job of the resource exists. Raises: ClusterError.
    """
    status = job.status
    if status.first_run_time is not None or is_finished(status):
        return status.claims  # from then on template and procPerNode are immutable
    references = find_claims(job.spec)
    if not references:
        return None
    digest = digest_claims(job.spec, references)
    if status.claims is not None and status.claims.digest == digest and (status.attempt or has_job):
        return status.claims

    objects = []
    for reference in references:
        try:
            raw = await cluster.resource_claim(reference.kind, job.namespace, reference.name)
        except Refused as error:
            if not is_counted(job.spec):
                continue
            return refuse_read(str(reference), error, _MAY_NOT_READ)
        if raw is None:
            message = f"{reference} does not exist in namespace {job.namespace}; create it or correct the name"
            return Refusal(c.RESOURCE_CLAIM_NOT_FOUND, message)
        objects.append((reference, raw))

    try:
        return ClaimedGpus(gpus=count_claimed(job.spec, objects), digest=digest)
    except InvalidManifest as error:
        return refuse_invalid(error)
