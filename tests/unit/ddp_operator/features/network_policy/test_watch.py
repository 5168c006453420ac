"""The operator watches the NetworkPolicies of jobs, of which it keeps the metadata."""

from __future__ import annotations

from ddp_operator.api.cluster import Key
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.network_policy import FEATURE
from ddp_operator.kube.cluster import METADATA_ONLY
from ddp_operator.manager.operator import Operator
from ddp_operator.manager.settings import Settings
from tests.unit.ddp_operator.kube.test_cluster import LABELS, OF_RESOURCE, run

POLICY = {"metadata": {"namespace": "ns", "name": "j", "uid": "p", "labels": LABELS} | OF_RESOURCE}
RESOURCE = {"metadata": {"namespace": "ns", "name": "j", "uid": "r"}}


async def test_operator_watches_and_compares_kind_of_feature() -> None:
    process = Operator(Settings(namespaces=("a", "b")), (FEATURE,))
    assert [place for place in process._watched if place[0] == "NetworkPolicy"] == [
        *(("NetworkPolicy", "a"), ("NetworkPolicy", "b")),
    ]
    assert "NetworkPolicy" in process.sync.kinds
    without = Operator(Settings())
    assert "NetworkPolicy" not in {*without.sync.kinds, *(kind for kind, _ in without._watched)}


async def test_policy_is_among_children() -> None:
    lists = [{"items": [POLICY] if number == 4 else []} for number in range(5)]
    snapshot, client = await run(
        lambda cluster: cluster.fetch(Key("ns", "j")), RESOURCE, *lists, hooks=Hooks((FEATURE,))
    )
    [policy] = snapshot.others
    assert (policy["kind"], policy["metadata"]["uid"]) == ("NetworkPolicy", "p")
    _, path, options = client.calls[-1]
    assert path == "/apis/networking.k8s.io/v1/namespaces/ns/networkpolicies"
    assert options["accept"] == METADATA_ONLY
