"""Decisions about the Workload of a job in several clusters."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ddp_operator.api import constants, other_kinds
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.status import Condition, Status
from ddp_operator.decide import conditions as c
from ddp_operator.features import SCHEMA
from ddp_operator.features.multikueue.admission import (
    build_edits,
    build_release,
    build_report,
    describe_queueing,
    find_cluster,
    follow_admission,
    list_flavors,
)
from ddp_operator.features.multikueue.workload import build_workload
from ddp_operator.manifests.children import build_children
from tests.support.builders import NOW, resource

QUEUE = {constants.KUEUE_QUEUE_LABEL: "team"}
COPY = QUEUE | {constants.KUEUE_ORIGIN_LABEL: "multikueue", "team": "a"}
FLAVOR = {"spec": {"nodeLabels": {"pool": "a"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}}


def job(labels: dict[str, str] = QUEUE, **spec: Any) -> Any:
    item = resource(**spec)
    item["metadata"]["labels"] = labels
    return parse_resource(item, SCHEMA)


def workload(*conditions: tuple[str, str, str], annotations: Any = None, **status: Any) -> dict[str, Any]:
    known = [
        {"type": kind, "status": value, "reason": reason, "message": "so", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for kind, value, reason in conditions
    ]
    meta = {"name": "train-1", "namespace": "default", "annotations": annotations or {}}
    return {"metadata": meta, "spec": {"queueName": "team"}, "status": {"conditions": known, **status}}


def condition(kind: str, message: str = "") -> Condition:
    return Condition(type=kind, status="True", reason="Because", message=message, last_transition_time=NOW)


RESERVED = ("QuotaReserved", "True", "QuotaReserved")
ADMITTED = ("Admitted", "True", "Admitted")
EVICTED = ("Evicted", "True", "AdmissionCheck")


class TestManifest:
    def test_workload_counts_all_pods_and_has_neither_code_nor_environment(self) -> None:
        manifest = build_workload(job(QUEUE | {other_kinds.KUEUE_PRIORITY_LABEL: "high"}, nodes=3, spares=1), 7)
        [pods] = manifest["spec"]["podSets"]
        assert pods["count"] == 4
        assert set(pods["template"]["spec"]["containers"][0]) <= {"name", "image", "resources"}
        assert "volumes" not in pods["template"]["spec"]
        assert manifest["spec"]["priorityClassRef"]["name"] == "high"
        assert manifest["spec"]["priority"] == 7


class TestEdits:
    def test_stored_manifest_needs_no_edit(self) -> None:
        manifest = build_workload(job(), None)
        assert build_edits(manifest, suspend=False, manifest=manifest) == {}

    def test_new_spec_replaces_former_one_unless_quota_is_reserved(self) -> None:
        before = build_workload(job(), None)
        after = build_workload(job(nodes=5), None)
        edits = build_edits(before, suspend=False, manifest=after)
        assert edits["spec"]["podSets"][0]["count"] == 5
        assert "active" not in edits["spec"], "Kueue may have deactivated it"
        assert edits["spec"]["priorityClassRef"] is None, "a merge patch must remove a former class"
        reserved = before | {"status": workload(RESERVED)["status"]}
        assert build_edits(reserved, suspend=False, manifest=after) == {}

    def test_suspension_deactivates_and_only_resumption_activates(self) -> None:
        running = build_workload(job(), None)
        assert build_edits(running, suspend=True)["spec"] == {"active": False}
        deactivated = running | {"spec": running["spec"] | {"active": False}}
        assert build_edits(deactivated, suspend=False) == {}, "Kueue has deactivated it"
        suspended = build_workload(job(suspend=True), None)
        assert build_edits(suspended, suspend=False)["spec"] == {"active": True}


class TestManager:
    def test_cluster_is_that_of_workload_until_eviction(self) -> None:
        assert find_cluster(None) == ""
        assert find_cluster(workload(RESERVED, clusterName="east")) == "east"
        for end in (EVICTED, ("Finished", "True", "Succeeded")):
            assert find_cluster(workload(RESERVED, end, clusterName="east")) == ""

    @pytest.mark.parametrize(
        ("stored", "reason", "message"),
        [
            (None, c.QUOTA_PENDING, "waiting for admission by queue team"),
            (workload(("QuotaReserved", "False", "Pending")), c.QUOTA_PENDING, "queue team: so"),
            (workload(RESERVED, nominatedClusterNames=["a", "b"]), c.QUOTA_PENDING, "quota in cluster a or b"),
        ],
    )
    def test_waiting_job_has_reason_and_no_attempt(self, stored: Any, reason: str, message: str) -> None:
        old = Status(attempt=3, phase="Running", job_name="train-3", conditions=(condition(c.RENDEZVOUSED),))
        waiting = dataclasses.replace(job(nodes=2), status=old)
        status = describe_queueing(waiting, stored, None, NOW)
        scheduled = status.condition(c.SCHEDULED)
        assert scheduled is not None
        assert (status.phase, status.attempt, scheduled.reason) == ("Pending", 0, reason)
        assert message in scheduled.message
        assert status.condition(c.RENDEZVOUSED) is None, "the next worker cluster starts the job anew"


class TestWorker:
    @pytest.mark.parametrize(
        ("stored", "message"),
        [
            (None, "does not exist"),
            (workload(RESERVED), "has not admitted"),
            (workload(RESERVED, ADMITTED, EVICTED), "has evicted Workload train-1 (AdmissionCheck): so"),
            (workload(RESERVED, ADMITTED, ("Finished", "True", "Failed")), "has not admitted"),
        ],
    )
    def test_pods_wait_for_admission(self, stored: Any, message: str) -> None:
        held = follow_admission(job(COPY), "train-1", stored, [])
        assert held.spec.suspend
        assert message in held.held

    def test_admitted_job_gets_nodes_of_flavor_and_no_queue(self) -> None:
        admission = {"podSetAssignments": [{"name": "main", "flavors": {"cpu": "b", "memory": "a"}}]}
        stored = workload(RESERVED, ADMITTED, admission=admission)
        assert list_flavors(stored) == ("a", "b")
        admitted = follow_admission(job(COPY, ttlSecondsAfterFinished=0), "train-1", stored, [FLAVOR, FLAVOR])
        assert not admitted.spec.suspend
        assert admitted.spec.ttl_seconds_after_finished is None, "the manager deletes it"
        built = build_children(admitted, attempt=1, nodes=1)[-1]
        assert built["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "a"}
        assert built["spec"]["template"]["spec"]["tolerations"].count(FLAVOR["spec"]["tolerations"][0]) == 1
        assert built["metadata"]["labels"]["team"] == "a"
        assert not any(constants.KUEUE_DOMAIN in key for key in built["metadata"]["labels"])

    def test_start_and_end_are_reported_once(self) -> None:
        running = Status(phase="Running", conditions=(condition(c.RENDEZVOUSED),))
        ended = Status(phase="Failed", conditions=(condition(c.FAILED, "it raised"),))
        started = build_report(workload(ADMITTED), running, NOW, is_over=False)
        assert self.types(started) == ["Admitted", "PodsReady"]
        known = workload(ADMITTED, ("PodsReady", "True", "Started"))
        assert build_report(known, running, NOW, is_over=False) == {}
        report = build_report(workload(ADMITTED), ended, NOW, is_over=True)["status"]["conditions"][-1]
        assert (report["type"], report["reason"], report["message"]) == ("Finished", "Failed", "it raised")
        assert build_report(workload(("Finished", "True", "Failed")), ended, NOW, is_over=True) == {}
        assert build_report(workload(ADMITTED), ended, NOW, is_over=False) == {}, "Kueue would delete it at once"

    @pytest.mark.parametrize(("reason", "requeued"), [("Preempted", "True"), ("AdmissionCheck", "False")])
    def test_evicted_workload_returns_quota(self, reason: str, requeued: str) -> None:
        patch = build_release(workload(RESERVED, ADMITTED, ("Evicted", "True", reason)), NOW)["status"]
        assert patch["admission"] is None
        states = {item["type"]: item["status"] for item in patch["conditions"]}
        assert states == {"QuotaReserved": "False", "Admitted": "False", "Evicted": "True", "Requeued": requeued}
        assert build_release(workload(RESERVED, ADMITTED), NOW) == {}
        assert build_release(workload(EVICTED), NOW) == {}

    def types(self, patch: dict[str, Any]) -> list[str]:
        return [item["type"] for item in patch["status"]["conditions"]]
