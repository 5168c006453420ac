"""Children that go on although no watch shows them: somebody has taken away the labels by which they are found."""

from __future__ import annotations

from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.cluster import controller_of
from ddp_operator.constants import JOB_TRACKING_FINALIZER
from ddp_operator.status.observation import Children


def may_have_lost_labels(job: DDPTrainingJob, children: Children) -> bool:
    """Tell whether the current attempt may have children that are not among these.

    Its Job counts more pods than are seen, or pods are seen whose Job is not. Mostly the news is only late.
    """
    name = job.status.job_name
    current = next((view for view in children.jobs if view.name == name), None)
    if current is None:
        left = (pod for pod in children.orphans if pod.alive and not pod.deleting)
        return any(controller_of(pod.raw).get("name") == name for pod in left)
    # A pod that has failed is still counted as active until it is replaced, after the Job controller's back-off.
    own = [pod for pod in children.pods if controller_of(pod.raw).get("uid") == current.uid]
    seen = sum(pod.alive or JOB_TRACKING_FINALIZER in (pod.raw["metadata"].get("finalizers") or ()) for pod in own)
    return int((current.raw.get("status") or {}).get("active") or 0) > seen
