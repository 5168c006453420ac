"""Which of the jobs that name the same claim may write to it: two would overwrite each other's checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import ENDED_PHASES
from ddp_operator.status import conditions as c
from ddp_operator.status.decision import Refusal


def exclusive_claim(job: DDPTrainingJob) -> str | None:
    """Return the claim of the job's checkpoints, unless other jobs may write to it as well."""
    checkpoint = job.spec.checkpoint
    return None if checkpoint is None or checkpoint.shared else checkpoint.claim_name


def refuse_second(job: DDPTrainingJob, claim: str, others: Iterable[Mapping[str, Any]]) -> Refusal | None:
    """Refuse a job that has not started where one of ``others``, which name the same claim, came first."""
    for other in others:
        metadata, status = other["metadata"], other.get("status") or {}
        phase, started = status.get("phase") or "Pending", bool(status.get("attempt"))
        # Of those that have not started yet the oldest is first.
        older = (str(metadata.get("creationTimestamp") or ""), str(metadata["uid"])) < (job.created, job.uid)
        if metadata["uid"] != job.uid and phase not in ENDED_PHASES and (started or older):
            return Refusal(
                c.CLAIM_IN_USE,
                f"spec.checkpoint.claimName: job {metadata['name']} ({phase}) writes its checkpoints to claim {claim}; "
                "this job starts when that one has ended. Where each writes files of its own, set "
                "spec.checkpoint.shared: true",
            )
    return None
