"""The NetworkPolicy of a job: the permitted connections of its pods."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.features.network_policy.fields import COMPONENT_OPERATOR, LABEL_COMPONENT
from ddp_operator.manifests.children import build_children
from tests.support.builders import job, template
from tests.support.planned_children import children, pod_of, refusal

OPERATOR = {LABEL_COMPONENT: COMPONENT_OPERATOR}


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


def test_network_policy_with_host_network_is_refused() -> None:
    assert "hostNetwork" in refusal(networkPolicy={"enabled": True}, template=template(hostNetwork=True))


@pytest.mark.parametrize("peer", [{}, {"podSelector": {}, "namespace": "a"}, "pods"])
def test_metrics_reader_without_selector_is_refused(peer: object) -> None:
    words = refusal(networkPolicy={"enabled": True, "metricsFrom": [{"podSelector": {}}, peer]})
    assert words.startswith("spec.networkPolicy.metricsFrom[1]: Invalid value: ")
    assert "must have namespaceSelector," in words


@pytest.mark.parametrize("cidr", ["10.0.0.0/33", "10.0.0.1/8", "example.com", ""])
def test_invalid_cidr_is_refused(cidr: str) -> None:
    words = refusal(networkPolicy={"enabled": True, "egressCidrs": ["10.0.0.0/8", cidr]})
    assert words.startswith("spec.networkPolicy.egressCidrs[1]:")
    assert "write it such as 10.0.0.0/8" in words
