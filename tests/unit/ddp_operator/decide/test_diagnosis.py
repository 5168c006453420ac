"""Which failure counts: the earliest root cause across pods."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ddp_operator.api import constants
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import LastFailure, Status
from ddp_operator.decide.diagnosis import Diagnosis, build_node_failure, diagnose, find_restart_cause, is_inferred
from ddp_operator.decide.state import State
from ddp_operator.reading.objects import view_pod
from ddp_pod.contract.failure_table import CATEGORIES
from tests.support.builders import NOW, child_job, child_pod, last_words, observe
from tests.support.builders import job as build_job
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness


def at(seconds: float) -> Any:
    return NOW + timedelta(seconds=seconds)


def ended(index: int, code: int, category: str = "CUDAError", *, seconds: float = 0, **changes: Any) -> dict[str, Any]:
    """Return a pod that failed; the failure of a lost peer is marked as such."""
    words = last_words(category, rank=index, podIndex=index, time=at(seconds).timestamp())
    if code == constants.EXIT_PEER_LOST:
        words |= {"category": "NCCL", "secondary": True}
    message = changes.pop("message", words if code not in (137, 143) else "")
    return child_pod(index, "Failed", code=code, message=message, at=at(seconds), **changes)


def diagnosis(
    *pods: Any, job: Any = None, seconds: float = 1, replaces: bool = True, since: float | None = None
) -> Diagnosis | None:
    """Return the diagnosis of attempt 1. ``replaces``: its Job replaces lost pods, as that of a queue does."""
    status = Status(attempt=1, attempt_time=None if since is None else at(since)).remember(nodes=2)
    typed = build_job(status=status, nodes=2)
    seen = observe(typed, [job or child_job(queue="q" if replaces else "")], pods)
    return diagnose(State(typed, seen, at(seconds)))


def blamed(result: Diagnosis | None) -> tuple[int | None, str]:
    assert result is not None
    return present(result.cause).pod_index, present(result.cause).category


class TestNoFailure:
    def test_evicted_pod_without_any_container_is_replaced(self) -> None:
        assert diagnosis(child_pod(0, "Failed", status={"reason": "Evicted", "message": "disk pressure"})) is None

    def test_sidecar_that_was_stopped_is_no_failed_init_container(self) -> None:
        status = {
            "initContainerStatuses": [{"name": "logs", "state": {"terminated": {"exitCode": 1}}}],
            "reason": "Evicted",
        }
        spec = {"initContainers": [{"name": "logs", "restartPolicy": "Always"}]}
        assert diagnosis(child_pod(0, "Failed", status=status, spec=spec)) is None


class TestCause:
    def test_earliest_of_two_that_are_not_secondary(self) -> None:
        pods = ended(0, 82, "NCCL", seconds=5), ended(1, 82, "CUDAError", seconds=2)
        assert blamed(diagnosis(*pods)) == blamed(diagnosis(*reversed(pods))) == (1, "CUDAError")

    def test_root_cause_is_primary_failure_although_reported_last(self) -> None:
        assert blamed(diagnosis(ended(0, 86, seconds=0), ended(1, 82, "OOM", seconds=9), seconds=9)) == (1, "OOM")

    def test_rank_that_agent_stopped_is_not_root_cause(self) -> None:
        report = last_words("Unknown", podIndex=0, time=at(0).timestamp(), evidence="Stopped")
        stopped = ended(0, 82, "Unknown", seconds=0, message=report)
        assert blamed(diagnosis(stopped, ended(1, 82, "CUDAError", seconds=3), seconds=4)) == (1, "CUDAError")

    def test_whole_story_is_kept(self) -> None:
        words = last_words("UserError", rank=3, podIndex=1, exitCode=2, message="m", traceback="t", remedy="h")
        result = present(diagnosis(ended(1, 81, message=words)))
        assert result.permanent
        cause = present(result.cause)
        assert (cause.rank, cause.exit_code, cause.message, cause.traceback, cause.remedy) == (3, 2, "m", "t", "h")
        assert (cause.pod, cause.node_name, cause.time) == ("train-1-1-abcde", "node-a", NOW)

    @pytest.mark.parametrize(("code", "permanent"), [(81, True), (82, False), (83, False), (84, False), (1, False)])
    def test_only_users_error_is_permanent(self, code: int, permanent: bool) -> None:
        result = present(diagnosis(ended(0, code, message="")))
        assert result.permanent is permanent

    def test_pod_killed_for_memory_is_root_cause(self) -> None:
        pod = child_pod(1, "Failed", code=137, reason="OOMKilled")
        assert blamed(diagnosis(pod, child_pod(0))) == (1, "OOM")
        assert not view_pod(pod).fails_job, "the Job controller would replace it"

    @pytest.mark.parametrize("reported", [True, False], ids=["launcher spoke", "nobody spoke"])
    def test_pod_with_full_disk_is_evicted_and_reported(self, reported: bool) -> None:
        """It exceeded its own limit, not the node's: no condition reports a disruption, and the attempt counts."""
        words = "Pod ephemeral local storage usage exceeds the total limit of containers 50Mi."
        status = {"reason": "Evicted", "message": words}
        last = {"code": 85, "message": last_words("Preempted", message="asked to stop by a signal")} if reported else {}
        result = present(diagnosis(child_pod(1, "Failed", status=status, **last), child_pod(0), replaces=False))
        assert (present(result.cause).category, present(result.cause).message, result.disruption) == (
            "Unknown",
            f"Evicted: {words}",
            False,
        )
        assert "raise ephemeral-storage" in present(result.cause).remedy

    def test_failed_init_container(self) -> None:
        status = {"initContainerStatuses": [{"name": "fetch", "state": {"terminated": {"exitCode": 3}}}]}
        pod = child_pod(0, "Failed", status=status)
        result = present(diagnosis(pod))
        assert result.cause is not None
        assert (result.cause.container, result.cause.message) == ("fetch", "the container ended with exit code 3")
        assert result.cause.remedy == "see its log: kubectl logs train-1-0-abcde -c fetch"
        assert not view_pod(pod).fails_job, "the Job's policy looks at the training container only"


