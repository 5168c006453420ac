"""Jobs, pods and nodes as an API server returns them, and the values read from them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ddp_operator.api import constants
from ddp_operator.api.kubeobjects import EPOCH, format_time
from ddp_operator.decide.views import NodeView
from ddp_operator.reading.objects import view_job, view_node, view_pod
from tests.support.builders import NOW, Json, child_pod
from tests.support.decisions import present

LATER = NOW + timedelta(seconds=90)


def facts(view: Any, names: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(view, name) for name in names}


def condition(kind: str, status: str = "True", **members: Any) -> Json:
    return {"type": kind, "status": status, "lastTransitionTime": format_time(NOW), **members}


def waiting(name: str, reason: str, message: str = "") -> Json:
    return {"name": name, "state": {"waiting": {"reason": reason, "message": message}}}


def ended(name: str, code: int, **members: Any) -> Json:
    return {"name": name, "state": {"terminated": {"exitCode": code, **members}}}


JOB: Json = {
    "metadata": {
        "name": "train-3",
        "uid": "u",
        "creationTimestamp": format_time(NOW),
        "labels": {constants.LABEL_ATTEMPT: "3", constants.KUEUE_QUEUE_LABEL: "team"},
        "annotations": {constants.ANNOTATION_SUSPEND: "false", constants.ANNOTATION_SPEC: "digest"},
    },
    "spec": {
        "completions": 4,
        "suspend": False,
        "template": {
            "metadata": {"labels": {constants.KUEUE_PODSET_LABEL: "main"}},
            "spec": {
                "volumes": [
                    {"name": "data", "emptyDir": {}},
                    {"name": constants.LAUNCHER_VOLUME, "configMap": {"name": "train-launcher"}},
                ]
            },
        },
    },
    "status": {"startTime": format_time(LATER), "conditions": [condition("Suspended", "False")]},
}


class TestJobView:
    def test_job_view_of_running_job(self) -> None:
        expected = {
            "name": "train-3", "uid": "u", "attempt": 3, "nodes": 4, "suspended": False, "complete": False,
            "failed": False, "failed_message": "", "failed_at": None, "deleting": False, "launcher": "train-launcher",
            "ignored_since": None, "suspend_written": False, "queue": "team", "admitted": True, "started": LATER,
            "suspend_changed": NOW, "spec_digest": "digest", "finished": False,
        }  # fmt: skip
        assert facts(view_job(JOB), expected) == expected

    def test_nothing_is_known_of_empty_one(self) -> None:
        expected = {
            "name": "", "uid": "", "attempt": 0, "nodes": 0, "suspended": False, "complete": False, "failed": False,
            "launcher": "", "ignored_since": None, "suspend_written": None, "queue": "", "admitted": False,
            "started": None, "suspend_changed": None, "spec_digest": "",
        }  # fmt: skip
        assert facts(view_job({}), expected) == expected

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"metadata": JOB["metadata"] | {"deletionTimestamp": format_time(NOW)}}, {"deleting": True}),
            ({"status": {}}, {"ignored_since": NOW, "started": None}),
            ({"spec": JOB["spec"] | {"suspend": True}}, {"suspended": True, "started": None}),
            (
                {"status": JOB["status"] | {"conditions": [condition("Suspended")]}},
                {"suspended": False, "started": None, "suspend_changed": NOW},
            ),
            ({"status": {"conditions": [condition("Complete")]}}, {"complete": True, "finished": True}),
            ({"status": {"conditions": [condition("SuccessCriteriaMet")]}}, {"complete": True, "finished": True}),
            ({"status": {"conditions": [condition("Complete", "False")]}}, {"complete": False, "finished": False}),
            (
                {"status": {"conditions": [condition("Failed", message="why")]}},
                {"failed": True, "failed_message": "why", "failed_at": NOW, "finished": True},
            ),
            (
                {
                    "status": {
                        "conditions": [
                            condition("FailureTarget", message="decided"),
                            condition("Failed", message="ended", lastTransitionTime=format_time(LATER)),
                        ]
                    }
                },
                {"failed": True, "failed_message": "ended", "failed_at": NOW},
            ),
        ],
    )
    def test_job_view_of_conditions_and_labels(self, changes: Json, expected: Json) -> None:
        assert facts(view_job(JOB | changes), expected) == expected


class TestPodView:
    def test_pod_view_of_running_pod(self) -> None:
        created = NOW - timedelta(seconds=60)
        expected = {
            "name": "train-2-1-abcde", "uid": "uid-train-2-1-abcde", "attempt": 2, "index": 1, "created": created,
            "phase": "Running", "ready": True, "deleting": False, "node_name": "node-a", "scheduled": True,
            "started": created, "disrupted": False, "waiting_reason": "", "waiting_message": "", "termination": None,
            "trained": False, "disruption": "", "disruption_message": "", "deleted_at": None, "grace_ends": None,
            "unready_since": None, "cut_off_since": None, "unscheduled_since": None, "ignored_since": None,
            "scheduler": "default-scheduler", "alive": True, "running": True,
            "ganged": False, "avoided_nodes": (), "has_run": True, "fails_job": False,
        }  # fmt: skip
        assert facts(view_pod(child_pod(1, attempt=2)), expected) == expected

    def test_nothing_is_known_of_empty_one(self) -> None:
        expected = {
            "name": "", "uid": "", "attempt": 0, "index": 0, "created": EPOCH, "phase": "Pending", "ready": False,
            "deleting": False, "node_name": "", "scheduled": False, "started": None, "disrupted": False,
            "waiting_reason": "", "waiting_message": "", "termination": None, "trained": False, "alive": True,
            "running": False, "has_run": False, "unscheduled_since": None, "ignored_since": None,
        }  # fmt: skip
        assert facts(view_pod({}), expected) == expected

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            (
                {"deleting": True, "grace": 30},
                {"deleting": True, "deleted_at": NOW, "grace_ends": NOW + timedelta(seconds=30), "running": False},
            ),
            (
                {"disrupted": "EvictionByEvictionAPI"},
                {"disrupted": True, "disruption": "EvictionByEvictionAPI", "disruption_message": "words"},
            ),
            ({"unready": NOW}, {"ready": False, "unready_since": NOW, "cut_off_since": NOW}),
            (
                {"status": {"conditions": [condition("Ready", "False"), condition("ContainersReady", "False")]}},
                {"unready_since": NOW, "cut_off_since": None},
            ),
            (
                {
                    "status": {
                        "conditions": [
                            condition("Ready", "False", reason="ReadinessGatesNotReady"),
                            condition("ContainersReady"),
                        ]
                    }
                },
                {"unready_since": NOW, "cut_off_since": None},
            ),
            ({"spec": {"schedulerName": "volcano"}}, {"scheduler": "volcano"}),
            ({"spec": {"schedulingGroup": {"podGroupName": "g"}}}, {"ganged": True}),
            ({"phase": "Pending", "status": {"startTime": format_time(NOW)}}, {"started": NOW, "has_run": False}),
            ({"phase": "Succeeded"}, {"alive": False, "running": False, "has_run": True, "fails_job": False}),
            ({"phase": "Failed", "code": 1}, {"alive": False, "trained": True, "fails_job": True}),
            ({"phase": "Failed", "code": 1, "disrupted": True}, {"disrupted": True, "fails_job": False}),
            ({"phase": "Failed", "code": constants.EXIT_PREEMPTED}, {"trained": True, "fails_job": False}),
        ],
    )
    def test_pod_view_of_conditions(self, changes: Json, expected: Json) -> None:
        assert facts(view_pod(child_pod(**changes)), expected) == expected

    @pytest.mark.parametrize(
        ("status", "expected"),
        [
            ({"conditions": []}, {"ignored_since": NOW - timedelta(seconds=60), "unscheduled_since": None}),
            (
                {"conditions": [condition("PodScheduled", "False", reason="Unschedulable", message="no room")]},
                {
                    "waiting_reason": "Unschedulable", "waiting_message": "no room", "unscheduled_since": NOW,
                    "ignored_since": None, "scheduled": False,
                },
            ),
            (
                {"conditions": [condition("PodScheduled", "False")]},
                {"waiting_reason": "Unschedulable", "waiting_message": ""},
            ),
            (
                {"conditions": [condition("PodScheduled")]},
                {"scheduled": True, "waiting_reason": "", "unscheduled_since": None, "ignored_since": None},
            ),
            (
                {"containerStatuses": [waiting("trainer", "ImagePullBackOff", 'Back-off pulling image "x": E: gone')]},
                {"waiting_reason": "ImagePull", "waiting_message": "gone"},
            ),
            (
                {"containerStatuses": [waiting("trainer", "InvalidImageName")]},
                {"waiting_reason": "ImagePull", "waiting_message": "InvalidImageName"},
            ),
            (
                {
                    "initContainerStatuses": [waiting("fetch", "PodInitializing")],
                    "containerStatuses": [waiting("trainer", "CreateContainerConfigError", "no secret")],
                },
                {"waiting_reason": "CreateContainerConfigError", "waiting_message": "no secret"},
            ),
            (
                {
                    "initContainerStatuses": [waiting("fetch", "CrashLoopBackOff")],
                    "containerStatuses": [waiting("trainer", "PodInitializing")],
                },
                {"waiting_reason": "CrashLoopBackOff", "waiting_message": "init container fetch"},
            ),
            (
                {
                    "containerStatuses": [
                        {"name": "trainer", "state": {"running": {}}},
                        waiting("sidecar", "CrashLoopBackOff"),
                    ]
                },
                {"waiting_reason": ""},
            ),
        ],
    )  # fmt: skip
    def test_waiting_reason_of_pod(self, status: Json, expected: Json) -> None:
        assert facts(view_pod(child_pod(0, "Pending", status=status)), expected) == expected

    def test_scheduled_pod_drops_scheduler_message(self) -> None:
        raw = child_pod(0, "Pending", node="node-b", status={"conditions": [condition("PodScheduled", "False")]})
        expected = {"scheduled": True, "waiting_reason": "", "unscheduled_since": None, "ignored_since": None}
        assert facts(view_pod(raw), expected) == expected

    @pytest.mark.parametrize(
        ("operator", "key", "avoided"),
        [("NotIn", "metadata.name", ("node-a",)), ("In", "metadata.name", ()), ("NotIn", "metadata.uid", ())],
    )
    def test_only_operators_own_affinity_counts_as_avoiding_nodes(
        self, operator: str, key: str, avoided: tuple[str, ...]
    ) -> None:
        terms = [{"matchFields": [{"key": key, "operator": operator, "values": ["node-a"]}]}]
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        assert view_pod(child_pod(spec={"affinity": {"nodeAffinity": required}})).avoided_nodes == avoided


class TestEndOfPod:
    def test_evicted_pod_quotes_kubelet_with_remedy(self) -> None:
        status = {"reason": "Evicted", "message": "ephemeral local storage usage exceeds the limit"}
        end = present(view_pod(child_pod(0, "Failed", code=137, status=status)).termination)
        assert (end.category, end.message) == ("Unknown", "Evicted: ephemeral local storage usage exceeds the limit")
        assert "ephemeral-storage" in end.remedy

    @pytest.mark.parametrize(
        "changes",
        [{"code": 137}, {"code": 0, "reason": "Completed"}, {"code": 137, "disrupted": "TerminationByKubelet"}],
    )
    def test_eviction_applies_only_to_ended_pod(self, changes: Json) -> None:
        reason = "Evicted" if len(changes) > 1 else "Other"
        end = view_pod(child_pod(0, "Failed", status={"reason": reason, "message": "words"}, **changes)).termination
        assert end is not None
        assert "Evicted" not in end.message

    def test_pod_without_containers_quotes_its_status(self) -> None:
        end = present(view_pod(child_pod(0, "Failed", status={"reason": "NodeShutdown", "message": "bye"})).termination)
        assert (end.message, end.remedy, end.container_exit_code) == ("NodeShutdown: bye", "", 137)
        assert not view_pod(child_pod(0, "Failed")).trained

    @pytest.mark.parametrize(("code", "permanent"), [(1, False), (constants.EXIT_USER_ERROR, False)])
    def test_init_container_that_failed_is_named_with_its_log(self, code: int, permanent: bool) -> None:
        raw = child_pod(
            0,
            "Failed",
            spec={"initContainers": [{"name": "proxy", "restartPolicy": "Always"}, {"name": "fetch"}]},
            status={"initContainerStatuses": [ended("proxy", 2), ended("done", 0), ended("fetch", code)]},
        )
        end = present(view_pod(raw).termination)
        assert (end.container, end.container_exit_code, end.permanent) == ("fetch", code, permanent)
        assert end.remedy == "see its log: kubectl logs train-1-0-abcde -c fetch"

    def test_end_of_trainer_precedes_end_of_init_container(self) -> None:
        finished = datetime(2026, 11, 20, 11, tzinfo=UTC)
        raw = child_pod(0, "Failed", code=3, at=finished, status={"initContainerStatuses": [ended("fetch", 1)]})
        end = present(view_pod(raw).termination)
        assert (end.container, end.container_exit_code, end.time) == ("", 3, finished.timestamp())


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (None, NodeView(False, "the node was deleted")),
        ({"status": {"conditions": [condition("Ready")]}}, NodeView(True, "")),
        (
            {"status": {"conditions": [condition("DiskPressure"), condition("Ready", "Unknown", message="silent")]}},
            NodeView(False, "the node is not ready: silent"),
        ),
        (
            {"status": {"conditions": [condition("Ready", "False", reason="KubeletNotReady")]}},
            NodeView(False, "the node is not ready: KubeletNotReady"),
        ),
        ({}, NodeView(False, "the node is not ready: its kubelet has not reported Ready")),
    ],
)
def test_node_view_has_problem_of_unready_node(raw: Json | None, expected: NodeView) -> None:
    assert view_node(raw) == expected
