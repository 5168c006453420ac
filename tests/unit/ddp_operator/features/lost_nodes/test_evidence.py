"""Which silent pods are lost: at least two kinds of witnesses must agree, and none may contradict."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from ddp_operator.decide.state import Suspicion
from ddp_operator.features.lost_nodes.evidence import JobEvidence, LeaseAge, PodEvidence, judge_pods
from tests.support.builders import NOW

LATE = LeaseAge(13.5, 10.0)
FRESH = LeaseAge(8.0, 10.0)
LOST = PodEvidence(
    name="train-1-1-x",
    uid="u1",
    index=1,
    node="node-b",
    peers=(7.0,),
    reach="Silent",
    reach_seconds=7.0,
    lease=LATE,
)


def judge(pod: PodEvidence, *, nodes: int = 2, fresh: int = 1, late: int = 0) -> Suspicion | None:
    return judge_pods(JobEvidence((pod,), nodes, fresh, late), NOW).get(pod.uid)


def test_silent_pod_with_late_lease_is_lost() -> None:
    suspicion = judge(LOST)
    assert suspicion == Suspicion(
        NOW - timedelta(seconds=7),
        "1/1 of its peers get no answer from it, nor does the operator, and its kubelet has renewed its Lease 14 s "
        "ago: it has no power or no network, or restarts",
        is_lost=True,
    )


@pytest.mark.parametrize(
    "evidence",
    [
        pytest.param(replace(LOST, lease=FRESH), id="kubelet-renews-its-lease"),
        pytest.param(replace(LOST, lease=LeaseAge(11.4, 10.0)), id="lease-misses-no-renewal-yet"),
        pytest.param(replace(LOST, lease=LeaseAge(26.0, 25.0)), id="kubelet-renews-more-rarely"),
        pytest.param(replace(LOST, lease=None, lease_problem="no right"), id="lease-cannot-be-read"),
        pytest.param(replace(LOST, peers=(8.0,), reach_seconds=7.9, lease=FRESH), id="operator-had-an-answer"),
        pytest.param(replace(LOST, peers=(7.9,), reach_seconds=8.0, lease=FRESH), id="peer-had-an-answer"),
        pytest.param(
            replace(LOST, peers=(30.0,), reach="", reach_seconds=30.0, lease=FRESH), id="operator-never-had-an-answer"
        ),
        pytest.param(replace(LOST, peers=(4.0,)), id="silence-is-short"),
        pytest.param(replace(LOST, peers=(9.0, 9.0, 0.0, 0.0)), id="half-of-the-peers"),
        pytest.param(replace(LOST, peers=(), reach="Silent"), id="only-the-operator-gets-no-answer"),
        pytest.param(replace(LOST, reach="Answers", reach_seconds=1.0), id="operator-gets-an-answer"),
        pytest.param(replace(LOST, peers=(0.0,), reach="Frozen", reach_seconds=16.0, lease=FRESH), id="page-is-slow"),
        pytest.param(
            replace(LOST, peers=(0.0,), reach="Frozen", reach_seconds=5.0, lease=LeaseAge(30.0, 10.0)),
            id="page-is-slow-for-a-short-time",
        ),
    ],
)
def test_pod_without_second_witness_is_not_lost(evidence: PodEvidence) -> None:
    suspicion = judge(evidence)
    assert suspicion is None or not suspicion.is_lost


def test_majority_of_peers_is_enough_without_operators_own_requests() -> None:
    suspicion = judge(replace(LOST, peers=(9.0, 7.0, 0.0), reach="", reach_seconds=0.0), nodes=8)
    assert suspicion is not None
    assert suspicion.is_lost
    assert suspicion.since == NOW - timedelta(seconds=7)


def test_frozen_node_is_lost_and_named_as_frozen() -> None:
    frozen = replace(LOST, peers=(0.0,), reach="Frozen", reach_seconds=16.0, lease=LeaseAge(26.0, 10.0))
    suspicion = judge(frozen)
    assert suspicion is not None
    assert suspicion.is_lost
    assert suspicion.message.endswith("it is frozen")
    assert suspicion.is_frozen


def test_node_of_frozen_pod_is_not_said_to_live() -> None:
    suspicion = judge(replace(LOST, peers=(0.0,), reach="Frozen", reach_seconds=30.0, lease=LeaseAge(18.0, 10.0)))
    assert suspicion is not None
    assert "lives" not in suspicion.message


def test_silent_pod_whose_kubelet_renews_is_told_apart() -> None:
    suspicion = judge(replace(LOST, peers=(40.0,), lease=FRESH))
    assert suspicion is not None
    assert "the node lives, and the pod or its network does not" in suspicion.message
    assert not suspicion.is_lost


@pytest.mark.parametrize(
    ("lease", "problem", "text"),
    [
        (FRESH, "", "Lease 8 s ago: nobody reaches the pod"),
        (LeaseAge(2.0, 10.0), "", "while the pod was silent: the node lives, and the pod or its network does not"),
        (LATE, "", "Lease 14 s ago: it has no power or no network, or restarts"),
        (None, "no right", "no right: it is lost without this witness"),
    ],
)
def test_pod_that_nobody_reaches_is_lost_whatever_its_lease_says(
    lease: LeaseAge | None, problem: str, text: str
) -> None:
    unreached = replace(LOST, peers=(8.0,), reach_seconds=8.0, lease=lease, lease_problem=problem)
    suspicion = judge(unreached, fresh=0, late=1)
    assert suspicion is not None
    assert suspicion.is_lost
    assert suspicion.message.endswith(text)
    split = judge(unreached, nodes=1)
    assert split is not None
    assert not split.is_lost
    assert "1/1 nodes are silent at once" in split.message


@pytest.mark.parametrize(
    ("nodes", "fresh", "late", "text"),
    [
        (2, 0, 1, "as after an outage of the API server"),
        (8, 2, 2, "as after an outage of the API server"),
        (2, 0, 0, "no Lease of another node can be read"),
        (1, 1, 0, "1/1 nodes are silent at once"),
    ],
)
def test_loss_that_many_share_is_no_loss(nodes: int, fresh: int, late: int, text: str) -> None:
    suspicion = judge(LOST, nodes=nodes, fresh=fresh, late=late)
    assert suspicion is not None
    assert not suspicion.is_lost
    assert text in suspicion.message


@pytest.mark.parametrize(
    ("silent", "unexamined", "nodes", "is_lost"),
    [
        (1, 0, 2, True),
        (1, 1, 2, False),
        (1, 0, 3, True),
        (2, 0, 4, False),
        (3, 0, 8, True),
        (4, 0, 8, False),
        (3, 1, 8, False),
    ],
)
def test_nodes_silent_at_once_are_lost_if_a_majority_is_left(
    silent: int, unexamined: int, nodes: int, is_lost: bool
) -> None:
    pods = [
        replace(LOST, uid=f"u{index}", index=index, node=f"node-{index}", peers=(9.0, 9.0, 9.0))
        for index in range(silent)
    ]
    suspicions = judge_pods(JobEvidence(pods, nodes, 3, 0, unexamined), NOW)
    assert [suspicion.is_lost for suspicion in suspicions.values()] == [is_lost] * silent
    count = f"{silent + unexamined}/{nodes} nodes are silent at once"
    assert all((count in suspicion.message) is not is_lost for suspicion in suspicions.values())


def test_all_pods_of_a_node_are_lost_with_it() -> None:
    silent = [replace(LOST, uid=f"u{index}", index=index) for index in range(2)]
    suspicions = judge_pods(JobEvidence(silent, 2, 1, 0), NOW)
    assert [suspicion.is_lost for suspicion in suspicions.values()] == [True, True]