HIDDEN = {"rank": 1, "step": 10.0, "exception": "ValueError: bad", "secondary": False}
LOST = {**HIDDEN, "secondary": True}


@pytest.mark.parametrize(
    ("code", "named", "end", "root"),
    [
        (82, 0, HIDDEN, (1, "UserError")),
        (constants.EXIT_PEER_LOST, 1, HIDDEN, (1, "UserError")),
        (82, 1, HIDDEN, (0, "CUDAError")),
        (82, 0, LOST, (0, "CUDAError")),
    ],
)
def test_peer_that_ended_with_a_hidden_exception_is_root_cause_of_lost_peers(
    code: int, named: int, end: Any, root: tuple[int, str]
) -> None:
    """``named``: the exit code of the rank that the pod blames: of one that left its peers it is 0."""
    message = last_words("NCCL" if code != 82 else "CUDAError", rank=0, secondary=code != 82, exitCode=named)
    failed = ended(0, code, message=message)
    peer = child_pod(1, "Succeeded", message=last_words(ends=[end]))
    result = diagnosis(failed, peer)
    assert blamed(result) == root
    assert result is not None
    assert ("ValueError: bad" in present(result.cause).message) is (root[0] == 1)


def test_pods_are_awaited_whose_ranks_had_ended_before_their_peers_failed() -> None:
    failed = ended(0, 82, message=last_words("UserError", rank=0, exitCode=0))
    waits = present(diagnosis(failed, child_pod(1)))
    assert waits.cause is None
    assert blamed(diagnosis(failed, child_pod(1), seconds=100)) == (0, "UserError")


