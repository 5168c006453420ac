"""The placement of pods by spec.scheduling."""

from __future__ import annotations

from ddp_operator.api import child_names
from tests.support.builders import template
from tests.support.planned_children import pod_of


class TestPlacement:
    def test_pack_prefers_nodes_of_same_attempt(self) -> None:
        own = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": ["mine"]}, "nodeAffinity": {"a": 1}}
        pod = pod_of(2, scheduling={"placement": "Pack"}, template=template(affinity=own))["spec"]
        mine, ours = pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert (mine, pod["affinity"]["nodeAffinity"]) == ("mine", {"a": 1})
        assert ours["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
        assert ours["podAffinityTerm"]["labelSelector"]["matchLabels"] == child_names.child_labels("train", 2)
