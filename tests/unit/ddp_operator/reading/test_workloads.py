"""Why Kueue does not admit a Job, from messages of versions 0.13 and 0.19, observed or read in their source."""

from typing import Any

import pytest

from ddp_operator.decide.state import Problem
from ddp_operator.reading.workloads import explain_waiting
from tests.support.builders import child_job

QUEUED = child_job(suspend=True, queue="gpu", written=False)
NEEDS = "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor a, 200m more needed"
TOO_MUCH = (
    "couldn't assign flavors to pod set main: insufficient quota for cpu in flavor a, "
    "request > maximum capacity (300m > 200m)"
)


def condition(kind: str, reason: str, message: str = "", status: str = "True") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def workload(
    reason: str = "",
    message: str = "",
    *more: Any,
    status: str = "False",
    checks: Any = (),
    again: str = "",
    **spec: Any,
) -> Any:
    reserved = [condition("QuotaReserved", reason, message, status)] if reason else []
    return {
        "metadata": {"name": "job-train-1-0a1b2", "creationTimestamp": "2026-11-20T10:00:00Z"},
        "spec": {"queueName": "gpu", **spec},
        "status": {
            "conditions": [*reserved, *more],
            "admissionChecks": [dict(zip(("name", "state", "message"), check, strict=False)) for check in checks],
            "requeueState": {"count": 1, "requeueAt": again} if again else None,
        },
    }


def queue(*active: str, **spec: str) -> Any:
    """Return the LocalQueue gpu: reason of its condition Active, where that is False."""
    conditions = [condition("Active", reason, "words", "False") for reason in active] or [condition("Active", "Ready")]
    return {
        "metadata": {"name": "gpu"},
        "spec": {"clusterQueue": "all", **spec},
        "status": {"conditions": conditions},
    }


class TestWorkload:
    @pytest.mark.parametrize(
        ("result", "text"),
        [
            (workload("Pending", NEEDS), ("QuotaPending", NEEDS)),
            (workload("WaitingForQuota", NEEDS), ("QuotaPending", NEEDS)),
            (
                workload("Waiting", "waiting for all admitted workloads"),
                ("QuotaPending", "waiting for all admitted workloads"),
            ),
            (workload("TopologyPlacementFailed", "fits 1 of 2"), ("QuotaPending", "fits 1 of 2")),
            # No quota starts these.
            (workload("Pending", TOO_MUCH), ("Inadmissible", TOO_MUCH)),
            (workload("ExceedsMaxQuota", TOO_MUCH), ("Inadmissible", TOO_MUCH)),
            (workload("NoMatchingFlavor", "untolerated taint"), ("Inadmissible", "untolerated taint")),
            (
                workload("Pending", "couldn't assign flavors to pod set main: flavor a doesn't match node affinity"),
                ("Inadmissible", "couldn't assign flavors to pod set main: flavor a doesn't match node affinity"),
            ),
            # These may start with fewer pods, for which there will be quota.
            (
                workload("Pending", TOO_MUCH, podSets=[{"count": 3, "minCount": 2}]),
                ("QuotaPending", f"insufficient quota for the minimum of 2 pods; for all pods: {TOO_MUCH}"),
            ),
            # Too much for one flavor; another one will have quota.
            (workload("Pending", f"{TOO_MUCH}, {NEEDS}"), ("QuotaPending", f"{TOO_MUCH}, {NEEDS}")),
            (
                workload("Inadmissible", "LocalQueue gpu doesn't exist"),
                ("Inadmissible", "LocalQueue gpu doesn't exist"),
            ),
            (
                workload("Misconfigured", "LocalQueue gpu doesn't exist"),
                ("Inadmissible", "LocalQueue gpu doesn't exist"),
            ),
            (workload("Suspended", "ClusterQueue all is stopped"), ("QueueStopped", "ClusterQueue all is stopped")),
            (
                workload("Inadmissible", "LocalQueue  doesn't exist", queueName=""),
                ("Inadmissible", "the Job names no LocalQueue, and the namespace has no LocalQueue named default"),
            ),
            (
                workload("Pending", "The workload is deactivated", active=False),
                ("WorkloadDeactivated", "Workload job-train-1-0a1b2 is deactivated (spec.active is false)"),
            ),
            (
                workload(
                    "Pending",
                    "x",
                    condition(
                        "Evicted", "Deactivated", "The workload is deactivated due to exceeding the maximum time"
                    ),
                    active=False,
                ),
                (
                    "WorkloadDeactivated",
                    "Workload job-train-1-0a1b2 is deactivated (spec.active is false): "
                    "The workload is deactivated due to exceeding the maximum time",
                ),
            ),
            (
                workload("QuotaReserved", status="True", checks=[("a", "Ready"), ("b", "Pending", "no machine yet")]),
                ("QuotaPending", "quota is reserved; waiting for admission check b (no machine yet)"),
            ),
            # Evicted: while its pods end, until its back-off ends, and when it waits again.
            (
                workload("QuotaReserved", "", condition("Evicted", "Preempted", "Preempted for 1"), status="True"),
                ("QuotaPending", "Preempted for 1; waiting for its pods to terminate"),
            ),
            (
                workload(
                    "Pending",
                    "x",
                    condition("Evicted", "PodsReadyTimeout", "Pods were not ready"),
                    again="2026-11-20T11:00:00Z",
                ),
                ("QuotaPending", "Pods were not ready; requeued at 2026-11-20T11:00:00Z"),
            ),
            (
                workload("Pending", NEEDS, condition("Evicted", "Preempted", "Preempted for 1")),
                ("QuotaPending", f"{NEEDS}; evicted (Preempted)"),
            ),
            (
                workload("Pending", NEEDS, condition("Evicted", "QuotaReserved", "Previously: x", "False")),
                ("QuotaPending", NEEDS),
            ),
            (workload("", "", condition("Evicted", "Preempted")), ("QuotaPending", "evicted (Preempted)")),
            (
                workload("Pending", "x", condition("Finished", "OutOfSync", "not the Job's")),
                ("WorkloadFinished", "Workload job-train-1-0a1b2 is finished (OutOfSync: not the Job's)"),
            ),
        ],
    )
    def test_workload_conditions_give_reason_and_message(self, result: Any, text: tuple[str, str]) -> None:
        assert explain_waiting(QUEUED, [result]) == Problem(*text)

    def test_new_or_admitted_workload_has_no_problem(self) -> None:
        assert explain_waiting(QUEUED, [workload()]) is None
        assert explain_waiting(QUEUED, [workload("QuotaReserved", status="True", checks=[("a", "Ready")])]) is None

    def test_missing_workload_names_priority_class(self) -> None:
        job = child_job(suspend=True, queue="gpu", written=False)
        words = "Kueue has created no Workload for it; "
        assert explain_waiting(job, []) == Problem("WorkloadMissing", f"{words}check that Kueue is running")
        job["spec"]["template"] = {"spec": {"priorityClassName": "fast"}}
        asks = "check that PriorityClass fast exists and that Kueue is running"
        assert explain_waiting(job, []) == Problem("WorkloadMissing", words + asks)
        job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "high"
        asks = "check that WorkloadPriorityClass high exists and that Kueue is running"
        assert explain_waiting(job, []) == Problem("WorkloadMissing", words + asks)
        assert explain_waiting(child_job(suspend=True, written=False), []) is None, "it may have been suspended by hand"

    def test_newest_unfinished_workload_is_read(self) -> None:
        """An elastic Job has one for each size."""

        def one(created: str, message: str, *more: Any) -> Any:
            result = workload("Pending", message, *more)
            return result | {"metadata": {"name": message, "creationTimestamp": created}}

        old = one("2026-11-20T10:00:00Z", "old")
        new = one("2026-11-20T11:00:00Z", "new")
        ended = one("2026-11-20T12:00:00Z", "ended", condition("Finished", "WorkloadSliceReplaced", "x"))
        for result in ((old, new, ended), (ended, new, old)):
            assert explain_waiting(QUEUED, result) == Problem("QuotaPending", "new")


