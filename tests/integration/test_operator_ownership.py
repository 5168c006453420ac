"""The operator's process and objects that another client has created first with the name and the owner of a child."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_operator.api import constants
from ddp_operator.api.parse import parse_resource
from ddp_operator.features import SCHEMA
from ddp_operator.manifests.children import (
    build_feature_children,
    build_launcher_config_map,
    build_rendezvous_secret,
    build_service,
    load_launcher,
)
from tests.support.builders import job_manifest
from tests.support.control_plane import free_ports
from tests.support.operator_process import OperatorProcess
from tests.support.standin import ClusterActors, StandIn

SPEC: dict[str, Any] = {"networkPolicy": {"enabled": True}}


@pytest.fixture
def operator(server: StandIn, kubeconfig: Path, tmp_path: Path) -> Iterator[OperatorProcess]:
    """The operator as users start it."""
    (port,) = free_ports(1)
    with OperatorProcess(kubeconfig, tmp_path / "log", port=port, warm=True) as process:
        yield process


async def suspend_new_job(actors: ClusterActors, **spec: Any) -> Any:
    """Create a suspended job, so that its UID is known before its children exist; return it typed."""
    await actors.create(job_manifest(suspend=True, **spec))
    stored = await actors.resource("digits", lambda job: (job.get("status") or {}).get("phase") == "Suspended")
    return parse_resource(stored, SCHEMA)


async def resume(actors: ClusterActors) -> None:
    await actors.patch(constants.KIND, "digits", {"spec": {"suspend": False}})


def accepted(job: Any) -> Any:
    """Return the condition Accepted."""
    return next(item for item in job["status"]["conditions"] if item["type"] == "Accepted")


def forge(kind: str, job: Any) -> dict[str, Any]:
    """Return a child of a job as another client would create it to be adopted."""
    if kind == "Service":
        forged = build_service(job)
        forged["spec"]["selector"] = {"app": "intruder"}
    elif kind == "NetworkPolicy":
        [forged] = build_feature_children(job, attempt=1, nodes=1)
        forged["spec"] = {"podSelector": {}, "ingress": [{}], "egress": [{}], "policyTypes": ["Ingress", "Egress"]}
    else:
        forged = build_launcher_config_map(job, load_launcher())
        forged["data"] = {constants.LAUNCHER_FILE: "print('intruder')"}
        forged["metadata"]["ownerReferences"] = build_service(job)["metadata"]["ownerReferences"]
    return forged


@pytest.mark.parametrize("kind", ["Service", "NetworkPolicy", "ConfigMap"])
async def test_child_that_was_there_first_is_named_and_not_used(
    operator: OperatorProcess, actors: ClusterActors, kind: str
) -> None:
    forged = forge(kind, await suspend_new_job(actors, **SPEC))
    name = forged["metadata"]["name"]
    await actors.create(forged)
    await resume(actors)
    refused = await actors.resource("digits", lambda job: accepted(job)["status"] == "False")
    condition = accepted(refused)
    assert condition["reason"] == "NameConflict"
    assert f"{kind} {name}" in condition["message"]
    assert f"kubectl -n default delete {kind.lower()} {name}" in condition["message"]
    assert await actors.list("Job") == [], "no pod uses it"

    await actors.delete(kind, name)
    await actors.child_job("digits-1")
    own = await actors.get(kind, name)
    assert own is not None
    assert own.get("spec") != forged.get("spec", {}) or own["data"] != forged["data"]
    await actors.resource("digits", lambda job: accepted(job)["status"] == "True")


async def test_secret_that_was_there_first_is_not_used(operator: OperatorProcess, actors: ClusterActors) -> None:
    job = await suspend_new_job(actors)
    forged = build_rendezvous_secret(job) | {"stringData": {constants.RENDEZVOUS_KEY: "intruder"}}
    await actors.create(forged)
    await resume(actors)
    child = await actors.child_job("digits-1")
    [container] = child["spec"]["template"]["spec"]["containers"]
    env = {variable["name"]: variable for variable in container["env"]}
    name = env[constants.ENV_RENDEZVOUS_SECRET]["valueFrom"]["secretKeyRef"]["name"]
    assert name != forged["metadata"]["name"]
    assert name.startswith(f"digits-rendezvous-{job.uid}-")
    used = await actors.get("Secret", name)
    assert used is not None
    assert used["stringData"][constants.RENDEZVOUS_KEY] != "intruder"


async def test_child_with_same_content_is_adopted_after_crash(operator: OperatorProcess, actors: ClusterActors) -> None:
    job = await suspend_new_job(actors, **SPEC)
    for child in (build_service(job), *build_feature_children(job, attempt=1, nodes=1)):
        await actors.create(child)  # as by an operator that was killed before it wrote the status
    await resume(actors)
    await actors.child_job("digits-1")
    service = await actors.get("Service", "digits")
    policy = await actors.get("NetworkPolicy", "digits")
    assert service is not None
    assert policy is not None
    uids = {service["metadata"]["uid"], policy["metadata"]["uid"]}
    await actors.resource("digits", lambda job: set(job["status"]["operatorState"].get("children", ())) == uids)