class TestSecondaryFailures:
    @pytest.mark.parametrize(("peer", "seconds"), [(child_pod(1), 60), (child_pod(1, "Pending"), 15)])
    def test_secondary_failure_counts_when_silent_peer_has_had_its_time(self, peer: Any, seconds: float) -> None:
        """A running pod may be on a lost node, which Kubernetes detects after 50 seconds at most."""
        waiting = present(diagnosis(ended(0, 86), peer, seconds=seconds))
        assert waiting.cause is None
        assert "waiting until" in waiting.waiting
        assert blamed(diagnosis(ended(0, 86), peer, seconds=seconds + 1)) == (0, "NCCL")

    def test_secondary_failures_are_used_when_no_pod_runs(self) -> None:
        assert blamed(diagnosis(ended(0, 86), ended(1, 86), seconds=1)) == (0, "NCCL")

    @pytest.mark.parametrize("skew", [-3000, 3000])
    def test_wrong_clock_does_not_prolong_wait(self, skew: float) -> None:
        assert blamed(diagnosis(ended(0, 86, seconds=skew), child_pod(1))) == (0, "NCCL")

    def test_yield_to_pod_that_was_killed(self) -> None:
        assert blamed(diagnosis(ended(0, 86), ended(1, 137, seconds=1), seconds=20)) == (1, "Killed")

    def test_secondary_failure_precedes_pod_stopped_with_failed_job(self) -> None:
        """A rank whose peer has given it up hangs until it is stopped: that stop explains nothing."""
        gave_up = ended(0, constants.EXIT_PEER_LOST)
        late = ended(1, constants.EXIT_PREEMPTED, "Preempted", seconds=2)
        assert blamed(diagnosis(gave_up, late, seconds=3)) == (0, "NCCL")
        early = ended(1, constants.EXIT_PREEMPTED, "Preempted", seconds=-2)
        assert blamed(diagnosis(gave_up, early, seconds=3)) == (1, "Preempted")

    @pytest.mark.parametrize(
        ("code", "peer", "computes", "root"),
        [
            (86, {"code": 85, "seconds": 2}, False, (1, "Hang")),
            (86, {"code": 86, "seconds": 2}, False, (1, "Hang")),
            (86, {"code": 85, "seconds": 2}, True, (1, "NCCL")),
            (82, {"code": 85, "seconds": 2}, False, (0, "CUDAError")),
            (86, {"code": 85, "seconds": -2}, False, (1, "Preempted")),
        ],
        ids=["stopped", "lost its peer", "computes", "other cause", "stopped first"],
    )
    def test_rank_outside_of_collectives_is_root_cause_of_lost_peers_only(
        self, code: int, peer: Any, computes: bool, root: tuple[int, str]
    ) -> None:
        words = last_words("Hang", rank=5, podIndex=1, message="rank 5 is in q.get (train.py:27)", secondary=computes)
        end = last_words("Preempted" if peer["code"] == 85 else "Network", secondary=peer["code"] == 86)
        message = {**end, "awaited": words, "time": at(peer["seconds"]).timestamp()}
        result = diagnosis(ended(0, code), ended(1, peer["code"], seconds=peer["seconds"], message=message), seconds=3)
        assert blamed(result) == root
        assert result is not None
        assert result.cause is not None
        assert (
            (result.cause.rank == 5) is ("q.get" in result.cause.message) is (root[0] == 1 and root[1] != "Preempted")
        )

    @pytest.mark.parametrize(("code", "permanent"), [(81, True), (82, False), (0, False)])
    def test_mistake_of_awaited_rank_ends_the_job_although_its_pod_was_stopped(
        self, code: int, permanent: bool
    ) -> None:
        awaited = last_words("UserError", rank=1, podIndex=1, containerExitCode=code)
        message = {**last_words("Preempted"), "awaited": awaited, "time": at(2).timestamp()}
        result = present(diagnosis(ended(0, 86), ended(1, 85, seconds=2, message=message), seconds=3))
        assert blamed(result) == (1, "UserError")
        assert result.permanent is permanent

    @pytest.mark.parametrize("taken", [{"deleting": True}, {"disrupted": "EvictionByEvictionAPI"}])
    def test_lost_pod_explains_lost_peers_better_than_rank_outside_of_collectives(self, taken: Any) -> None:
        awaited = last_words("Hang", rank=1, podIndex=1)
        message = {**last_words("Preempted", time=at(2).timestamp()), "awaited": awaited}
        lost = child_pod(1, "Failed", code=85, message=message, at=at(-1), **taken)
        result = diagnosis(ended(0, 86, seconds=1), lost, seconds=3)
        assert blamed(result)[1] in ("PodDeleted", "Preempted")
        assert result is not None
        assert result.disruption

    def test_pods_deleted_after_job_failure_explain_nothing(self) -> None:
        """The Job controller decides, deletes the other pods, and adds the condition Failed when they are gone."""
        job = child_job(conditions={"FailureTarget": "exit code 83", "Failed": "exit code 83"})
        job["status"]["conditions"][1]["lastTransitionTime"] = format_time(at(20))
        deleted = child_pod(1, deleting=True, at=at(1))
        result = diagnosis(ended(0, constants.EXIT_HANG, "Hang", seconds=-1), deleted, job=job, seconds=21)
        assert blamed(result) == (0, "Hang")
        assert result is not None
        assert not result.disruption

    def test_secondary_failure_precedes_pod_replaced_long_ago(self) -> None:
        long_ago = ended(1, 137, seconds=-3600, suffix="first", age=7200)
        assert blamed(diagnosis(long_ago, ended(0, 86), ended(1, 86, seconds=1), seconds=20)) == (0, "NCCL")


class TestJobWithoutReport:
    def failed(self, seconds: float = 0) -> dict[str, Any]:
        return child_job(conditions={"FailureTarget": "backoff limit"}, at=at(seconds))

    def test_is_believed_after_while_although_pod_never_ends(self) -> None:
        result = present(diagnosis(child_pod(0), job=self.failed(), seconds=61))
        assert (present(result.cause).category, present(result.cause).message, present(result.cause).pod_index) == (
            "Unknown",
            "backoff limit",
            None,
        )

    def test_repeats_itself_exactly(self) -> None:
        assert diagnosis(job=self.failed(), seconds=1) == diagnosis(job=self.failed(), seconds=99)


