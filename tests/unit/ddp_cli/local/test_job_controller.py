"""The Job controller's decisions beyond the recordings of a real one (``contract/test_job_traces``)."""

from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

import pytest

from ddp_cli.local.job_controller import (
    completion_index,
    decide_job,
    format_indexes,
    has_condition,
    parse_indexes,
)
from ddp_operator.manifests.children import build_pod

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


def test_duplicate_pod_of_index_is_deleted() -> None:
    owner = job(2)
    pods = [pod(owner, 0), pod(owner, 1), pod(owner, 1, "Pending", suffix="zzzzz")]
    assert decide_job(owner, pods, NOW).delete == ("j-1-zzzzz",)


def test_pods_of_other_job_are_ignored() -> None:
    owner = job()
    second = job()
    second["metadata"]["uid"] = "u2"
    assert decide_job(owner, [pod(second, 0), pod(second, 1)], NOW).create == (0, 1)


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
