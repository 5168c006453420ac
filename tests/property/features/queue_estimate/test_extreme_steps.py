"""The estimate of a start behind a job that reports any numbers."""

from __future__ import annotations

from typing import Any

from hypothesis import given

from ddp_operator.api.status import Status
from ddp_operator.features.queue_estimate.cluster_queue import QueueContents, Quotas, parse_workload
from ddp_operator.features.queue_estimate.estimate import view_queue
from tests.property.test_extreme_numbers import passes, run_passes
from tests.support.builders import NOW, template, trainer
from tests.support.fuzzing import examples, tally


@examples(100)
@given(passes())
def test_start_is_estimated_behind_extreme_numbers(case: tuple[Any, list[Any], list[str], list[float]]) -> None:
    estimate(run_passes(case))
    tally("estimate behind extreme numbers")


def estimate(status: Status) -> None:
    """Estimate the start of a Workload behind a job with this status."""
    reserved = {"type": "QuotaReserved", "status": "True", "lastTransitionTime": "2026-11-20T11:00:00Z"}
    running = {
        "metadata": {"uid": "running", "namespace": "a", "creationTimestamp": "2026-11-20T10:00:00Z"},
        "spec": {"queueName": "q", "podSets": [{"count": 2, "template": template(trainer())}]},
        "status": {
            "conditions": [reserved],
            "admission": {"clusterQueue": "gpu", "podSetAssignments": [{"flavors": {"cpu": "a"}, "resourceUsage": {}}]},
        },
    }
    waiting = {**running, "metadata": {**running["metadata"], "uid": "waiting"}, "status": {}}
    workloads = [parse_workload(running), parse_workload(waiting)]
    ended = {"type": "Finished", "status": "True", "lastTransitionTime": "2026-11-20T11:30:00Z"}
    for number in range(8):
        item = {**running, "metadata": {**running["metadata"], "uid": f"ended-{number}"}}
        workloads.append(parse_workload({**item, "status": {**running["status"], "conditions": [reserved, ended]}}))
    training = {"running": status, "ended-0": status}
    contents = QueueContents("gpu", workloads, training, NOW)
    flavor = {"name": "a", "resources": [{"name": "pods", "nominalQuota": "2"}]}
    quotas = Quotas({"spec": {"resourceGroups": [{"flavors": [flavor]}]}})
    view_queue(contents, quotas).place("waiting", None)
