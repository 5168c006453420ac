"""Planted failures: the observed state of a job, and the texts of `kubectl get`, `kubectl describe` and `ddp why`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ddp_operator.api.status import Status
from ddp_operator.decide import conditions as c
from tests.support.builders import NOW, child_job, child_pod, last_words, page
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


def finished_pod(index: int, sidecar: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pod whose training container has ended with 0; ``sidecar``: the state of its native sidecar."""
    ended = {"terminated": {"exitCode": 0, "message": msgspec.json.encode(last_words(podIndex=index)).decode()}}
    statuses = {
        "containerStatuses": [{"name": "trainer", "state": ended}],
        "initContainerStatuses": [{"name": "shipper", "state": sidecar, "restartCount": 2}],
    }
    sidecars = [{"name": "shipper", "restartPolicy": "Always"}]
    return child_pod(index, ready=False, status=statuses, spec={"initContainers": sidecars})


def starting_pod(index: int, name: str, state: Any, **members: Any) -> dict[str, Any]:
    """Return a pod that is at an init container, with its ``state``."""
    statuses = [{"name": name, "state": state, **members}]
    trainer = [{"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}]
    spec = {"initContainers": [{"name": "mesh", "restartPolicy": "Always"}]}
    status = {"initContainerStatuses": statuses, "containerStatuses": trainer}
    return child_pod(index, "Pending", node="node-a", spec=spec, status=status)


RUNS = {"running": {"startedAt": "2026-11-20T11:59:30Z"}}
CRASHED = {"terminated": {"exitCode": 3, "reason": "Error", "message": "fetching\nbucket s3://corpus not found\n"}}
FAILED_INIT = child_pod(
    0, "Failed", status={"initContainerStatuses": [{"name": "fetch", "state": CRASHED}], "containerStatuses": []}
)
INIT_CONTAINERS = {
    "waits": Planted(
        pods=tuple(starting_pod(index, "wait-db", RUNS) for index in (0, 1)),
        status=Status(attempt=1, job_name="train-1").remember(nodes=2),
        get="Pending InitContainerRunning",
        describe=("pod train-1-0-abcde (and 1 more pod) runs init container wait-db since 2026-11-20T11:59:30Z",),
        why=("kubectl logs train-1-0-abcde -c wait-db.",),
    ),
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
def test_init_container_that_keeps_pod_from_training_is_named(planted: Planted) -> None:
    check(planted)


SIDECARS = {
    name: Planted(
        pods=(finished_pod(0, state), finished_pod(1, state)),
        get="Running Finished",
        describe=("all ranks have ended with exit code 0; pod train-1-0-abcde (and 1 more pod) waits for shipper",),
        why=(
            "train has finished training for 0s but its pods have not ended: all ranks have ended",
            "a native sidecar",
        ),
        never=("NetworkPolic", "scheduled and started", "cannot read the metrics page"),
        answers={"page_requested": True, "page_lost_since": NOW - timedelta(minutes=2)},
    )
    for name, state in {
        "slow": {"running": {}},
        "crashing": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}},
    }.items()
}


def meshed_pod(container: str) -> dict[str, Any]:
    """Return a pod whose training container has ended with 0, beside an injected container."""
    pod = finished_pod(0, {"terminated": {"exitCode": 0}})
    pod["status"]["containerStatuses"].append({"name": container, "state": {"running": {}}})
    return pod


SIDECARS |= {
    f"injected {container}": Planted(
        pods=(meshed_pod(container), child_pod(1, "Succeeded", message=last_words(podIndex=1))),
        get="Running Finished",
        describe=(f"waits for {container}; an admission webhook or policy of the cluster injected {container}",),
        why=(remedy,),
    )
    for container, remedy in {
        "linkerd-proxy": "Keep it out by the annotation linkerd.io/inject: 'disabled' in spec.template.metadata",
        "filebeat": "kubectl get mutatingwebhookconfigurations,mutatingadmissionpolicies",
    }.items()
}


@pytest.mark.parametrize("planted", SIDECARS.values(), ids=SIDECARS)
def test_sidecar_that_outlives_ranks_is_named(planted: Planted) -> None:
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
            get="Failed UserError 1 steps/s 0",
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
