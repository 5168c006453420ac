"""The Job controller's decisions, compared with the documented behaviour of Kubernetes 1.31+."""

from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

import pytest

from ddp_cli.local.job_controller import (
    JobDecision,
    completion_index,
    decide_job,
    format_indexes,
    has_condition,
    parse_indexes,
)
from ddp_operator.api.constants import JOB_TRACKING_FINALIZER
from ddp_operator.manifests.job_pod import build_pod

NOW = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)
STAMP = "2026-11-20T12:00:00Z"
POLICY = {
    "rules": [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [81, 82]}},
        {"action": "Count", "onExitCodes": {"operator": "In", "values": [85]}},
    ]
}


def job(nodes: int = 2, **spec: Any) -> dict[str, Any]:
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "trainer", "image": "x"}]}}
    base = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 1000,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": POLICY,
        "template": template,
    }
    return {"metadata": {"name": "j", "namespace": "ns", "uid": "u1"}, "spec": {**base, **spec}, "status": {}}


def pod(owner: dict[str, Any], index: int, phase: str = "Running", *, code: int | None = None, **changes: Any) -> Any:
    made = build_pod(owner, index, suffix=changes.pop("suffix", "abcde"))
    made["status"] = {"phase": phase, "conditions": changes.pop("conditions", [])}
    if phase == "Running":
        made["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    if code is not None:
        made["status"]["containerStatuses"] = [{"name": "trainer", "state": {"terminated": {"exitCode": code}}}]
    if changes.pop("deleting", False):
        made["metadata"]["deletionTimestamp"] = STAMP
    if changes.pop("counted", False):
        made["metadata"]["finalizers"] = []
    assert not changes
    return made


def settle(owner: dict[str, Any], pods: list[Any]) -> list[JobDecision]:
    """Apply decisions until one changes nothing; a deleted pod disappears at once."""
    decisions = []
    while (decision := decide_job(owner, pods, NOW)).changes(owner):
        decisions.append(decision)
        assert len(decisions) < 10
        owner["status"] = decision.status
        for p in pods:
            if p["metadata"]["name"] in decision.release:
                p["metadata"]["finalizers"].remove(JOB_TRACKING_FINALIZER)
        pods[:] = [p for p in pods if p["metadata"]["name"] not in decision.delete]
        pods += [pod(owner, index, "Pending") for index in decision.create]
    return decisions


def conditions(owner: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(c["type"], c["status"], c["reason"]) for c in owner["status"].get("conditions", [])]


def test_new_job_gets_one_pod_per_index_and_start_time() -> None:
    decision = decide_job(job(3), [], NOW)
    assert decision.create == (0, 1, 2)
    assert decision.status["active"] == 3
    assert decision.status["startTime"] == STAMP


def test_pod_carries_its_index_as_label_annotation_hostname_and_environment() -> None:
    made = build_pod(job(), 1, suffix="zzzzz")
    assert made["metadata"]["name"] == "j-1-zzzzz"
    assert made["spec"]["hostname"] == "j-1"
    assert completion_index(made) == 1
    assert made["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] == "1"
    assert made["metadata"]["labels"]["a"] == "b"
    assert made["metadata"]["ownerReferences"][0]["uid"] == "u1"
    names = [variable["name"] for variable in made["spec"]["containers"][0]["env"]]
    assert names == ["JOB_COMPLETION_INDEX"]


def test_building_pod_does_not_mutate_job() -> None:
    owner = job()
    before = deepcopy(owner)
    build_pod(owner, 0, suffix="zzzzz")
    assert owner == before


def test_running_pods_are_counted_and_need_no_action() -> None:
    owner = job()
    pods = [pod(owner, 0), pod(owner, 1)]
    settle(owner, pods)
    assert (owner["status"]["active"], owner["status"]["ready"]) == (2, 2)
    assert not decide_job(owner, pods, NOW).changes(owner)


def test_success_of_every_index_completes_job_in_two_passes() -> None:
    owner = job()
    decisions = settle(owner, [pod(owner, 0, "Succeeded"), pod(owner, 1, "Succeeded")])
    assert owner["status"]["completedIndexes"] == "0,1"
    assert owner["status"]["completionTime"] == STAMP
    assert [c[0] for c in conditions(owner)] == ["SuccessCriteriaMet", "Complete"]
    assert not has_condition({"status": decisions[0].status}, "Complete")


def test_success_is_remembered_after_pod_deletion() -> None:
    owner = job()
    pods = [pod(owner, 0, "Succeeded"), pod(owner, 1)]
    settle(owner, pods)
    settle(owner, pods[1:])
    assert owner["status"]["succeeded"] == 1
    assert decide_job(owner, pods[1:], NOW).create == ()


def test_fail_job_exit_code_deletes_peers_then_fails_job() -> None:
    owner = job()
    failed = pod(owner, 1, "Failed", code=82)
    survivor = pod(owner, 0)
    decision = decide_job(owner, [failed, survivor], NOW)
    assert decision.delete == (survivor["metadata"]["name"],)
    assert decision.create == ()
    owner["status"] = decision.status
    assert conditions(owner) == [("FailureTarget", "True", "PodFailurePolicy")]

    leaving = pod(owner, 0, deleting=True)
    owner["status"] = decide_job(owner, [failed, leaving], NOW).status
    assert not has_condition(owner, "Failed")

    settle(owner, [failed])
    assert conditions(owner)[-1] == ("Failed", "True", "PodFailurePolicy")
    message = owner["status"]["conditions"][-1]["message"]
    assert message == "Container trainer for pod ns/j-1-abcde failed with exit code 82 matching FailJob rule at index 1"


@pytest.mark.parametrize("code", [85, 137])
def test_any_other_exit_code_counts_and_pod_is_replaced_under_its_index(code: int) -> None:
    owner = job()
    decision = decide_job(owner, [pod(owner, 0), pod(owner, 1, "Failed", code=code)], NOW)
    assert decision.create == (1,)
    assert decision.status["failed"] == 1


def test_failure_is_counted_once() -> None:
    owner = job()
    pods = [pod(owner, 0), pod(owner, 1, "Failed", code=137)]
    settle(owner, pods)
    settle(owner, pods)
    assert owner["status"]["failed"] == 1


def test_disrupted_pod_is_replaced_and_not_counted_even_with_fatal_exit_code() -> None:
    owner = job()
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    gone = pod(owner, 1, "Failed", code=82, conditions=disrupted)
    decision = decide_job(owner, [pod(owner, 0), gone], NOW)
    assert (decision.create, decision.status["failed"]) == ((1,), 0)


def test_rule_for_other_container_does_not_match() -> None:
    owner = job()
    failed = pod(owner, 1, "Failed", code=82)
    failed["status"]["containerStatuses"][0]["name"] = "sidecar"
    assert decide_job(owner, [pod(owner, 0), failed], NOW).create == (1,)


def test_not_in_matches_codes_outside_list_but_never_zero() -> None:
    rule = {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [85]}}
    owner = job(podFailurePolicy={"rules": [rule]})
    assert decide_job(owner, [pod(owner, 0), pod(owner, 1, "Failed", code=0)], NOW).create == (1,)
    assert decide_job(owner, [pod(owner, 0), pod(owner, 1, "Failed", code=85)], NOW).create == (1,)
    failed = decide_job(owner, [pod(owner, 0), pod(owner, 1, "Failed", code=1)], NOW)
    assert has_condition({"status": failed.status}, "FailureTarget")


def test_terminating_pod_is_replaced_after_its_end() -> None:
    owner = job()
    leaving = pod(owner, 1, deleting=True)
    decision = decide_job(owner, [pod(owner, 0), leaving], NOW)
    assert (decision.create, decision.release, decision.status["terminating"]) == ((), (), 1)
    leaving["status"]["phase"] = "Failed"
    decision = decide_job(owner, [pod(owner, 0), leaving], NOW)
    assert (decision.create, decision.release) == ((1,), (leaving["metadata"]["name"],))


def test_failures_above_backoff_limit_fail_job() -> None:
    owner = job(backoffLimit=0)
    decision = decide_job(owner, [pod(owner, 0), pod(owner, 1, "Failed", code=137)], NOW)
    owner["status"] = decision.status
    assert conditions(owner) == [("FailureTarget", "True", "BackoffLimitExceeded")]


@pytest.mark.parametrize(
    ("finished", "waits", "create"),
    [("2026-11-20T12:00:00Z", 10.0, ()), ("2026-11-20T11:59:50Z", None, (1,)), ("2026-11-20T13:00:00Z", None, (1,))],
    ids=["just now", "long enough ago", "in the future: the clock was set back"],
)
def test_failed_pod_is_replaced_after_backoff(finished: str, waits: float | None, create: tuple[int]) -> None:
    owner = job()
    failed = pod(owner, 1, "Failed", code=137, counted=True)
    failed["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = finished
    decision = decide_job(owner, [pod(owner, 0), failed], NOW, backoff=10)
    assert (decision.retry_after, decision.create) == (waits, create)


def test_failure_in_backoff_is_not_counted_and_its_pod_is_kept() -> None:
    owner = job() | {"status": {"active": 2, "ready": 2}}
    failed = pod(owner, 1, "Failed", code=137)
    failed["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = STAMP
    decision = decide_job(owner, [pod(owner, 0), failed], NOW, backoff=10)
    assert (decision.status, decision.release) == (owner["status"], ())


def test_success_ends_backoff() -> None:
    owner = job()
    failed = pod(owner, 1, "Failed", code=137)
    succeeded = pod(owner, 0, "Succeeded")
    for ended, second in ((failed, 0), (succeeded, 1)):
        ended["status"]["containerStatuses"] = [
            {
                "name": "trainer",
                "state": {"terminated": {"exitCode": 137, "finishedAt": f"2026-11-20T12:00:0{second}Z"}},
            }
        ]
    assert decide_job(owner, [failed, succeeded], NOW, backoff=10).create == (1,)


def test_job_created_suspended_has_no_pods_and_no_start_time() -> None:
    owner = job(suspend=True)
    assert settle(owner, [])[0].create == ()
    assert conditions(owner) == [("Suspended", "True", "JobSuspended")]
    assert "startTime" not in owner["status"]


def test_suspension_deletes_pods_and_resumption_creates_them_with_new_start_time() -> None:
    owner = job(suspend=True)
    owner["status"] = {"startTime": "2026-11-20T11:00:00Z"}
    pods = [pod(owner, 0), pod(owner, 1)]
    assert len(settle(owner, pods)[0].delete) == 2
    assert owner["status"]["active"] == 0
    owner["spec"]["suspend"] = False
    assert decide_job(owner, [], NOW).create == (0, 1)
    settle(owner, [])
    assert conditions(owner) == [("Suspended", "False", "JobResumed")]
    assert owner["status"]["startTime"] == STAMP


def test_shrinking_deletes_pods_beyond_new_size() -> None:
    owner = job(2)
    pods = [pod(owner, index) for index in range(4)]
    decision = decide_job(owner, pods, NOW)
    assert decision.delete == ("j-2-abcde", "j-3-abcde")
    assert decision.create == ()


def test_lower_parallelism_deletes_least_advanced_pod() -> None:
    owner = job(3, parallelism=2)
    pods = [pod(owner, 0), pod(owner, 1, "Pending"), pod(owner, 2)]
    assert decide_job(owner, pods, NOW).delete == ("j-1-abcde",)


def test_growing_creates_missing_indexes() -> None:
    owner = job(4)
    assert decide_job(owner, [pod(owner, 0), pod(owner, 2)], NOW).create == (1, 3)


def test_duplicate_pod_of_index_is_deleted() -> None:
    owner = job(2)
    pods = [pod(owner, 0), pod(owner, 1), pod(owner, 1, "Pending", suffix="zzzzz")]
    assert decide_job(owner, pods, NOW).delete == ("j-1-zzzzz",)


def test_pods_of_other_job_are_ignored() -> None:
    owner = job()
    second = job()
    second["metadata"]["uid"] = "u2"
    assert decide_job(owner, [pod(second, 0), pod(second, 1)], NOW).create == (0, 1)


@pytest.mark.parametrize("kind", ["Complete", "Failed"])
def test_finished_job_creates_no_pod(kind: str) -> None:
    owner = job()
    owner["status"] = {"conditions": [{"type": kind, "status": "True"}]}
    assert not decide_job(owner, [], NOW).changes(owner)


def test_terminating_job_only_releases_pods() -> None:
    owner = job()
    owner["metadata"]["deletionTimestamp"] = STAMP
    decision = decide_job(owner, [pod(owner, 0)], NOW)
    assert (decision.release, decision.create, decision.delete) == (("j-0-abcde",), (), ())


def test_deciding_never_changes_its_input() -> None:
    owner = job()
    pods = [pod(owner, 0), pod(owner, 1, "Failed", code=82)]
    before = deepcopy((owner, pods))
    decide_job(owner, pods, NOW)
    assert (owner, pods) == before


@pytest.mark.parametrize(("text", "indexes"), [("", set()), ("0", {0}), ("0-2,5", {0, 1, 2, 5}), ("1,3", {1, 3})])
def test_index_lists_round_trip(text: str, indexes: set[int]) -> None:
    assert parse_indexes(text) == indexes
    assert format_indexes(indexes) == text
