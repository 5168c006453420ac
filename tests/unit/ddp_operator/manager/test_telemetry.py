"""The operator's own series: the effect of a status change, the counts of the fleet, and bounded labels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from ddp_operator.api.cluster_errors import ClusterError, VersionConflict
from ddp_operator.api.faults import contain
from ddp_operator.api.status import Condition, LastFailure, Progress, RestartCounts, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import doubts
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
IN_PLACE = RUNNING.remember(restarts=RestartCounts(in_place=2))
REPLACED = RUNNING.remember(restarts=RestartCounts(replaced=1))
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


WAITING = (
    resource("a", "Pending", (c.SCHEDULED, "False", c.UNSCHEDULABLE)),
    resource("a", "Pending", (c.SCHEDULED, "False", "SomethingNew")),
    resource("a", "Running", (c.SCHEDULED, "True", c.ALL_PODS_SCHEDULED)),
    resource("a", "Failed", (c.SCHEDULED, "False", c.UNSCHEDULABLE)),  # finished: no process waits any more
)
GOODPUTS = tuple(
    msgspec.json.encode({"metadata": {"namespace": namespace}, "status": {"phase": phase, "goodput": goodput}})
    for namespace, phase, goodput in (
        ("a", "Running", "0.9"), ("a", "Restarting", "0.3"), ("a", "Running", None), ("a", "Succeeded", "0.1"),
        ("b", "Running", "nan"), ("c", "Pending", None),
    )
)  # fmt: skip
OWN = b'{"metadata":{"namespace":"a"},"spec":{"managedBy":"ddp-operator.dev/ddp-operator"}}'
FOREIGN = b'{"metadata":{"namespace":"a"},"spec":{"managedBy":"kueue.x-k8s.io/multikueue"}}'
OTHER_VERSION = b'{"metadata":{"namespace":"a"},"status":{"phase":7}}'


def accepted(phase: str, status: str) -> tuple[bytes]:
    return (resource("a", phase, (c.ACCEPTED, status, c.FORBIDDEN)),)


@pytest.mark.parametrize(
    ("bodies", "name", "labels", "value"),
    [
        ([resource("a", "Running")] * 2 + [resource("b", "Failed")], "jobs", "a phase=Running", 2),
        ([resource("a", "Running"), resource("b", "Failed")], "jobs", "b phase=Failed", 1),
        ([resource("a", "Running"), resource("b", "Failed")], "jobs", "a phase=Failed", None),
        ([OWN, FOREIGN], "jobs", "a phase=Pending", 1),
        ([resource("a", None), resource("a", "Frobnicating")], "jobs", "a phase=Pending", 2),
        ([OTHER_VERSION], "jobs", " phase=Pending", 1),
        (WAITING, "waiting_jobs", "a reason=Unschedulable", 1),
        (WAITING, "waiting_jobs", "a reason=Other", 1),
        (WAITING, "waiting_jobs", "a reason=NotAccepted", None),
        (WAITING, "nodes", "a state=desired", 12),
        (WAITING, "nodes", "a state=ready", 3),
        (accepted("Restarting", "False"), "waiting_jobs", "a reason=NotAccepted", 1),
        (accepted("Pending", "Unknown"), "waiting_jobs", "a reason=NotAccepted", 1),
        (accepted("Running", "True"), "waiting_jobs", "a reason=NotAccepted", None),
        (accepted("Rejected", "False"), "waiting_jobs", "a reason=NotAccepted", None),
        (GOODPUTS, "goodput_ratio", "a of=mean", pytest.approx(0.6)),
        (GOODPUTS, "goodput_ratio", "a of=lowest", pytest.approx(0.3)),
        (GOODPUTS, "goodput_ratio", "b of=mean", 0),
        (GOODPUTS, "goodput_ratio", "c of=mean", None),
    ],
)
def test_resources_are_counted(bodies: Sequence[bytes], name: str, labels: str, value: Any) -> None:
    namespace, label, label_value = re.split("[ =]", labels)
    registry = OperatorMetrics(lambda: 0.0, lambda: bodies).registry
    sample = registry.get_sample_value(f"ddp_operator_{name}", {"namespace": namespace, label: label_value})
    assert sample == value


class TestMetrics:
    def test_transitions_are_counted(self) -> None:
        metrics = OperatorMetrics(lambda: 0.0)
        for mark in (Failed("OOM"), Restarted("group", "OOM", 2), Reached("first_step", 3.0), Ended("Failed"), USED):
            metrics.on_transition("team", mark)
        metrics.on_transition("team", Doubted(doubts.NO_STEP))
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


def test_contained_faults_are_counted_by_part() -> None:
    before = OperatorMetrics(lambda: 0.0).registry.get_sample_value("ddp_operator_faults_total", {"part": "Workload"})
    with contain("Workload", "team/x"):
        raise TypeError
    after = OperatorMetrics(lambda: 0.0).registry.get_sample_value("ddp_operator_faults_total", {"part": "Workload"})
    assert after == (before or 0) + 1
