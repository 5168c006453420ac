"""The training container of a pod, and what a pod asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_operator.constants import TRAINER_CONTAINER
from ddp_operator.kubeobjects.quantities import count_gpus


def find_trainer(pod: Mapping[str, Any]) -> Any:
    """Return the training container of a pod or a pod template: the one named ``trainer``, else the first."""
    containers = (pod.get("spec") or {}).get("containers") or [{}]
    return next((c for c in containers if c.get("name") == TRAINER_CONTAINER), containers[0])


def count_pod_gpus(pod_spec: Mapping[str, Any]) -> int:
    """Return how many GPUs the containers of a pod ask for together."""
    return sum(count_gpus(container.get("resources") or {}) for container in pod_spec.get("containers") or ())
