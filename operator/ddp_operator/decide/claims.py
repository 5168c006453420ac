"""The claim or URL that a job alone may write its checkpoints to. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import ENDED_PHASES
from ddp_operator.decide import conditions as c
from ddp_operator.decide.state import Refusal


def name_claim(claim: str) -> str:
    """Return the text for a result of ``resources.claim_of`` in a message."""
    return claim if "://" in claim else f"claim {claim}"


def exclusive_claim(job: DDPTrainingJob) -> str | None:
    """Return the claim or the URL of the job's checkpoints, unless other jobs may write there as well."""
    checkpoint = job.spec.checkpoint
    if checkpoint is None or checkpoint.shared:
        return None
    return checkpoint.claim_name or checkpoint.url


def explain_use(claim: str) -> tuple[str, str]:
    """Return the field with a claim or URL that another job uses, and how both jobs can run at once."""
    if "://" in claim:
        return "spec.checkpoint.url", "To run both at once, give each job a separate folder"
    return "spec.checkpoint.claimName", "If the jobs write different files, set spec.checkpoint.shared: true"


def refuse_second(job: DDPTrainingJob, claim: str, users: Iterable[Mapping[str, Any]]) -> Refusal | None:
    """Refuse a job that has not started while another job has the same claim. ``users``: all jobs with that claim."""
    for user in users:
        metadata = user["metadata"]
        status = user.get("status") or {}
        phase = status.get("phase") or "Pending"
        if metadata["uid"] == job.uid or phase in ENDED_PHASES:
            continue
        # Of jobs that have not started the oldest is first.
        older = (str(metadata.get("creationTimestamp") or ""), str(metadata["uid"])) < (job.created, job.uid)
        if status.get("attempt") or older:
            field, remedy = explain_use(claim)
            return Refusal(
                c.CLAIM_IN_USE,
                f"{field}: job {metadata['name']} ({phase}) writes its checkpoints to {name_claim(claim)}; "
                f"this job starts when that job has ended. {remedy}",
            )
    return None
