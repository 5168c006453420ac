"""The PodGroups of gangs, and what names them in the pods."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.features.gangs.fields import PERMISSIONS
from ddp_operator.kube.resources import kind_of, path
from ddp_operator.manifests.children import build_children
from tests.support.builders import job, template
from tests.support.planned_children import children, pod_of, refusal

QUEUED = {"kueue.x-k8s.io/queue-name": "q"}


def test_volcano_has_group_of_all_pods_before_job() -> None:
    made = build_children(job(scheduling={"gang": "Volcano", "queue": "train"}), attempt=3, nodes=5)
    assert [child["kind"] for child in made[-2:]] == ["PodGroup", "Job"]
    group = made[-2]
    owner = made[-1]
    assert group["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    assert group["spec"] == {"minMember": 5, "queue": "train"}
    assert group["metadata"]["name"] == owner["metadata"]["name"] == "train-3"
    assert group["metadata"]["ownerReferences"] == owner["metadata"]["ownerReferences"]
    pod = owner["spec"]["template"]
    assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "train-3"
    assert pod["spec"]["schedulerName"] == "volcano"


def test_coscheduling_uses_label() -> None:
    result = children(scheduling={"gang": "Coscheduling"}, rendezvous={"joinTimeoutSeconds": 120})
    assert result["PodGroup"]["apiVersion"] == "scheduling.x-k8s.io/v1alpha1"
    assert result["PodGroup"]["spec"] == {"minMember": 2, "scheduleTimeoutSeconds": 120}
    assert children(scheduling={"gang": "Volcano"}, spares=2)["PodGroup"]["spec"]["minMember"] == 4
    pod = result["Job"]["spec"]["template"]
    assert pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "train-1"
    assert pod["spec"]["schedulerName"] == "scheduler-plugins-scheduler"


def test_native_gang_names_group_in_pods() -> None:
    result = children(3, 5, scheduling={"gang": "Native"})
    assert result["PodGroup"]["spec"] == {"schedulingPolicy": {"gang": {"minCount": 5}}}
    assert result["PodGroup"]["metadata"]["name"] == "train-3"
    pod = result["Job"]["spec"]["template"]["spec"]
    assert pod["schedulingGroup"] == {"podGroupName": "train-3"}
    assert "schedulerName" not in pod


def test_native_gang_has_constraints_and_entries_of_pods() -> None:
    entries = [{"name": "own", "resourceClaimName": "a"}, {"name": "fabric", "resourceClaimTemplateName": "b"}]
    fields = {"gangTopology": "example.com/rack", "disruptionMode": "All", "sharedClaims": ["fabric"]}
    pod = template(resourceClaims=entries, priorityClassName="high")
    spec = children(scheduling={"gang": "Native", **fields}, template=pod)["PodGroup"]["spec"]
    del spec["schedulingPolicy"]
    assert spec == {
        "schedulingConstraints": {"topology": [{"key": "example.com/rack"}]},
        "disruptionMode": {"all": {}},
        "resourceClaims": [entries[1]],
        "priorityClassName": "high",  # otherwise the scheduler takes the gang for one of priority 0
    }


def test_scheduler_of_template_is_used() -> None:
    spec = {"scheduling": {"gang": "Volcano"}, "template": template(schedulerName="mine")}
    assert pod_of(**spec)["spec"]["schedulerName"] == "mine"


def test_created_objects_match_role() -> None:
    for gang in ("Native", "Coscheduling", "Volcano"):
        group = children(scheduling={"gang": gang})["PodGroup"]
        assert set(PERMISSIONS[gang.lower()]) == {kind_of(group)}
        assert path(kind_of(group), "ns").startswith(f"/apis/{group['apiVersion']}/namespaces/ns/podgroups")


@pytest.mark.parametrize("entries", [None, [], ["fabric"], [{"name": "other", "resourceClaimName": "a"}]])
def test_shared_claim_that_pods_lack_is_refused(entries: Any) -> None:
    scheduling = {"gang": "Native", "sharedClaims": ["fabric"]}
    words = refusal(scheduling=scheduling, template=template(resourceClaims=entries))
    assert words.startswith("spec.scheduling.sharedClaims[0]:")
    assert "spec.template.spec.resourceClaims; add it there or remove it here" in words


def test_two_queues_are_refused() -> None:
    words = refusal(scheduling={"gang": "Volcano"}, labels=QUEUED)
    assert "if Kueue queues the job" in words
    assert children(scheduling={"gang": "Coscheduling"}, labels=QUEUED)["PodGroup"]


def test_group_of_template_and_that_of_operator_are_refused() -> None:
    pods = template(schedulingGroup={"podGroupName": "mine"})
    assert "schedulingGroup names another; remove one of the two" in refusal(
        scheduling={"gang": "Native"}, template=pods
    )
    empty = pod_of(scheduling={"gang": "Native"}, template=template(schedulingGroup={}))
    assert empty["spec"]["schedulingGroup"] == {"podGroupName": "train-1"}


def test_elastic_gang_needs_no_more_than_least_size() -> None:
    made = children(nodes=3, elastic={"minNodes": 2, "maxNodes": 4}, scheduling={"gang": "Volcano"})
    assert made["PodGroup"]["spec"]["minMember"] == 2
