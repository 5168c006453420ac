"""What caches, commands and features read of resources and pods that are not parsed."""

from collections.abc import Mapping
from typing import Any

from ddp_operator.api.cluster import Object
from ddp_operator.api.constants import DEFAULT_METRICS_PORT
from ddp_operator.api.kubeobjects import count_gpus, find_foreign_manager
from ddp_operator.api.other_kinds import ANNOTATION_CLUSTER, MULTIKUEUE


def claim_of(resource: Object) -> str | None:
    """Return the claim or the URL of a resource's checkpoints, from its spec and the profile in its status.

    A job of another controller has none: its pods run elsewhere.
    """
    if find_foreign_manager(resource) is not None:
        return None
    profile_job = ((resource.get("status") or {}).get("profile") or {}).get("job") or {}
    own_checkpoint = (resource.get("spec") or {}).get("checkpoint") or {}
    checkpoint = {**(profile_job.get("checkpoint") or {}), **own_checkpoint}
    claim = checkpoint.get("claimName") or checkpoint.get("url")
    return claim if isinstance(claim, str) else None


def find_metrics_port(resource: Mapping[str, Any]) -> int:
    """Return the port of the reports of a training job's pods."""
    port = _find_mapping(_find_mapping(resource, "spec"), "metrics").get("port")
    return port if isinstance(port, int) else DEFAULT_METRICS_PORT


def count_pod_gpus(pod_spec: Mapping[str, Any]) -> int:
    """Return how many GPUs the containers of a pod request together."""
    return sum(count_gpus(container.get("resources") or {}) for container in pod_spec.get("containers") or ())


def find_worker_cluster(resource: Mapping[str, Any]) -> str:
    """Return the cluster in which MultiKueue runs a job, or ran it; empty: it has selected none, or is not asked."""
    if find_foreign_manager(resource) != MULTIKUEUE:
        return ""
    return str((resource["metadata"].get("annotations") or {}).get(ANNOTATION_CLUSTER) or "")


def _find_mapping(owner: Mapping[str, Any], member: str) -> Mapping[str, Any]:
    value = owner.get(member)
    return value if isinstance(value, Mapping) else {}
