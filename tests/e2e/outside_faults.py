"""Faults from outside of the pods of a training job, removed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from kubernetes import client

from .conftest import UserNamespace
from .release import Release

Fault = Callable[[UserNamespace, str], AbstractContextManager[None]]
"""Plants a fault in the training job of this name when it is entered, and removes it when it is left."""


def find_pod(cluster: UserNamespace, name: str, index: int) -> Any:
    """Return the pod of an index of the current attempt."""
    annotation = "batch.kubernetes.io/job-completion-index"
    pods = [pod for pod in cluster.pods(name) if pod.metadata.annotations.get(annotation) == str(index)]
    return max(pods, key=lambda pod: pod.metadata.creation_timestamp)


@contextmanager
def delete_pod(cluster: UserNamespace, name: str) -> Iterator[None]:
    """Delete pod 1, as a user does."""
    cluster.core.delete_namespaced_pod(find_pod(cluster, name, 1).metadata.name, cluster.namespace)
    yield


@contextmanager
def preempt_pod(cluster: UserNamespace, name: str) -> Iterator[None]:
    """Create a pod of a higher priority that fits on the node of pod 1 only in its place."""
    scheduling = client.SchedulingV1Api(cluster.core.api_client)
    urgent = f"{cluster.namespace}-urgent"
    victim = find_pod(cluster, name, 1)
    allocatable = cluster.core.read_node(victim.spec.node_name).status.allocatable["cpu"]
    container = {
        "name": "urgent",
        "image": victim.spec.containers[0].image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "3600"],
        "resources": {"requests": {"cpu": f"{int(allocatable) * 800}m"}},
    }
    spec = {
        "priorityClassName": urgent,
        "nodeSelector": {"kubernetes.io/hostname": victim.spec.node_name},
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    scheduling.create_priority_class({"metadata": {"name": urgent}, "value": 1000})
    try:
        cluster.core.create_namespaced_pod(cluster.namespace, {"metadata": {"name": "urgent"}, "spec": spec})
        yield
    finally:
        scheduling.delete_priority_class(urgent)
        cluster.core.delete_namespaced_pod("urgent", cluster.namespace)


@contextmanager
def drain_all_nodes(cluster: UserNamespace, name: str) -> Iterator[None]:
    """Cordon all nodes, and evict the pods of the training job from them."""
    cordoned: list[str] = []
    try:
        for node in cluster.core.list_node().items:
            if not node.spec.unschedulable:
                cordoned.append(node.metadata.name)
                assert cluster.kubectl("cordon", node.metadata.name).returncode == 0
        selector = f"--pod-selector=ddp-operator.dev/job-name={name}"
        for node in {pod.spec.node_name for pod in cluster.pods(name)}:
            drained = cluster.kubectl(
                "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", selector
            )
            assert drained.returncode == 0, drained.stderr
        yield
    finally:
        for name in cordoned:
            assert cluster.kubectl("uncordon", name).returncode == 0


@contextmanager
def stop_operator(cluster: UserNamespace, name: str) -> Iterator[None]:
    """Stop the operator that the chart has installed."""
    apps = client.AppsV1Api(cluster.core.api_client)
    replicas = apps.read_namespaced_deployment(Release.name, Release.namespace).spec.replicas
    apps.patch_namespaced_deployment_scale(Release.name, Release.namespace, {"spec": {"replicas": 0}})
    try:
        yield
    finally:
        apps.patch_namespaced_deployment_scale(Release.name, Release.namespace, {"spec": {"replicas": replicas}})
