"""The placement of pods and their permitted connections: spec.scheduling and spec.networkPolicy."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api import child_names, constants
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.decide.state import DeleteJob, RelabelJob
from ddp_operator.kube.resources import kind_of, path
from ddp_operator.kube.startup_checks import GANG_PERMISSIONS
from ddp_operator.manifests.children import build_children
from tests.support.builders import child_job, job, template
from tests.unit.ddp_operator.decide.test_decide import run

OPERATOR = {constants.LABEL_COMPONENT: constants.COMPONENT_OPERATOR}
QUEUED = {"kueue.x-k8s.io/queue-name": "q"}


def children(attempt: int = 1, nodes: int = 2, **spec: Any) -> dict[str, Any]:
    return {child["kind"]: child for child in build_children(job(**spec), attempt=attempt, nodes=nodes)}


def pod_of(attempt: int = 1, **spec: Any) -> Any:
    return children(attempt, **spec)["Job"]["spec"]["template"]


def refusal(**spec: Any) -> str:
    with pytest.raises(InvalidManifest) as caught:
        children(**spec)
    return str(caught.value)


class TestGang:
    def test_volcano_has_group_of_all_pods_before_job(self) -> None:
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

    def test_coscheduling_uses_label(self) -> None:
        result = children(scheduling={"gang": "Coscheduling"}, rendezvous={"joinTimeoutSeconds": 120})
        assert result["PodGroup"]["apiVersion"] == "scheduling.x-k8s.io/v1alpha1"
        assert result["PodGroup"]["spec"] == {"minMember": 2, "scheduleTimeoutSeconds": 120}
        assert children(scheduling={"gang": "Volcano"}, spares=2)["PodGroup"]["spec"]["minMember"] == 4
        pod = result["Job"]["spec"]["template"]
        assert pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "train-1"
        assert pod["spec"]["schedulerName"] == "scheduler-plugins-scheduler"

    def test_native_gang_names_group_in_pods(self) -> None:
        result = children(3, 5, scheduling={"gang": "Native"})
        assert result["PodGroup"]["spec"] == {"schedulingPolicy": {"gang": {"minCount": 5}}}
        assert result["PodGroup"]["metadata"]["name"] == "train-3"
        pod = result["Job"]["spec"]["template"]["spec"]
        assert pod["schedulingGroup"] == {"podGroupName": "train-3"}
        assert "schedulerName" not in pod

    def test_native_gang_has_constraints_and_entries_of_pods(self) -> None:
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

    @pytest.mark.parametrize(
        "spec",
        [
            {"scheduling": {"gang": "Native", "schedulerName": "mine"}},
            {"scheduling": {"gang": "Volcano", "schedulerName": "mine"}},
            {"scheduling": {"schedulerName": "mine"}},
            {"scheduling": {"gang": "Volcano"}, "template": template(schedulerName="mine")},
        ],
    )
    def test_scheduler_that_is_named_is_used(self, spec: dict[str, Any]) -> None:
        assert pod_of(**spec)["spec"]["schedulerName"] == "mine"

    def test_created_objects_match_role(self) -> None:
        for gang in ("Native", "Coscheduling", "Volcano"):
            group = children(scheduling={"gang": gang})["PodGroup"]
            assert set(GANG_PERMISSIONS[gang.lower()]) == {kind_of(group)}
            assert path(kind_of(group), "ns").startswith(f"/apis/{group['apiVersion']}/namespaces/ns/podgroups")


class TestPlacement:
    def test_pack_prefers_nodes_of_same_attempt(self) -> None:
        own = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": ["mine"]}, "nodeAffinity": {"a": 1}}
        pod = pod_of(2, scheduling={"placement": "Pack"}, template=template(affinity=own))["spec"]
        mine, ours = pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert (mine, pod["affinity"]["nodeAffinity"]) == ("mine", {"a": 1})
        assert ours["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
        assert ours["podAffinityTerm"]["labelSelector"]["matchLabels"] == child_names.child_labels("train", 2)


class TestSchedulingRefusals:
    def test_value_in_two_places(self) -> None:
        words = refusal(scheduling={"schedulerName": "a"}, template=template(schedulerName="b"))
        assert words.startswith("spec.scheduling.schedulerName:")
        assert "spec.template.spec.schedulerName; remove one of the two" in words
        words = refusal(scheduling={"priorityClassName": "a"}, template=template(priorityClassName="a"))
        assert words.startswith("spec.scheduling.priorityClassName:")

    @pytest.mark.parametrize("entries", [None, [], ["fabric"], [{"name": "other", "resourceClaimName": "a"}]])
    def test_shared_claim_that_pods_lack_is_refused(self, entries: Any) -> None:
        scheduling = {"gang": "Native", "sharedClaims": ["fabric"]}
        words = refusal(scheduling=scheduling, template=template(resourceClaims=entries))
        assert words.startswith("spec.scheduling.sharedClaims[0]:")
        assert "spec.template.spec.resourceClaims; add it there or remove it here" in words

    def test_two_queues_are_refused(self) -> None:
        words = refusal(scheduling={"gang": "Volcano"}, labels=QUEUED)
        assert "if Kueue queues the job" in words
        assert children(scheduling={"gang": "Coscheduling"}, labels=QUEUED)["PodGroup"]

    @pytest.mark.parametrize("fewest", ["1", "many", "3", "9" * 5000], ids=["1", "many", "3", "5000 digits"])
    def test_kueue_min_parallelism_without_elastic_job_is_refused(self, fewest: str) -> None:
        few = {"kueue.x-k8s.io/job-min-parallelism": fewest}
        words = refusal(annotations=few, nodes=4)
        assert words.startswith("metadata.annotations[kueue.x-k8s.io/job-min-parallelism]: Invalid value:")
        assert "needs an elastic job" in words
        elastic = {"minNodes": 2, "maxNodes": 4}
        if fewest == "3":
            assert children(annotations=few, nodes=4, elastic=elastic)["Job"]
        else:
            words = refusal(annotations=few, nodes=4, elastic=elastic)
            assert "must be at least spec.elastic.minNodes (2)" in words

    def test_network_policy_with_host_network_is_refused(self) -> None:
        assert "hostNetwork" in refusal(networkPolicy={"enabled": True}, template=template(hostNetwork=True))

    def test_metrics_reader_without_selector_is_refused(self) -> None:
        words = refusal(networkPolicy={"enabled": True, "metricsFrom": [{"podSelector": {}}, {}]})
        assert words.startswith("spec.networkPolicy.metricsFrom[1]: Invalid value: must have namespaceSelector,")

    @pytest.mark.parametrize("cidr", ["10.0.0.0/33", "10.0.0.1/8", "example.com", ""])
    def test_invalid_cidr_is_refused(self, cidr: str) -> None:
        words = refusal(networkPolicy={"enabled": True, "egressCidrs": ["10.0.0.0/8", cidr]})
        assert words.startswith("spec.networkPolicy.egressCidrs[1]:")
        assert "write it such as 10.0.0.0/8" in words


class TestNetworkPolicy:
    def policy(self, **more: Any) -> Any:
        return children(networkPolicy={"enabled": True, **more})["NetworkPolicy"]

    def test_policy_selects_pods_of_every_attempt_only(self) -> None:
        selector = self.policy()["spec"]["podSelector"]["matchLabels"]
        for attempt in (1, 2):
            assert selector.items() <= pod_of(attempt)["metadata"]["labels"].items()
        assert selector["ddp-operator.dev/job-name"] == "train"

    def test_pods_connect_only_to_peers_and_dns(self) -> None:
        spec = self.policy()["spec"]
        own = [{"podSelector": spec["podSelector"]}]
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        assert spec["egress"] == [
            {"to": own},
            {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]},
        ]
        peers, metrics = spec["ingress"]
        assert peers == {"from": own}
        assert metrics["ports"] == [{"port": 9400, "protocol": "TCP"}]

    def test_metrics_readers_default_to_operator_and_prometheus(self) -> None:
        def readers(**more: Any) -> list[Any]:
            return list(self.policy(**more)["spec"]["ingress"][1]["from"])

        operator, prometheus = readers()
        assert operator == {"namespaceSelector": {}, "podSelector": {"matchLabels": OPERATOR}}
        assert prometheus["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}
        assert readers(metricsFrom=[]) == [operator]
        own = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
        assert readers(metricsFrom=own) == [operator, *own]

    def test_policy_is_created_before_pods(self) -> None:
        kinds = [child["kind"] for child in build_children(job(networkPolicy={"enabled": True}), attempt=1, nodes=1)]
        assert kinds.index("NetworkPolicy") < kinds.index("Job")


class TestKueue:
    """Only Kueue changes suspend, parallelism and node selectors of a queued Job."""

    @pytest.mark.parametrize("is_so", [True, False])
    def test_suspension_removes_job_from_queue(self, is_so: bool) -> None:
        actions = run(jobs=[child_job(suspend=is_so, queue="q")], suspend=True, labels=QUEUED).actions
        assert actions == (DeleteJob("train-1", "job-1"),)

    def test_queue_fields_may_change_while_job_waits(self) -> None:
        second = {"kueue.x-k8s.io/queue-name": "other", "kueue.x-k8s.io/priority-class": "high", "team": "a"}
        waiting = child_job(suspend=True, written=False, queue="q")
        (action,) = run(jobs=[waiting], labels=second, annotations={"kueue.x-k8s.io/elastic-job": "true"}).actions
        changed = {"kueue.x-k8s.io/queue-name": "other", "kueue.x-k8s.io/priority-class": "high"}
        annotations = {"kueue.x-k8s.io/elastic-job": "true"}
        assert action == RelabelJob("train-1", {"labels": changed, "annotations": annotations})
        assert run(jobs=[waiting], labels=QUEUED).actions == ()
        assert run(jobs=[waiting]).actions == (), "the label may be of Kueue's own, in a namespace with a default queue"
        admitted = child_job(queue="q", written=False, suspend=False)
        assert run(jobs=[admitted], labels=second).actions == (), "Kueue refuses it"
