"""Copies in memory in the pods' manifests."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.manifests.children import build_children
from tests.support.builders import UID, job, template, trainer


def build_pod(
    interval: int | None = None, limit: str | None = None, of_pod: dict[str, Any] | None = None, **spec: Any
) -> dict[str, Any]:
    """Return the pod of a container with this memory limit, or that of a template."""
    container = trainer(resources={"limits": {"memory": limit}} if limit else {})
    checkpoint = {"path": "/ckpt", **({"memoryInterval": interval} if interval is not None else {})}
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
    ("interval", "folder", "variable"),
    [
        (None, f"/dev/shm/ddp-memory-{UID}-2", None),
        (5, f"/dev/shm/ddp-memory-{UID}-2", "5"),
        (0, None, None),
    ],
)
def test_script_gets_folder_of_the_attempt_and_interval(
    interval: int | None, folder: str | None, variable: str | None
) -> None:
    environment = read_environment(build_pod(interval))
    assert (environment.get("DDP_MEMORY_DIR"), environment.get("DDP_MEMORY_INTERVAL")) == (folder, variable)


@pytest.mark.parametrize(
    ("written", "limit", "size"),
    [
        ("50%", "8Gi", str(4 * 2**30)),
        ("99%", "1000", "990"),
        ("50%", None, None),
        ("6Gi", "8Gi", "6Gi"),
        (None, "8Gi", None),
    ],
)
def test_size_of_shared_memory(written: str | None, limit: str | None, size: str | None) -> None:
    spec = {} if written is None else {"sharedMemory": written}
    assert find_size(build_pod(2, limit, **spec)) == size
    if limit:
        of_pod = template(trainer(), resources={"limits": {"memory": limit}})
        assert find_size(build_pod(2, of_pod=of_pod, **spec)) == size
