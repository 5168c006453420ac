"""Copies in memory in the pods' manifests."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.manifests.children import build_children
from tests.support.builders import UID, job, template, trainer


def build_pod(
    memory: dict[str, Any] | None = None, limit: str | None = None, of_pod: dict[str, Any] | None = None, **spec: Any
) -> dict[str, Any]:
    """Return the pod of a container with this memory limit, or that of a template."""
    container = trainer(resources={"limits": {"memory": limit}} if limit else {})
    checkpoint = {"path": "/ckpt", **({"memory": memory} if memory is not None else {})}
    made = build_children(
        job(template=of_pod or template(container), checkpoint=checkpoint, **spec), attempt=2, nodes=2
    )
    pod: dict[str, Any] = next(child for child in made if child["kind"] == "Job")["spec"]["template"]["spec"]
    return pod


def read_environment(pod: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in pod["containers"][0]["env"]}


def find_size(pod: dict[str, Any]) -> str | None:
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == "ddp-shm"]
    size: str | None = volume["emptyDir"].get("sizeLimit")
    return size


@pytest.mark.parametrize(
    ("memory", "folder", "interval"),
    [
        (None, f"/dev/shm/ddp-memory-{UID}-2", None),
        ({"interval": 5}, f"/dev/shm/ddp-memory-{UID}-2", "5"),
        ({"enabled": False}, None, None),
    ],
)
def test_script_gets_folder_of_the_attempt_and_interval(
    memory: dict[str, Any] | None, folder: str | None, interval: str | None
) -> None:
    environment = read_environment(build_pod(memory))
    assert (environment.get("DDP_MEMORY_DIR"), environment.get("DDP_MEMORY_INTERVAL")) == (folder, interval)


@pytest.mark.parametrize(
    ("memory", "limit", "spec", "size"),
    [
        ({"enabled": True}, "8Gi", {}, str(4 * 2**30)),
        ({"enabled": True}, "8Gi", {"sharedMemory": "6Gi"}, "6Gi"),
        ({"enabled": True}, None, {}, None),
        ({"interval": 2}, "8Gi", {}, None),
        (None, "8Gi", {}, None),
        (None, "8Gi", {"sharedMemory": "8Gi"}, "8Gi"),
    ],
)
def test_size_of_shared_memory(
    memory: dict[str, Any] | None, limit: str | None, spec: dict[str, Any], size: str | None
) -> None:
    assert find_size(build_pod(memory, limit, **spec)) == size
    if limit:
        of_pod = template(trainer(), resources={"limits": {"memory": limit}})
        assert find_size(build_pod(memory, of_pod=of_pod, **spec)) == size


@pytest.mark.parametrize("size", ["8Gi", "9Gi"])
def test_shared_memory_of_the_whole_limit_is_refused(size: str) -> None:
    with pytest.raises(InvalidManifest) as refused:
        build_pod({"enabled": True}, "8Gi", sharedMemory=size)
    [error] = refused.value.errors
    assert error.path == "spec.sharedMemory"
    assert "must be less than the container's memory limit, which is 8Gi" in str(error)
