"""GPUs by resource claims at a real API server, in every version of the claims API that the server has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ddp_operator.api.claims import CLAIM_KIND, CLAIM_TEMPLATE_KIND, count_claimed, find_claims
from ddp_operator.api.constants import ENV_LAUNCHER_CONFIG, EXIT_RETRYABLE
from ddp_operator.kube.resources import path
from ddp_pod.contract.plan import decode_plan
from tests.support.builders import Json, claiming, gpu_claim, job, resource
from tests.support.control_plane import ControlPlane, free_ports
from tests.support.operator_process import OperatorProcess
from tests.support.standin import ClusterActors

from .test_apiserver_operator import actors, namespace

__all__ = ["actors", "namespace"]  # fixtures
pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(300)]


def four(device: str = "gpu.nvidia.com") -> Json:
    return {"name": "r", "exactly": {"deviceClassName": device, "count": 4}}


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server that also has the versions before v1."""
    api = [f"resource.k8s.io/{version}" for version in ("v1beta1", "v1beta2")]
    with ControlPlane(tmp_path_factory.mktemp("older"), controllers=False, api=api) as control_plane:
        yield control_plane


@pytest.fixture
def operator(plane: ControlPlane, tmp_path: Path) -> Iterator[OperatorProcess]:
    """The operator as its own service account, with the rights of its role and no others."""
    kubeconfig = plane.account("ddp-operator", "ddp-operator")
    (port,) = free_ports(1)
    with OperatorProcess(kubeconfig, tmp_path / "operator.log", port=port) as running:
        yield running


def apply(plane: ControlPlane, item: Json) -> None:
    plane.kubectl("create", "-f", "-", stdin=yaml.safe_dump(item))


def reason_of(resource: Json) -> str:
    return str((resource.get("status") or {}).get("reason"))


def processes(job: Json) -> int:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    plan = next(item["value"] for item in container["env"] if item["name"] == ENV_LAUNCHER_CONFIG)
    return decode_plan(plan).nproc_per_node


@pytest.mark.parametrize("kind", [CLAIM_KIND, CLAIM_TEMPLATE_KIND])
async def test_job_waits_for_claims_and_keeps_counted_gpus(
    plane: ControlPlane, actors: ClusterActors, operator: OperatorProcess, kind: str
) -> None:
    await actors.create(
        resource("j", namespace=actors.namespace, template=claiming({"name": "gpus"}, kind=kind), procPerNode="gpu")
    )
    waits = await actors.resource("j", lambda result: reason_of(result) == "ResourceClaimNotFound")
    assert waits["status"]["phase"] == "Pending"
    apply(plane, gpu_claim(four(), kind=kind, namespace=actors.namespace))
    first = await actors.child_job("j-1")
    assert processes(first) == 4
    assert first["spec"]["template"]["spec"]["resourceClaims"][0]["name"] == "gpus"
    await actors.run_pod("j-1", 0)
    running = await actors.phase("j", "Running")
    assert running["status"]["claims"]["gpus"] == 4
    plane.kubectl("-n", actors.namespace, "delete", kind.lower(), "h100", "--wait=false")
    await actors.finish_pod("j-1", 0, exit_code=EXIT_RETRYABLE)
    assert processes(await actors.child_job("j-2")) == 4


async def test_uncountable_claims_are_reported_with_field_to_set(
    plane: ControlPlane, actors: ClusterActors, operator: OperatorProcess
) -> None:
    every = {"name": "r", "exactly": {"deviceClassName": "gpu.amd.com", "allocationMode": "All"}}
    apply(plane, gpu_claim(every, namespace=actors.namespace))
    await actors.create(resource("j", namespace=actors.namespace, template=claiming({"name": "gpus"})))
    results = await actors.resource("j", lambda result: reason_of(result) == "InvalidSpec")
    assert "requests All devices; set spec.procPerNode to a number" in str(results["status"]["conditions"])


@pytest.mark.parametrize("kind", [CLAIM_KIND, CLAIM_TEMPLATE_KIND])
async def test_each_api_version_gives_same_count(older: ControlPlane, kind: str) -> None:
    alternatives = [{"name": name, **four()["exactly"]} for name in ("first", "second")]
    apply(older, gpu_claim(four(), {"name": "s", "firstAvailable": alternatives}, kind=kind))
    spec = job(template=claiming({"name": "gpus"}, kind=kind)).spec
    forms = []
    async with ClusterActors(older.admin) as actors:
        for version in ("", ".v1beta2", ".v1beta1"):
            result = await actors.client.request("GET", path(f"{kind}{version}", "default", "h100"))
            assert count_claimed(spec, [(claim, result) for claim in find_claims(spec)]) == 8
            forms.append(result["spec"])
    assert forms[0] == forms[1] != forms[2]
