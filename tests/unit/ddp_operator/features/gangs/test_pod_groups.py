"""How API servers take PodGroups: versions, dropped fields, and refusals with a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ddp_operator.api.cluster_errors import Refused
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.gangs import FEATURE
from ddp_operator.kube.cluster import KubeCluster
from tests.unit.ddp_operator.kube.test_cluster import JOB, OF_RESOURCE, RecordingClient, error, run

GROUP = {
    "apiVersion": "scheduling.volcano.sh/v1beta1",
    "kind": "PodGroup",
    "metadata": {"namespace": "ns", "name": "g"},
}
NATIVE_GROUP = GROUP | {"apiVersion": "scheduling.k8s.io/v1beta1", "spec": {}}
SCHEDULING = "/apis/scheduling.k8s.io"
RACK = {"topology": [{"key": "example.com/rack"}]}


async def post(work: Callable[[KubeCluster], Coroutine[Any, Any, Any]], *answers: Any) -> tuple[Any, RecordingClient]:
    """Run an action on a cluster with this feature and these responses."""
    return await run(work, *answers, hooks=Hooks((FEATURE,)))


async def test_group_of_absent_scheduler_is_refused_with_remedy() -> None:
    raised, _ = await post(lambda cluster: cluster.create(GROUP), error(404))
    assert isinstance(raised, Refused)
    problem = "the cluster does not serve PodGroups of scheduling.volcano.sh/v1beta1"
    assert str(raised) == f"spec.scheduling.gang: {problem}; install that scheduler or set gang: None"
    assert raised.reason == "Invalid"


async def test_native_pod_group_is_created_in_newest_served_version() -> None:
    created, client = await post(lambda cluster: cluster.create(NATIVE_GROUP), error(404), error(404), NATIVE_GROUP)
    assert created == NATIVE_GROUP
    versions = ["v1beta1", "v1alpha3", "v1alpha2"]
    assert [path for _, path, _ in client.calls] == [
        f"{SCHEDULING}/{version}/namespaces/ns/podgroups" for version in versions
    ]
    assert [options["body"]["apiVersion"].rpartition("/")[2] for _, _, options in client.calls] == versions


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("mode", "constraints", "fields"),
    [
        ("PodGroup", RACK | {"default": 1}, []),
        ("PodGroup", None, ["gangTopology"]),
        ("PodGroup", {"topology": []}, ["gangTopology"]),
        ("Pod", RACK, ["disruptionMode"]),  # the default: 1.36 stores it with the gate off
        ("Pod", None, ["gangTopology", "disruptionMode"]),
    ],
)
async def test_pod_group_is_refused_and_deleted_if_api_server_dropped_field(
    mode: str, constraints: Any, fields: list[str], dry_run: bool
) -> None:
    posted = NATIVE_GROUP | {"spec": {"schedulingConstraints": RACK, "disruptionMode": {"all": {}}}}
    metadata = GROUP["metadata"] | {"uid": "u"}
    stored = posted | {"metadata": metadata, "spec": {"disruptionMode": mode, "schedulingConstraints": constraints}}
    answers = (error(404), error(404), stored, {"kind": "Status"})
    result, client = await post(lambda cluster: cluster.create(posted, dry_run=dry_run), *answers)
    assert isinstance(result, Refused) == bool(fields)
    assert {options["accept"] for _, _, options in client.calls[:3]} == {"application/json"}, "all fields are compared"
    refusals = re.findall(r"spec\.scheduling\.(\w+): the API server ignores it; enable the feature gate", str(result))
    assert refusals == fields
    # Before v1alpha3 the field is a string.
    assert [call[2]["body"]["spec"]["disruptionMode"] for call in client.calls[1:3]] == [{"all": {}}, "PodGroup"]
    assert [method for method, _, _ in client.calls[3:]] == (["DELETE"] if fields and not dry_run else [])


async def test_job_of_native_gang_before_kubernetes_1_36_is_refused_with_remedy() -> None:
    message = 'strict decoding error: unknown field "spec.template.spec.schedulingGroup"'
    raised, _ = await post(lambda cluster: cluster.create(JOB), error(400, message=message))
    assert "does not serve PodGroups of scheduling.k8s.io; enable the feature gates" in str(raised)


async def test_pod_group_without_role_is_refused_with_chart_value() -> None:
    message = 'podgroups is forbidden: User "x" cannot create resource "podgroups"'
    raised, _ = await post(lambda cluster: cluster.create(GROUP), error(403, message=message))
    assert str(raised) == f"{message}; add the gang scheduler to rbac.gangSchedulers of the chart"


async def test_discard_deletes_pod_group_in_served_version() -> None:
    own = {"metadata": GROUP["metadata"] | OF_RESOURCE | {"uid": "u"}}
    manifest = NATIVE_GROUP | own
    _, client = await post(lambda cluster: cluster.discard(manifest), error(404), error(404), manifest)
    assert [(method, path.split("/")[3]) for method, path, _ in client.calls] == [
        ("GET", "v1beta1"),
        ("GET", "v1alpha3"),
        ("GET", "v1alpha2"),
        ("DELETE", "v1alpha2"),
    ]
