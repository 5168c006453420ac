"""What users read about a pod that does not start."""

from ddp_operator.api.status import Status
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.waiting import FEATURE
from tests.support.builders import child_pod
from tests.support.planted_states import Planted, check

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
    check(planted, Hooks((FEATURE,)))
