"""The report of a node that fails several jobs."""

from __future__ import annotations

from ddp_operator.api.cluster import Event
from ddp_operator.kube.events import build_event
from ddp_operator.manager.reports import MAX_NAMESPACES, MAX_REPORTED_NODES, REPORT_PERIOD, NodeReports
from tests.support.builders import NOW


def test_node_reports_are_bounded_and_forgotten_after_day() -> None:
    reports = NodeReports()
    for number in range(3 * MAX_REPORTED_NODES):
        assert not reports.add(f"n{number}", "x", NOW)
    assert len(reports) == MAX_REPORTED_NODES
    assert not reports.add("n0", "y", NOW), "it was forgotten for newer ones"
    assert reports.add(f"n{3 * MAX_REPORTED_NODES - 1}", "y", NOW)
    assert not reports.add("n0", "x", NOW + REPORT_PERIOD)
    assert len(reports) == 1
    for number in range(99):
        reports.add("n0", f"ns{number}", NOW + REPORT_PERIOD)
    assert len(reports._namespaces["n0"]) == MAX_NAMESPACES


def test_event_about_node_is_in_default_namespace() -> None:
    about = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n", "uid": "n"}}
    event = build_event(about, Event("Warning", "FailsTrainingJobs", "words"), NOW, 1)
    assert (event["metadata"]["namespace"], event["regarding"]["namespace"]) == ("default", "")
