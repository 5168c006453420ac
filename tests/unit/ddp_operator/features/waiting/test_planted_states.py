"""What users read about a pod that does not start, or does not end."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from ddp_operator.api.status import Status
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.waiting import FEATURE
from tests.support.builders import NOW, child_pod, last_words
from tests.support.planted_states import Planted, check

HOOKS = Hooks((FEATURE,))
CRASHED = {"terminated": {"exitCode": 3, "reason": "Error", "message": "fetching\nbucket s3://corpus not found\n"}}


def test_sidecar_that_crashes_is_named_with_its_last_words() -> None:
    state = {"name": "mesh", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": CRASHED}
    status = {
        "initContainerStatuses": [state],
        "containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}],
    }
    spec = {"initContainers": [{"name": "mesh", "restartPolicy": "Always"}]}
    planted = Planted(
        pods=(child_pod(0), child_pod(1, "Pending", node="node-a", spec=spec, status=status)),
        status=Status(attempt=1, job_name="train-1").remember(nodes=2),
        get="Pending PodsNotStarting",
        describe=("CrashLoopBackOff: init container mesh: exit code 3: bucket s3://corpus not found",),
        why=("-c mesh --previous",),
    )
    check(planted, HOOKS)


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


def test_init_container_that_keeps_pod_from_training_is_named() -> None:
    planted = Planted(
        pods=tuple(starting_pod(index, "wait-db", RUNS) for index in (0, 1)),
        status=Status(attempt=1, job_name="train-1").remember(nodes=2),
        get="Pending InitContainerRunning",
        describe=("pod train-1-0-abcde (and 1 more pod) runs init container wait-db since 2026-11-20T11:59:30Z",),
        why=("kubectl logs train-1-0-abcde -c wait-db.",),
    )
    check(planted, HOOKS)


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
    check(planted, HOOKS)
