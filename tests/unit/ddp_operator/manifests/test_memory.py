"""Copies in memory in the pods' manifests."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.manifests.children import build_children
from tests.support.builders import UID, job, template, trainer


def build_pod(memory: dict[str, Any] | None = None, limit: str | None = None, **spec: Any) -> dict[str, Any]:
    container = trainer(resources={"limits": {"memory": limit}} if limit else {})
    checkpoint = {"path": "/ckpt", **({"memory": memory} if memory is not None else {})}
    made = build_children(job(template=template(container), checkpoint=checkpoint, **spec), attempt=2, nodes=2)
    pod: dict[str, Any] = next(child for child in made if child["kind"] == "Job")["spec"]["template"]["spec"]
    return pod


def read_environment(pod: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in pod["containers"][0]["env"]}


def find_size(pod: dict[str, Any]) -> str | None:
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == "ddp-shm"]
    size: str | None = volume["emptyDir"].get("sizeLimit")
    return size


def test_folder_names_the_attempt_of_the_job() -> None:
    environment = read_environment(build_pod())
    assert environment["DDP_MEMORY_DIR"] == f"/dev/shm/ddp-memory-{UID}-2"
    assert "DDP_MEMORY_INTERVAL" not in environment


def test_interval_is_passed_to_the_script() -> None:
    assert read_environment(build_pod({"interval": 5}))["DDP_MEMORY_INTERVAL"] == "5"


def test_disabled_copies_have_no_folder() -> None:
    assert "DDP_MEMORY_DIR" not in read_environment(build_pod({"enabled": False}))


def test_enabled_copies_get_half_of_the_memory_limit() -> None:
    assert find_size(build_pod({"enabled": True}, "8Gi")) == str(4 * 2**30)


def test_size_of_the_job_takes_precedence() -> None:
    assert find_size(build_pod({"enabled": True}, "8Gi", shm={"sizeLimit": "6Gi"})) == "6Gi"


@pytest.mark.parametrize(("memory", "limit"), [(None, "8Gi"), ({"enabled": True}, None), ({"interval": 2}, "8Gi")])
def test_size_is_that_of_kubernetes_otherwise(memory: dict[str, Any] | None, limit: str | None) -> None:
    assert find_size(build_pod(memory, limit)) is None


@pytest.mark.parametrize("size", ["8Gi", "9Gi"])
def test_shared_memory_of_the_whole_limit_is_refused(size: str) -> None:
    with pytest.raises(InvalidManifest) as refused:
        build_pod({"enabled": True}, "8Gi", shm={"sizeLimit": size})
    [error] = refused.value.errors
    assert error.path == "spec.shm.sizeLimit"
    assert "must be less than the container's memory limit, which is 8Gi" in str(error)


def test_shared_memory_of_a_job_without_copies_is_not_checked() -> None:
    assert find_size(build_pod(None, "8Gi", shm={"sizeLimit": "8Gi"})) == "8Gi"