class TestQueue:
    """Kueue 0.13 reports a hold in the Workload half a minute later, or when it processes it for another reason."""

    @pytest.mark.parametrize(
        ("result", "reason", "why"),
        [
            (queue(stopPolicy="Hold"), "QueueStopped", "LocalQueue gpu is stopped (spec.stopPolicy is Hold)"),
            (
                queue("ClusterQueueIsInactive", stopPolicy="None"),
                "QueueStopped",
                "ClusterQueue all of LocalQueue gpu is not active: it is stopped, or a flavor or "
                "admission check that it names is missing",
            ),
            (queue("ClusterQueueDoesNotExist"), "Inadmissible", "ClusterQueue all of LocalQueue gpu does not exist"),
        ],
    )
    def test_stopped_queue_overrides_workload_reason(self, result: Any, reason: str, why: str) -> None:
        assert explain_waiting(QUEUED, [workload("Pending", NEEDS)], result) == Problem(reason, why)
        evicted = workload("Pending", NEEDS, condition("Evicted", "ClusterQueueStopped", "The ClusterQueue is stopped"))
        after = Problem(reason, f"{why}; evicted (ClusterQueueStopped)")
        assert explain_waiting(QUEUED, [evicted], result) == after
        reserved = workload("QuotaReserved", status="True", checks=[("b", "Pending")])
        assert explain_waiting(QUEUED, [reserved], result) == explain_waiting(QUEUED, [reserved]), (
            "it was admitted before"
        )

    def test_active_queue_ignores_outdated_workload_message(self) -> None:
        stale = workload("Inadmissible", "ClusterQueue all is inactive")
        assert explain_waiting(QUEUED, [stale], queue()) is None
        assert explain_waiting(QUEUED, [stale]) == Problem("QueueStopped", "ClusterQueue all is inactive"), "unread"
        assert explain_waiting(QUEUED, [workload("Pending", NEEDS)], queue()) == Problem("QuotaPending", NEEDS)
