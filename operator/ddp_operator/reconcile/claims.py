"""How many GPUs the pods of a job get by resource claims (DRA): what attempt 1 has counted, or what is counted now.

The number goes into the status before anything is made of it and stays: what becomes of a ResourceClaimTemplate later
changes no job that has started.
"""

from ddp_operator.api.claims import count_claimed, digest_claims, find_claims, is_counted
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import ClaimedGpus
from ddp_operator.cluster import Cluster, Refused
from ddp_operator.status import conditions as c
from ddp_operator.status.decide import is_finished
from ddp_operator.status.decision import Refusal


async def find_claimed_gpus(cluster: Cluster, job: DDPTrainingJob, *, begun: bool) -> ClaimedGpus | Refusal | None:
    """Return the GPUs that each pod claims, or why the job has to wait for that; None: it claims nothing.

    ``begun``: whether there is a Job. Raises: ClusterError.
    """
    status = job.status
    if status.first_run_time is not None or is_finished(status):
        return status.claims  # from then on neither template nor procPerNode can be changed
    references = find_claims(job.spec)
    if not references:
        return None
    digest, found = digest_claims(job.spec, references), []
    if status.claims is not None and status.claims.digest == digest and (status.attempt or begun):
        return status.claims
    for one in references:
        try:
            raw = await cluster.resource_claim(one.kind, job.namespace, one.name)
        except Refused as error:
            if not is_counted(job.spec):
                continue
            remedy = "let the operator get it (docs/security.md), or set spec.procPerNode to a number"
            return Refusal(c.FORBIDDEN, f"{one}: {error.message}; {remedy}")
        if raw is None:
            remedy = "the job starts once it does, or when another is named"
            words = f"{one} does not exist in namespace {job.namespace}; {remedy}"
            return Refusal(c.RESOURCE_CLAIM_NOT_FOUND, words)
        found.append((one, raw))
    try:
        return ClaimedGpus(gpus=count_claimed(job.spec, found), digest=digest)
    except InvalidManifest as error:
        return Refusal(c.INVALID_SPEC, str(error))
