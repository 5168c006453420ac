"""Children that go on although they are not seen: somebody has taken away the labels by which they are found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.cluster import controller_of


def may_be_unseen(job: DDPTrainingJob, jobs: Iterable[Mapping[str, Any]], pods: Iterable[Mapping[str, Any]]) -> bool:
    """Tell whether the current attempt may have children that are not among these.

    Its Job counts more pods than are seen, or pods are seen whose Job is not. Mostly the news is only late.
    """
    attempt = next(
        (
            raw
            for raw in jobs
            if controller_of(raw).get("uid") == job.uid and raw["metadata"]["name"] == job.status.job_name
        ),
        None,
    )
    alive = [pod for pod in pods if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")]
    if attempt is None:
        orphans = [pod for pod in alive if "deletionTimestamp" not in pod["metadata"]]
        return any(controller_of(pod).get("name") == job.status.job_name for pod in orphans)
    seen: int = sum(controller_of(pod).get("uid") == attempt["metadata"].get("uid") for pod in alive)
    return int((attempt.get("status") or {}).get("active") or 0) > seen
