"""Planted states of jobs whose pods do not reach each other, or that make no steps, and the texts about them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api.status import RestartCounts
from ddp_operator.decide import conditions as c
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features import stalls
from ddp_operator.features.stalls.peers import UnreachableReport
from ddp_operator.features.stalls.reading import StallReading
from ddp_operator.features.stalls.stall import ObservedStall
from tests.support.builders import NOW, child_pod, page
from tests.support.decisions import STARTED, read_condition, run_pass
from tests.support.planted_states import JOINING, PODS, Planted, check, condition, settle

HOOKS = Hooks((stalls.FEATURE,))
NO_NAME = "cannot reach pod 0 at train-1-0.train: name does not resolve yet"
WRONG_ADDRESS = "cannot reach pod 0 at train-1-0.train:29400: no connection to 192.0.2.99: timed out"
SILENT_PEER = "10.0.0.2 does not acknowledge data"


def observed(**values: Any) -> dict[str, Any]:
    return {"observed": {"stalls": StallReading(**values)}}


STATES = {
    "DNS at the start": Planted(
        pods=PODS,
        page=page(phase="WaitingForMaster"),
        status=JOINING,
        answers=observed(unreachable=(UnreachableReport(0, NO_NAME),)),
        get="Running PeerUnreachable",
        describe=(f"PeerUnreachable: pod 0 reports: {NO_NAME}",),
        why=(NO_NAME, "Check the cluster's DNS"),
        never=("Loading PyTorch",),
    ),
    "another address for pod 0": Planted(
        pods=PODS,
        page=page(phase="Rendezvous"),
        status=JOINING,
        answers=observed(unreachable=(UnreachableReport(1, WRONG_ADDRESS),)),
        get="Running PeerUnreachable",
        describe=(f"{WRONG_ADDRESS} (pod 0 has the address 10.0.0.1)",),
        why=("The name of pod 0 resolves to another address: remove it from hostAliases",),
        never=("NetworkPolic",),
    ),
    "partition while training": Planted(
        pods=PODS,
        page=page(phase="Running", step=47, heartbeat_age=8),
        answers=observed(unreachable=(UnreachableReport(0, SILENT_PEER),)),
        get="Running PeerUnreachable",
        describe=(f"PeerUnreachable: pod 0 reports: {SILENT_PEER} (pod 1)",),
        why=(f"{SILENT_PEER} (pod 1)", "Check the network between these pods"),
        never=("training is making progress", "1m00s", "steps/s"),
    ),
    "stall": Planted(
        pods=PODS,
        page=page(phase="Running", step=47, total_steps=100, heartbeat_age=200),
        answers=observed(stall=ObservedStall(NOW - timedelta(seconds=200))),
        get="Running Stalled",
        describe=("no step since 2026-11-20T11:56:40Z",),
        why=("train is running without a step for 0s after step 47 of 100 (Stalled)",),
        never=("1m00s", "steps/s"),
    ),
}


@pytest.mark.parametrize("planted", STATES.values(), ids=STATES)
def test_pods_that_do_not_reach_each_other_are_named(planted: Planted) -> None:
    check(planted, HOOKS)


@pytest.mark.parametrize(("age", "reason"), [(8, c.TRAINING), (20, c.PEER_UNREACHABLE)])
def test_server_outside_the_job_counts_only_without_steps(age: int, reason: str) -> None:
    text = page(phase="Running", step=47, heartbeat_age=age)
    reports = (UnreachableReport(0, "192.0.2.7 does not acknowledge data"),)
    status, _ = settle(Planted(PODS, "", (), (), page=text, answers=observed(unreachable=reports)), HOOKS)
    progressing = status.condition(c.PROGRESSING)
    assert progressing is not None
    assert progressing.reason == reason


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("10.0.0.9 does not acknowledge data", c.WAITING_FOR_WORKERS),
        ("10.0.0.1 does not acknowledge data", c.PEER_UNREACHABLE),
        ("cannot reach pod 0 (train-1-0): timed out", c.PEER_UNREACHABLE),
    ],
    ids=["lost pod", "pod of the job", "pod 0"],
)
def test_address_of_lost_pod_is_no_unreachable_peer_of_its_successor(message: str, reason: str) -> None:
    joined = condition(c.RENDEZVOUSED, "True", c.ALL_RANKS_JOINED)
    replacing = condition(c.RESTARTING, "True", c.POD_REPLACEMENT)
    status = replace(STARTED, conditions=(joined, replacing)).remember(restarts=RestartCounts(replaced=1))
    seen = observed(unreachable=(UnreachableReport(0, message),))
    joining = page(phase="Rendezvous", restarts=1)
    pods = (child_pod(0), child_pod(1, suffix="r1"))
    decision = run_pass(*pods, status=status, text=joining, observed=seen, hooks=HOOKS)
    assert read_condition(decision, c.RENDEZVOUSED).reason == reason
