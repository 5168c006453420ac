"""The operator's own series: the effect of a status change, the counts of the fleet, and bounded labels."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from ddp_operator.api.cluster import ClusterError, VersionConflict
from ddp_operator.api.status import Condition, LastFailure, Progress, Restarts, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.transitions import (
    Doubted,
    Ended,
    Failed,
    NodeFailed,
    Reached,
    Restarted,
    Transition,
    Used,
    find_transitions,
)
from ddp_operator.manager.telemetry import MAX_NODE_LABELS, OperatorMetrics
from ddp_pod.contract.failure_table import CATEGORIES
from docs.pages.tables import list_operator_series
from tests.support.builders import NOW

RUNNING = Status(phase="Running", attempt=1, start_time=NOW)


def condition(kind: str, reason: str = "R", status: Any = "True") -> Condition:
    return Condition(type=kind, status=status, reason=reason, last_transition_time=NOW)


def change(status: Status, **fields: Any) -> Status:
    return msgspec.structs.replace(status, **fields)


OOM = LastFailure(attempt=1, category="OOM")
USED = Used("OOM", 40, "h100")


JOINED = change(RUNNING, conditions=(condition(c.RENDEZVOUSED),))
FAILED_JOB = change(RUNNING, last_failure=OOM, conditions=(condition(c.FAILED),))
IN_PLACE = change(RUNNING, restarts=Restarts(in_place=2))
REPLACED = change(RUNNING, restarts=Restarts(replaced=1))
STEPPED = change(JOINED, progress=Progress(step=1))
TRANSITIONS: list[tuple[Status, Status, tuple[Transition, ...]]] = [
    (RUNNING, RUNNING, ()),
    (Status(), RUNNING, ()),
    (RUNNING, change(RUNNING, attempt=2, last_failure=OOM), (Failed("OOM"), Restarted("group", "OOM"))),
    (change(RUNNING, last_failure=OOM), change(RUNNING, last_failure=OOM, attempt=2), (Restarted("group", "None"),)),
    (RUNNING, IN_PLACE, (Restarted("process", "Unknown", 2),)),
    (IN_PLACE, change(RUNNING, attempt=2), (Restarted("group", "None"),)),
    (RUNNING, REPLACED, (Restarted("pod", "Unknown"),)),
    (REPLACED, change(REPLACED, phase="Pending"), ()),
    (RUNNING, FAILED_JOB, (Failed("OOM"), Ended("Failed"))),
    (FAILED_JOB, change(FAILED_JOB, phase="Failed"), ()),
    (RUNNING, change(RUNNING, conditions=(condition(c.SUCCEEDED),)), (Ended("Succeeded"),)),
    (RUNNING, JOINED, (Reached("rendezvous", 7.0),)),
    (JOINED, STEPPED, (Reached("first_step", 7.0),)),
    (STEPPED, change(STEPPED, progress=Progress(step=2)), ()),
    (change(RUNNING, attempt=2), change(JOINED, attempt=2), ()),
    (RUNNING, change(RUNNING, last_failure=LastFailure(attempt=1, category="Gremlins")), (Failed("Unknown"),)),
]


@pytest.mark.parametrize(("old", "new", "expected"), TRANSITIONS)
def test_change_of_status_is_counted_once(old: Status, new: Status, expected: tuple[Transition, ...]) -> None:
    assert find_transitions(old, new, NOW + timedelta(seconds=7)) == expected


def resource(namespace: str, phase: str | None, *conditions: tuple[str, str, str]) -> bytes:
    listed = [{"type": kind, "status": status, "reason": reason, "more": 1} for kind, status, reason in conditions]
    status: dict[str, Any] = {"conditions": listed, "nodes": {"desired": 4, "ready": 1}}
    return msgspec.json.encode(
        {"metadata": {"namespace": namespace, "name": "x"}, "status": status | ({"phase": phase} if phase else {})}
    )


class TestFleet:
    def value(self, name: str, bodies: list[bytes], **labels: str) -> float | None:
        sample_value: float | None = OperatorMetrics(lambda: 0.0, lambda: bodies).registry.get_sample_value(
            name, labels
        )
        return sample_value

    def test_job_of_foreign_manager_is_not_counted(self) -> None:
        own = b'{"metadata":{"namespace":"a"},"spec":{"managedBy":"ddp-operator.dev/ddp-operator"}}'
        foreign = b'{"metadata":{"namespace":"a"},"spec":{"managedBy":"kueue.x-k8s.io/multikueue"}}'
        assert self.value("ddp_operator_jobs", [own, foreign], namespace="a", phase="Pending") == 1

    @pytest.mark.parametrize("phase", [None, "Frobnicating"])
    def test_phase_that_is_not_known_is_pending(self, phase: str | None) -> None:
        assert self.value("ddp_operator_jobs", [resource("a", phase)], namespace="a", phase="Pending") == 1

    def test_waiting_jobs_have_known_reason_or_other(self) -> None:
        bodies = [
            resource("a", "Pending", (c.SCHEDULED, "False", c.UNSCHEDULABLE)),
            resource("a", "Pending", (c.SCHEDULED, "False", "SomethingNew")),
            resource("a", "Running", (c.SCHEDULED, "True", c.ALL_PODS_SCHEDULED)),
            resource("a", "Failed", (c.SCHEDULED, "False", c.UNSCHEDULABLE)),  # finished: no process waits any more
        ]
        assert self.value("ddp_operator_waiting_jobs", bodies, namespace="a", reason="Unschedulable") == 1
        assert self.value("ddp_operator_waiting_jobs", bodies, namespace="a", reason="Other") == 1
        assert self.value("ddp_operator_waiting_jobs", bodies, namespace="a", reason="NotAccepted") is None

    @pytest.mark.parametrize(
        ("phase", "accepted", "count"),
        [("Restarting", "False", 1), ("Pending", "Unknown", 1), ("Running", "True", None), ("Rejected", "False", None)],
    )
    def test_refused_started_job_counts_as_waiting(self, phase: str, accepted: str, count: int) -> None:
        bodies = [resource("a", phase, (c.ACCEPTED, accepted, c.FORBIDDEN))]
        assert self.value("ddp_operator_waiting_jobs", bodies, namespace="a", reason="NotAccepted") == count

    def test_nodes_are_counted(self) -> None:
        bodies = [
            resource("a", "Pending", (c.SCHEDULED, "False", c.UNSCHEDULABLE)),
            resource("a", "Pending", (c.SCHEDULED, "False", "SomethingNew")),
            resource("a", "Running", (c.SCHEDULED, "True", c.ALL_PODS_SCHEDULED)),
            resource("a", "Failed", (c.SCHEDULED, "False", c.UNSCHEDULABLE)),
        ]
        assert self.value("ddp_operator_nodes", bodies, namespace="a", state="desired") == 12
        assert self.value("ddp_operator_nodes", bodies, namespace="a", state="ready") == 3

    def test_goodput_is_aggregated_for_each_namespace(self) -> None:
        def job(namespace: str, phase: str, goodput: str | None) -> bytes:
            status = {"phase": phase} | ({} if goodput is None else {"goodput": goodput})
            return msgspec.json.encode({"metadata": {"namespace": namespace}, "status": status})

        bodies = [
            job("a", "Running", "0.9"), job("a", "Restarting", "0.3"), job("a", "Running", None),
            job("a", "Succeeded", "0.1"), job("b", "Running", "nan"), job("c", "Pending", None),
        ]  # fmt: skip
        name = "ddp_operator_goodput_ratio"
        assert self.value(name, bodies, namespace="a", of="mean") == pytest.approx(0.6)
        assert self.value(name, bodies, namespace="a", of="lowest") == pytest.approx(0.3)
        assert self.value(name, bodies, namespace="b", of="mean") == 0
        assert self.value(name, bodies, namespace="c", of="mean") is None


class TestMetrics:
    def test_transitions_are_counted(self) -> None:
        metrics = OperatorMetrics(lambda: 0.0)
        for mark in (Failed("OOM"), Restarted("group", "OOM", 2), Reached("first_step", 3.0), Ended("Failed"), USED):
            metrics.on_transition("team", mark)
        metrics.on_transition("team", Doubted(c.NO_STEP))
        get = metrics.registry.get_sample_value
        assert get("ddp_operator_doubtful_successes_total", {"reason": "NoStep"}) == 1
        assert get("ddp_operator_failures_total", {"category": "OOM"}) == 1
        assert get("ddp_operator_restarts_total", {"level": "group", "category": "OOM"}) == 2
        assert get("ddp_operator_start_to_stage_duration_seconds_sum", {"stage": "first_step"}) == 3
        assert get("ddp_operator_finished_jobs_total", {"result": "Failed"}) == 1
        assert get("ddp_operator_gpu_seconds_total", {"namespace": "team", "profile": "h100", "purpose": "OOM"}) == 40

    @pytest.mark.parametrize(
        ("error", "cause"), [(VersionConflict(), "Conflict"), (ClusterError(), "Cluster"), (KeyError(), "Bug")]
    )
    def test_errors_have_cause(self, error: Exception, cause: str) -> None:
        metrics = OperatorMetrics(lambda: 0.0)
        metrics.on_reconcile(0.1, error)
        assert metrics.registry.get_sample_value("ddp_operator_reconcile_errors_total", {"cause": cause}) == 1

    def test_known_series_start_at_zero(self) -> None:
        get = OperatorMetrics(lambda: 0.0).registry.get_sample_value
        assert {get("ddp_operator_failures_total", {"category": category}) for category in CATEGORIES} == {0}
        assert get("ddp_operator_restarts_total", {"level": "pod", "category": "None"}) == 0


def test_page_names_every_series() -> None:
    page = "\n".join(list_operator_series())
    for family in OperatorMetrics(lambda: 0.0).registry.collect():
        assert family.name in page or family.name.startswith("process_")


def test_node_labels_are_bounded() -> None:
    metrics = OperatorMetrics(lambda: 0.0)
    for number in range(MAX_NODE_LABELS + 5):
        metrics.on_transition("team", NodeFailed(f"n{number}"))
    samples = [sample for family in metrics.node_failures.collect() for sample in family.samples]
    assert len(samples) == MAX_NODE_LABELS + 1
    assert {sample.labels["node"]: sample.value for sample in samples}["Other"] == 5
