"""Profiles at a real API server: its own strategic merge as an oracle, the definitions' rules, and the operator."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_operator.api.constants import EXIT_RETRYABLE, KIND
from ddp_operator.api.other_kinds import CLUSTER_PROFILE_KIND, PROFILE_KIND
from ddp_operator.features.profiles.merge import ALTERNATIVES, MERGE_KEYS, merge
from ddp_operator.kube.client import ResponseError
from ddp_operator.kube.resources import path
from tests.support import ROOT
from tests.support.builders import Json, profile, resource, template, trainer
from tests.support.control_plane import ControlPlane, free_ports
from tests.support.operator_process import OperatorProcess
from tests.support.standin import ClusterActors

from .test_apiserver_operator import actors

__all__ = ["actors"]  # a fixture
pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(300)]
POLICY = ROOT / "deploy" / "profiles" / "required.yaml"


@pytest.fixture(scope="module", autouse=True)
def definitions(plane: ControlPlane) -> None:
    """Both kinds of profiles."""
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "deploy" / "crds"))
    for kind in (CLUSTER_PROFILE_KIND, PROFILE_KIND):
        plane.kubectl("wait", "--for=condition=Established", f"crd/{kind.lower()}s.ddp-operator.dev")


@pytest.fixture
def namespace(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    """A separate namespace for the test, without profiles for all."""
    name = f"p-{abs(hash(request.node.nodeid)) % 10**8}"
    plane.kubectl("create", "namespace", name)
    yield name
    plane.kubectl("delete", "namespace", name, "--wait=false")
    plane.kubectl("delete", CLUSTER_PROFILE_KIND, "--all")


@pytest.fixture
def start(plane: ControlPlane, tmp_path: Path) -> Iterator[Callable[..., OperatorProcess]]:
    """Start the operator as its own service account; keywords are settings."""
    kubeconfig = plane.account("ddp-operator", "ddp-operator")
    (port,) = free_ports(1)

    def begin(**settings: str) -> OperatorProcess:
        env = {f"DDP_OPERATOR_{name.upper()}": value for name, value in settings.items()}
        return stack.enter_context(OperatorProcess(kubeconfig, tmp_path / "operator.log", port=port, env=env))

    with ExitStack() as stack:
        yield begin


BASE = template(
    {
        "name": "trainer",
        "image": "a:1",
        "args": ["x", "y"],
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}, {"name": "C", "value": "3"}],
        "ports": [{"containerPort": 1, "name": "one", "protocol": "TCP"}],
        "volumeMounts": [{"name": "v", "mountPath": "/v"}, {"name": "w", "mountPath": "/w", "readOnly": True}],
        "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
    },
    {"name": "side", "image": "s:1"},
    {"name": "last", "image": "l:1"},
    metadata={"labels": {"app": "x", "a": "b"}},
    volumes=[{"name": "v", "emptyDir": {"medium": "Memory"}}, {"name": "w", "emptyDir": {}}],
    tolerations=[{"key": "a", "operator": "Exists"}],
    nodeSelector={"pool": "gpu", "zone": "a"},
    imagePullSecrets=[{"name": "one"}],
    hostAliases=[{"ip": "10.0.0.1", "hostnames": ["a"]}],
    topologySpreadConstraints=[
        {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
    ],
)
PATCHES: dict[str, Json] = {
    "values": template({"name": "trainer", "image": "b:2", "args": ["z"], "resources": {"limits": {"memory": "2Gi"}}}),
    "items": template(
        {
            "name": "trainer",
            "env": [{"name": "D", "value": "4"}, {"name": "B", "value": "9"}],
            "ports": [{"containerPort": 2, "protocol": "TCP"}, {"containerPort": 1, "name": "other"}],
            "volumeMounts": [{"mountPath": "/w", "name": "w", "readOnly": False}, {"mountPath": "/x", "name": "v"}],
        }
    ),
    "order": template({"name": "new", "image": "n:1"}, {"name": "side", "image": "s:2"}, {"name": "trainer"}),
    "pod": template(
        {"name": "trainer"},
        metadata={"labels": {"a": "c", "d": "e"}},
        tolerations=[{"key": "b", "operator": "Exists"}],
        nodeSelector={"zone": "b"},
        imagePullSecrets=[{"name": "two"}],
        hostAliases=[{"ip": "10.0.0.2", "hostnames": ["b"]}, {"ip": "10.0.0.1", "hostnames": ["c"]}],
        topologySpreadConstraints=[{"topologyKey": "zone", "maxSkew": 2}],
    ),
    "volumes": template(
        {"name": "trainer"},
        volumes=[
            {"name": "v", "hostPath": {"path": "/v", "type": ""}},
            {"name": "w", "emptyDir": {"sizeLimit": "1Gi"}},
            {"name": "u", "emptyDir": {}},
        ],
    ),
    "nulls": template({"name": "trainer", "args": None, "resources": {"limits": {"cpu": None}}}, nodeSelector=None),
    "deleted": template(
        {"name": "trainer", "env": [{"name": "A", "$patch": "delete"}, {"name": "E", "value": "5"}]},
        {"name": "side", "$patch": "delete"},
    ),
    "replaced": template(
        {"name": "trainer", "env": [{"$patch": "replace"}, {"name": "E", "value": "5"}]},
        nodeSelector={"$patch": "replace", "zone": "c"},
    ),
}


def with_retained_keys(value: Any, field: str = "") -> Any:
    """Return a patch of volumes as `kubectl apply` writes it: unnamed sources are removed."""
    if isinstance(value, dict):
        return {name: with_retained_keys(member, name) for name, member in value.items()}
    if not isinstance(value, list):
        return value
    items = [with_retained_keys(item) for item in value]
    if field in ALTERNATIVES - {"env"} and field in MERGE_KEYS:
        return [item | {"$retainKeys": list(item)} for item in items]
    return items


@pytest.mark.parametrize("case", PATCHES)
async def test_template_merge_equals_api_server_merge(actors: ClusterActors, case: str) -> None:
    stored = await actors.client.request(
        "POST",
        f"/api/v1/namespaces/{actors.namespace}/podtemplates",
        body={"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "base"}, "template": BASE},
        kind="podtemplates",
    )
    patched = await actors.client.request(
        "PATCH",
        f"/api/v1/namespaces/{actors.namespace}/podtemplates/base",
        body={"template": with_retained_keys(copy.deepcopy(PATCHES[case]))},
        content_type="application/strategic-merge-patch+json",
        kind="podtemplates",
    )
    merged = merge(stored["template"], PATCHES[case])
    # Defaults that the API server adds to new items.
    again = await actors.client.request(
        "POST",
        f"/api/v1/namespaces/{actors.namespace}/podtemplates",
        body={"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "merged"}, "template": merged},
        kind="podtemplates",
    )
    assert again["template"] == patched["template"]


REFUSED: dict[str, tuple[Json, str]] = {
    "a job's own field": ({"job": {"nodes": 2}}, 'unknown field "spec.job.nodes"'),
    "a bound": ({"job": {"recovery": {"maxRestarts": -1}}}, "spec.job.recovery.maxRestarts"),
    "a choice": ({"job": {"securityProfile": "None"}}, "spec.job.securityProfile"),
    "a removed lock": ({"locked": ["recovery"]}, "removed; refuse the values in a ValidatingAdmissionPolicy"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_profile_is_refused_by_its_field(actors: ClusterActors, case: str) -> None:
    spec, words = REFUSED[case]
    with pytest.raises(ResponseError) as caught:
        await actors.client.request(
            "POST",
            path(CLUSTER_PROFILE_KIND, None),
            params={"fieldValidation": "Strict"},
            body=profile({}) | {"spec": spec},
        )
    assert words in caught.value.message


async def test_job_without_profile_needs_its_template(actors: ClusterActors) -> None:
    bare = resource("bare", namespace=actors.namespace, checkpoint={"claimName": "c"})
    del bare["spec"]["template"]
    with pytest.raises(ResponseError) as caught:
        await actors.create(bare)
    assert "spec.template, spec.checkpoint.path: no default" in caught.value.message
    bare["spec"]["profileRef"] = {"name": "gpu"}
    created = await actors.create(bare)
    assert set(created["spec"]) == {"nodes", "suspend", "checkpoint", "profileRef"}


GIVEN: Json = {
    "recovery": {"maxRestarts": 9},
    "elastic": {"minNodes": 1, "maxNodes": 3},
    "template": template(trainer(), nodeSelector={"kubernetes.io/os": "linux"}),
}
OWN_TRAINER: Json = {"name": "trainer", "command": ["python", "own.py"]}
OWN = template(OWN_TRAINER)


async def test_upgrade_with_other_defaults_changes_no_started_job(
    plane: ControlPlane, actors: ClusterActors, start: Callable[..., OperatorProcess]
) -> None:
    first = start()
    await actors.create(resource("before", namespace=actors.namespace))
    await actors.run_pod("before-1", 0)
    await actors.phase("before", "Running")
    old = await actors.child_job("before-1")
    first.stop()
    defaults = {"networkPolicy": {"enabled": True, "egressCidrs": ["10.0.0.0/8"]}, "securityProfile": "Restricted"}
    second = start(job_defaults=json.dumps(defaults))
    await actors.create(resource("after", namespace=actors.namespace))
    await actors.create(resource("apart", namespace=actors.namespace, networkPolicy={"enabled": False}))
    await actors.run_pod("after-1", 0)
    await actors.run_pod("apart-1", 0)
    running = await actors.phase("after", "Running")
    assert running["status"]["profile"]["job"] == defaults
    assert "networkPolicy" not in running["spec"]
    await actors.phase("apart", "Running")

    def policies() -> list[str]:
        return str(plane.kubectl("-n", actors.namespace, "get", "networkpolicies", "-o", "name").stdout).split()

    def user(job: Json) -> Any:
        return job["spec"]["template"]["spec"]["securityContext"].get("runAsNonRoot")

    assert policies() == ["networkpolicy.networking.k8s.io/after"]
    assert [user(await actors.child_job(f"{name}-1")) for name in ("after", "apart")] == [True, True]
    kept = await actors.child_job("before-1")
    assert (kept["metadata"]["uid"], kept["spec"]) == (old["metadata"]["uid"], old["spec"])
    # A later attempt equals the first one.
    second.stop()
    start()
    await actors.finish_pod("before-1", 0, exit_code=EXIT_RETRYABLE)
    assert user(await actors.child_job("before-2")) is None
    await actors.finish_pod("after-1", 0, exit_code=EXIT_RETRYABLE)
    assert user(await actors.child_job("after-2")) is True


async def test_quota_of_jobs_that_is_used_up_keeps_none_from_its_profile(
    plane: ControlPlane, actors: ClusterActors, start: Callable[[], OperatorProcess]
) -> None:
    count = "count/ddptrainingjobs.ddp-operator.dev"
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": {count: "1"}}}
    where = f"/api/v1/namespaces/{actors.namespace}/resourcequotas"
    await actors.client.request("POST", where, body=quota, kind="resourcequotas")
    used = {"status": {"hard": {count: "1"}, "used": {count: "0"}}}  # as its controller writes some time later
    await actors.client.request(
        "PATCH", f"{where}/q/status", body=used, content_type="application/merge-patch+json", kind="resourcequotas"
    )
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(profile(GIVEN)))
    start()
    await actors.create(resource("j", namespace=actors.namespace, template=OWN, profileRef={"name": "gpu"}))
    await actors.run_pod("j-1", 0)


async def test_namespace_can_require_profile(plane: ControlPlane, actors: ClusterActors) -> None:
    plane.kubectl("apply", "-f", str(POLICY))
    try:
        plane.kubectl("label", "namespace", actors.namespace, "ddp-operator.dev/profiles=required")
        allowed = resource("with", namespace=actors.namespace, template=OWN, profileRef={"name": "h100"})

        async def refusal(manifest: Json) -> str:
            try:
                await actors.client.request(
                    "POST", path(KIND, actors.namespace), params={"dryRun": "All"}, body=manifest
                )
            except ResponseError as error:
                return error.message
            return ""

        async def enforced() -> bool:
            return "needs a profile" in await refusal(resource("without", namespace=actors.namespace))

        await actors.until(enforced, "the policy is enforced")
        second = allowed | {"spec": allowed["spec"] | {"profileRef": {"kind": PROFILE_KIND, "name": "own"}}}
        assert "ClusterDDPTrainingProfile" in await refusal(second)
        assert await refusal(allowed) == ""
    finally:
        plane.kubectl("delete", "-f", str(POLICY))


FORBIDDEN: dict[str, Json] = {
    "securityProfile": {"securityProfile": "Default"},
    "networkPolicy.enabled": {"networkPolicy": {"enabled": False}},
    "hostNetwork": {"template": template(OWN_TRAINER, hostNetwork=True)},
    "nodeSelector": {"template": template(OWN_TRAINER, nodeSelector={"a": "b"})},
    "securityContext": {"template": template(OWN_TRAINER | {"securityContext": {}})},
}


async def test_namespace_can_forbid_values_beside_a_profile(plane: ControlPlane, actors: ClusterActors) -> None:
    policy = ROOT / "deploy" / "profiles" / "locked.yaml"
    plane.kubectl("apply", "-f", str(policy))
    try:
        plane.kubectl("label", "namespace", actors.namespace, "ddp-operator.dev/profiles=locked")

        async def refusal(**spec: Any) -> str:
            manifest = resource("j", namespace=actors.namespace, **{"template": OWN, **spec})
            where = path(KIND, actors.namespace)
            try:
                await actors.client.request("POST", where, params={"dryRun": "All"}, body=manifest)
            except ResponseError as error:
                return error.message
            return ""

        async def enforced() -> bool:
            return "spec.securityProfile" in await refusal(securityProfile="Default")

        await actors.until(enforced, "the policy is enforced")
        for field, spec in FORBIDDEN.items():
            assert field in await refusal(**spec), field
        assert await refusal(securityProfile="Restricted", networkPolicy={"enabled": True}) == ""
    finally:
        plane.kubectl("delete", "-f", str(policy))