def test_lost_node_is_blamed_with_its_remedy() -> None:
    failure = build_node_failure(3, view_pod(child_pod(1, attempt=3, node="node-b")), "the node is gone", NOW)
    assert (failure.attempt, failure.pod_index, failure.pod) == (3, 1, "train-3-1-abcde")
    assert (failure.node_name, failure.time) == ("node-b", NOW)
    assert failure.message == "the pod was lost with its node: the node is gone"
    assert (failure.category, failure.remedy) == ("NodeLost", CATEGORIES["NodeLost"].remedy)


class TestWaiting:
    """The sentence that names the pods for which a failed attempt waits."""

    def words(self, *pods: Any) -> str:
        result = present(diagnosis(*pods, job=child_job(conditions={"Failed": ""}, at=NOW)))
        assert result.cause is None
        assert result.until is not None
        return result.waiting

    def test_wait_names_started_pod_first_and_counts_others(self) -> None:
        later = ended(3, constants.EXIT_PEER_LOST, seconds=0.5)
        words = self.words(later, ended(2, constants.EXIT_PEER_LOST), child_pod(0, "Pending", node=""), child_pod(1))
        assert words.startswith(
            "pod 2 reports a secondary failure (NCCL); pod 1 (train-1-1-abcde, node node-a) and 1 more have neither "
            "ended nor reported: waiting until "
        )

    def test_wait_without_reports_and_node_is_described(self) -> None:
        words = self.words(child_pod(0, "Pending", node=""))
        assert words.startswith("the Job has failed; pod 0 (train-1-0-abcde, node unknown) has neither ended")


class TestInPlace:
    def found(self, *reports: dict[str, Any]) -> Any:
        pods = [view_pod(child_pod(index, "Failed", code=82, message=item)) for index, item in enumerate(reports)]
        return find_restart_cause(1, tuple((pod, pod.termination) for pod in pods if pod.termination))

    def test_latest_root_cause_counts_and_of_these_earliest(self) -> None:
        def report(restarts: int, time: float, message: str, *, secondary: bool = False) -> dict[str, Any]:
            words = {"restarts": restarts, "time": NOW.timestamp() + time, "message": message}
            return last_words("UserError", secondary=secondary, **words)

        old = report(1, 0, "old")
        late = report(2, 9, "late")
        cause = report(2, 5, "cause")
        peer = report(3, 1, "peer", secondary=True)
        assert self.found(old, late, cause, peer).message == "cause"
        assert self.found(peer) is None
        assert self.found() is None


@pytest.mark.parametrize(
    ("category", "rank", "guess"),
    [
        ("NCCL", 1, True),
        ("Network", None, True),
        ("Unknown", None, True),
        ("of a newer launcher", None, True),
        ("NodeLost", 1, True),
        ("NodeLost", None, False),
        ("UserError", 1, False),
        ("OOM", 1, False),
    ],
)
def test_lost_node_explains_inferred_failures_only(category: str, rank: int | None, guess: bool) -> None:
    assert is_inferred(LastFailure(attempt=1, category=category, rank=rank)) is guess


@pytest.mark.parametrize("suspended", ["True", "False"])
@pytest.mark.parametrize(("since", "taken"), [(None, True), (0, True), (5, False), (-1, True)])
def test_pods_of_briefly_suspended_job_are_not_lost(suspended: str, since: float | None, taken: bool) -> None:
    """The Job controller removes the condition some time after ``spec.suspend``, and times have whole seconds."""
    condition = {"type": "Suspended", "status": suspended, "lastTransitionTime": format_time(at(-1))}
    started = {} if suspended == "True" else {"startTime": format_time(NOW)}
    job = child_job(status={"conditions": [condition]} | started)
    pod = child_pod(0, deleting=True)
    assert (diagnosis(pod, job=job, seconds=6, since=since) is not None) is (taken and suspended == "False")
    condition["lastTransitionTime"] = format_time(NOW)
    assert diagnosis(pod, job=job, seconds=6) is None, "it was deleted in that second"


async def test_deleted_pod_is_not_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = ReconcilerHarness()
    await harness.train()
    pod = harness.pods()[1]["metadata"]
    await harness.cluster.delete("Pod", "default", pod["name"], uid=pod["uid"])
    await harness.settle()
    failure = present(harness.status.last_failure)
    assert failure.category == "PodDeleted"
    assert harness.status.counts.counted == 0
