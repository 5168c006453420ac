"""Planted failures: the observed state of a job, and the texts of `kubectl get`, `kubectl describe` and `ddp why`."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api.status import Status
from ddp_operator.decide import conditions as c
from tests.support.builders import child_job, child_pod, last_words, page
from tests.support.planted_states import JOINING, PODS, TRAINING, Planted, check, condition, settle


def failed_pod(index: int = 0, category: str = "Network", code: int = 82, **changes: Any) -> dict[str, Any]:
    return child_pod(index, "Failed", code=code, message=last_words(category, podIndex=index, **changes))


def evicted_pod(volume: str, limit: str) -> dict[str, Any]:
    message = f'Usage of EmptyDir volume "{volume}" exceeds the limit "{limit}". '
    return child_pod(0, "Failed", code=137, status={"reason": "Evicted", "message": message})


TAKEN_PORT = "cannot serve the rendezvous on port 29400: address already in use"
RESTARTS = {
    "taken rendezvous port": Planted(
        pods=(failed_pod(message=TAKEN_PORT, remedy="free the port"), child_pod(1)),
        get="Restarting Network",
        describe=(f"restart 1 of 3: Network (rank 0): {TAKEN_PORT}",),
        why=(TAKEN_PORT, "Free the port. Training restarts automatically, from the checkpoint of step 30."),
        never=("no action needed",),
    ),
    "step after the last page": Planted(
        pods=(child_pod(0), failed_pod(1, "CUDAError", message="illegal memory access", step=47)),
        get="Restarting CUDAError 47.0%",
        describe=("illegal memory access",),
        why=("illegal memory access", "from the checkpoint of step 30"),
    ),
    "emptyDir limit": Planted(
        pods=(evicted_pod("cache", "1Gi"), child_pod(1)),
        get="Restarting Unknown",
        describe=('Evicted: Usage of EmptyDir volume "cache" exceeds the limit "1Gi"',),
        why=("Raise sizeLimit of the emptyDir cache in spec.template (it is 1Gi)",),
        never=("no action needed",),
    ),
}


@pytest.mark.parametrize("planted", RESTARTS.values(), ids=RESTARTS)
def test_restart_after_known_fault_names_remedy(planted: Planted) -> None:
    check(planted)


CRASHED = {"terminated": {"exitCode": 3, "reason": "Error", "message": "fetching\nbucket s3://corpus not found\n"}}
FAILED_INIT = child_pod(
    0, "Failed", status={"initContainerStatuses": [{"name": "fetch", "state": CRASHED}], "containerStatuses": []}
)
INIT_CONTAINERS = {
    "fails": Planted(
        pods=(FAILED_INIT, child_pod(1)),
        jobs=(child_job(conditions={"Failed": "no"}),),
        status=Status(attempt=1, job_name="train-1").remember(nodes=2),
        get="Restarting Unknown",
        describe=("init container fetch, node node-a): bucket s3://corpus not found",),
        why=("init container fetch", "kubectl logs train-1-0-abcde -c fetch"),
        never=("fetching",),
    ),
}


@pytest.mark.parametrize("planted", INIT_CONTAINERS.values(), ids=INIT_CONTAINERS)
def test_init_container_that_fails_is_named(planted: Planted) -> None:
    check(planted)


NETWORK = {
    "taken metrics port": Planted(
        pods=PODS,
        page="dcgm_fi_dev_gpu_temp 40\n",
        status=JOINING,
        get="Running NoMetricsPage",
        describe=("another program uses its metrics port",),
        why=("Set spec.metrics.port to a port that no other container of the pod uses",),
        never=("NetworkPolic",),
    ),
}


@pytest.mark.parametrize("planted", NETWORK.values(), ids=NETWORK)
def test_pods_that_do_not_reach_each_other_are_named(planted: Planted) -> None:
    check(planted)


JOINED = condition(c.RENDEZVOUSED, "True", c.ALL_RANKS_JOINED, age=50)
RECENTLY_JOINED = replace(TRAINING, conditions=(*TRAINING.conditions[:3], JOINED, *TRAINING.conditions[4:]))
VICTIM = last_words("Network", secondary=True, restarts=1)
COUNTS = {
    "victim counts a restart that its peer prevents": (
        Planted(
            pods=(
                child_pod(0, "Failed", code=86, message=VICTIM),
                failed_pod(1, "UserError", code=81, message="KeyError: 10", restarts=0),
            ),
            get="Failed UserError 0",
            describe=("KeyError: 10",),
            why=("KeyError: 10",),
            never=("in the same pods",),
        ),
        0,
    ),
    "pod deleted while no operator watched": (
        Planted(
            pods=(child_pod(0, age=3000), child_pod(1, suffix="fghij", age=20)),
            page=page(phase="Running", restarts=1, step=48, steps=2),
            status=RECENTLY_JOINED,
            get="Running",
            describe=("lost pod replaced, not counted", "the pod before train-1-1-fghij was lost"),
            why=("It was restarted once", "the pod before train-1-1-fghij was lost"),
            never=("in the same pods",),
        ),
        1,
    ),
}


@pytest.mark.parametrize(("planted", "restarts"), COUNTS.values(), ids=COUNTS)
def test_interruption_is_counted_once(planted: Planted, restarts: int) -> None:
    check(planted)
    status, _ = settle(planted)
    assert status.counts.all == restarts
