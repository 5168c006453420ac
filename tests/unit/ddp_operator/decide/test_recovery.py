"""The level of recovery, its cost, and its end: disruptions, lost nodes, budgets and crash loops."""

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import CheckpointStatus, LastFailure, Progress, RestartCounts, Status
from ddp_operator.decide import losses
from ddp_operator.decide.attempts import compute_start_delay
from ddp_operator.decide.decide import decide
from ddp_operator.decide.diagnosis import build_node_failure
from ddp_operator.decide.job_events import list_transition_events
from ddp_operator.decide.state import AT_ONCE, Decision, FailPod, State
from ddp_operator.decide.views import NodeView
from ddp_operator.reading.objects import view_node, view_pod
from tests.support.builders import NOW, child_job, child_pod, job, last_words, observe
from tests.support.decisions import present, read_state, run_pass

STARTED = Status(attempt=1, job_name="train-1", start_time=NOW - timedelta(hours=1)).remember(nodes=2)
JOB = child_job()
FAILED = child_job(conditions={"FailureTarget": "exit code 86"})
NOT_READY = NodeView(False, "the node is not ready: Kubelet stopped posting node status.")
READY = NodeView(True, "")
FORBIDDEN = NodeView(None, "")
PEER_LOST = last_words("NCCL", secondary=True)


def run(*pods: Any, nodes: Any = None, page_text: str = "", **more: Any) -> Decision:
    return run_pass(*pods, text=page_text, observed={"nodes": nodes or {}}, **({"status": STARTED} | more))


def failure(decision: Decision) -> LastFailure:
    assert decision.status.last_failure is not None
    return decision.status.last_failure


def failed_pod(code: int = 82, index: int = 0, category: str = "CUDAError", **changes: Any) -> dict[str, Any]:
    return child_pod(index, "Failed", code=code, message=last_words(category, podIndex=index, **changes))


def known(at: int, saved: int = 0, **restarts: Any) -> Status:
    """Return the status of a job with these steps."""
    made = CheckpointStatus(step=saved) if saved else None
    return replace(STARTED, progress=Progress(step=at), checkpoint=made).remember(restarts=RestartCounts(**restarts))


class TestDisruption:
    def test_deleted_pod_is_not_counted(self) -> None:
        decision = run(child_pod(0), child_pod(1, deleting=True, grace=150))
        assert (decision.status.attempt, decision.status.counts.free) == (2, 1)

    @pytest.mark.parametrize(
        ("seconds", "steps", "delays"), [(60, 0, [0, 0, 0, 10, 20]), (60, 1, [0] * 5), (300, 0, [0] * 5)]
    )
    def test_next_attempt_is_delayed_after_disruptions_in_a_row(
        self, seconds: int, steps: int, delays: list[int]
    ) -> None:
        status = STARTED
        observed = []
        for number, delay in enumerate(delays):
            now = NOW + number * timedelta(seconds=seconds)
            typed = job(status=replace(status, progress=Progress(step=10 + number * steps)), nodes=2)
            lost = child_pod(1, disrupted=True, attempt=status.attempt)
            status = decide(typed, observe(typed, [child_job(status.attempt)], [child_pod(0), lost]), now).status
            observed.append(compute_start_delay(status).total_seconds())
            restarting = present(status.condition("Restarting"))
            assert (f"not counted in {delay} s" in restarting.message) is (delay > 0)
        assert (observed, status.counts.free) == (delays, 5)

    def test_disruptions_are_counted_if_configured(self) -> None:
        decision = run(child_pod(0), child_pod(1, disrupted=True), recovery={"countDisruptions": True})
        assert decision.status.counts == RestartCounts(total=1, counted=1, used=1, without_progress=1)
        none = {"countDisruptions": True, "maxRestarts": 0}
        assert run(child_pod(0), child_pod(1, disrupted=True), recovery=none).status.phase == "Failed"

    @pytest.mark.parametrize("jobs", [[FAILED], [JOB]], ids=["Job failed", "not yet"])
    def test_that_ends_its_peers_is_free(self, jobs: Any) -> None:
        secondary = child_pod(0, "Failed", code=86, message=PEER_LOST)
        decision = run(secondary, child_pod(1, disrupted=True, deleting=True, grace=150), jobs=jobs)
        assert (decision.status.attempt, decision.status.counts.counted) == (2, 0)
        assert failure(decision).category == "Preempted"

    def test_broken_collective_of_peers_is_secondary_failure(self) -> None:
        decision = run(failed_pod(category="NCCL"), child_pod(1, disrupted=True), jobs=[FAILED])
        assert (failure(decision).category, decision.status.counts.counted) == ("Preempted", 0)

    def test_disruption_does_not_excuse_failure(self) -> None:
        decision = run(failed_pod(category="CUDAError"), child_pod(1, disrupted=True), jobs=[FAILED])
        assert (failure(decision).category, decision.status.counts.counted) == ("CUDAError", 1)

    def test_pod_that_was_deleted_before_job_failed_is_cause(self) -> None:
        secondary = child_pod(0, "Failed", code=86, message=PEER_LOST)
        gone = child_pod(1, "Failed", code=85, deleting=True, grace=9, at=NOW - timedelta(seconds=5))
        decision = run(secondary, gone, jobs=[FAILED], seconds=20)
        assert (decision.status.counts.counted, failure(decision).pod_index) == (0, 1)

    def test_pods_deleted_by_failed_job_are_not_cause(self) -> None:
        secondary = child_pod(0, "Failed", code=86, message=PEER_LOST)
        stopped = child_pod(1, "Failed", code=85, deleting=True, grace=9, at=NOW + timedelta(seconds=1))
        assert run(secondary, stopped, jobs=[FAILED], seconds=20).status.counts.counted == 1

    @pytest.mark.parametrize("job", [{"suspend": True}, {"deleting": True}, {"conditions": {"Complete": ""}}])
    def test_pods_deleted_with_stopped_job_are_no_loss(self, job: Any) -> None:
        decision = run(child_pod(0), child_pod(1, deleting=True), jobs=[child_job(**job)])
        assert decision.status.attempt == 1

    def test_pod_that_never_ran_starts_no_attempt(self) -> None:
        assert run(child_pod(0), child_pod(1, "Pending", deleting=True)).status.attempt == 1

    def test_replaced_running_pod_is_no_loss(self) -> None:
        old = child_pod(1, "Failed", code=137, suffix="aaaaa")
        assert run(child_pod(0), old, child_pod(1, suffix="bbbbb")).status.attempt == 1

    @pytest.mark.parametrize("about", [{"queue": "q"}, {"written": False}])
    def test_secondary_failure_after_queue_stopped_peer_is_free(self, about: Any) -> None:
        secondary = child_pod(0, "Failed", code=86, message=PEER_LOST)
        preempted = child_job(suspend=True, conditions={"Failed": "words"}, **about)
        decision = run(secondary, jobs=[preempted])
        assert (decision.status.attempt, decision.status.counts) == (2, RestartCounts(total=1, free=1))
        assert read_state(decision, "Restarting") == ("True", "Disrupted")


class TestSuspendedRecovery:
    def resumed(self, *pods: Any, jobs: Any = (FAILED,), **spec: Any) -> Decision:
        suspended = run(jobs=[child_job(suspend=True)], suspend=True).status
        return run(*pods, jobs=jobs, status=suspended, **spec)

    def test_secondary_failure_while_suspending_is_free_on_resume(self) -> None:
        secondary = child_pod(0, "Failed", code=86, message=PEER_LOST)
        for pods in ((secondary,), ()):
            decision = self.resumed(*pods)
            assert (decision.status.attempt, decision.status.counts) == (2, RestartCounts(total=1, free=1))
            assert read_state(decision, "Restarting") == ("True", "Resumed")

    def test_job_resumed_before_pod_deletion_has_no_failure(self) -> None:
        stopping = run(child_pod(0), jobs=[child_job(suspend=True)], suspend=True).status
        decision = run(child_pod(0, "Failed", code=86, message=PEER_LOST), jobs=[FAILED], status=stopping, seconds=20)
        assert decision.status.counts.free == 1

    def test_root_cause_while_suspending_still_counts(self) -> None:
        assert self.resumed(failed_pod()).status.counts.counted == 1


class TestBudget:
    def test_is_renewed_by_checkpoints_beyond_last_failures(self) -> None:
        before = known(2500, 2400, total=3, counted=3, used=3, step=1300, checkpoint_step=1400)
        decision = run(failed_pod(), jobs=[FAILED], status=before)
        assert decision.status.attempt == 2
        assert (decision.status.counts.counted, decision.status.counts.used) == (4, 1)
        assert decision.status.counts.checkpoint_step == 2400

    def test_budget_is_not_renewed_by_unsaved_steps(self) -> None:
        before = known(2500, 2399, total=3, counted=3, used=3, step=1300, checkpoint_step=1400)
        assert read_state(run(failed_pod(), jobs=[FAILED], status=before), "Failed") == (
            "True",
            "RestartBudgetExhausted",
        )


class TestCrashLoop:
    def fail(self, *steps: int, jobs: Any = (FAILED,), **spec: Any) -> Decision:
        """Fail one attempt after the other, each at one of these steps."""
        status = STARTED
        decision = run()
        for step in steps:
            status = replace(status, attempt=1, progress=Progress(step=step) if step else None)
            decision = run(failed_pod(), jobs=jobs, status=status, recovery={"maxRestarts": 9}, **spec)
            status = decision.status
        return decision

    @pytest.mark.parametrize("steps", [(0, 0, 0), (30, 30, 25, 30)])
    def test_crash_loop_ends_job_before_budget(self, steps: tuple[int, ...]) -> None:
        decision = self.fail(*steps)
        assert read_state(decision, "Failed") == ("True", "CrashLoop")
        condition = present(decision.status.condition("Failed"))
        where = "beyond step 30" if steps[0] else "before the first step"
        assert condition.message.startswith(f"failed 3 times in a row without progress {where}; last: CUDAError")

    @pytest.mark.parametrize("steps", [(0, 0), (10, 20, 30, 40), (30, 30, 30, 31, 31, 31)])
    def test_progress_prevents_crash_loop(self, steps: tuple[int, ...]) -> None:
        assert self.fail(*steps).status.phase == "Restarting"

    def test_is_none_for_script_without_metrics_that_lasts(self) -> None:
        status = STARTED
        for _ in range(5):
            pod = child_pod(0, "Failed", code=82, message=last_words("CUDAError"), age=400)
            decision = run(pod, jobs=[FAILED], status=replace(status, attempt=1), recovery={"maxRestarts": 9})
            status = decision.status
        assert (status.phase, status.counts.counted) == ("Restarting", 5)


class TestRepeatedFailure:
    SIGNATURE = "KeyError at train.py:42"

    def again(self, step: int | None, *, before: int | None = 10, status: Status = STARTED, **words: Any) -> Decision:
        """Fail an attempt with the previous message, or with ``words``."""
        last = LastFailure(attempt=1, category="UserError", signature=self.SIGNATURE, step=before, pod="train-1-1-x")
        members = {"signature": self.SIGNATURE, "step": step} | words
        attempt = replace(status, attempt=2, job_name="train-2", last_failure=last)
        pod = child_pod(1, "Failed", attempt=2, code=82, message=last_words("UserError", **members))
        return run(pod, status=attempt, jobs=[child_job(2, conditions={"FailureTarget": ""})])

    @pytest.mark.parametrize(("before", "step"), [(10, 10), (10, 9), (None, None)])
    def test_repeated_failure_ends_job_with_message(self, before: int | None, step: int | None) -> None:
        decision = self.again(step, before=before)
        assert read_state(decision, "Failed") == ("True", "RepeatedFailure")
        condition = present(decision.status.condition("Failed"))
        assert condition.message.startswith(
            "not restarted: KeyError at train.py:42 occurred twice without progress in between; last: UserError"
        )

    @pytest.mark.parametrize(
        ("step", "words"), [(11, {}), (10, {"signature": "KeyError at train.py:43"}), (10, {"signature": ""})]
    )
    def test_is_none_with_progress_or_where_something_else_failed(self, step: int, words: dict[str, Any]) -> None:
        assert self.again(step, **words).status.phase == "Restarting"

    @pytest.mark.parametrize(("reached", "phase"), [(11, "Restarting"), (10, "Failed")])
    def test_repetition_uses_step_of_pod_0_if_rank_reports_none(self, reached: int, phase: str) -> None:
        status = replace(STARTED, progress=Progress(step=reached)).remember(restarts=RestartCounts(step=10))
        assert self.again(None, before=None, status=status).status.phase == phase

    def test_same_observation_is_no_repetition(self) -> None:
        first = self.again(10, signature="another")
        failure_ = failure(first)
        seen = replace(failure_, signature=self.SIGNATURE)
        pod = child_pod(1, "Failed", code=82, message=last_words("UserError", signature=self.SIGNATURE, step=10))
        decision = run(pod, status=replace(STARTED, last_failure=replace(seen, attempt=1, pod="train-1-1-abcde")))
        assert decision.status.phase == "Restarting"

    def test_repetition_within_pod_is_reported_by_pod(self) -> None:
        words = last_words("UserError", signature=self.SIGNATURE, step=10, repeated=True, restarts=1)
        decision = run(child_pod(0), child_pod(1, "Failed", code=81, message=words), jobs=[FAILED])
        assert read_state(decision, "Failed") == ("True", "RepeatedFailure")
        assert decision.status.counts == RestartCounts(in_place=1)
        assert (failure(decision).signature, failure(decision).step) == (self.SIGNATURE, 10)

    def test_crash_loop_uses_step_of_failed_rank_not_of_page(self) -> None:
        status = STARTED
        for sampled in (10, 11, 12, 13):
            status = replace(status, attempt=1, progress=Progress(step=sampled))
            decision = run(failed_pod(step=10), jobs=[FAILED], status=status, recovery={"maxRestarts": 9})
            status = decision.status
        assert read_state(decision, "Failed") == ("True", "CrashLoop")


class TestCounts:
    def test_restarts_in_place_of_all_attempts_are_counted_once(self) -> None:
        status = STARTED
        for in_place in (2, 0, 1):
            status = replace(status, attempt=1)
            pods = [
                failed_pod(restarts=in_place, step=in_place),
                child_pod(1, "Failed", code=86, message=last_words("NCCL", secondary=True, restarts=in_place)),
            ]
            status = run(*pods, jobs=[FAILED], status=status, recovery={"maxRestarts": 9}).status
        assert (status.phase, status.counts.in_place, status.counts.in_place_before) == ("Failed", 3, 2)
        assert (status.counts.total, status.counts.all, status.counts.counted) == (2, 5, 4)


class TestLostNode:
    STUCK = child_pod(1, deleting=True, grace=150, node="node-b")

    def test_node_is_read_only_for_overdue_deleted_pod(self) -> None:
        typed = job(status=STARTED, nodes=2)
        seen = observe(typed, [JOB], [child_pod(0), self.STUCK])
        assert losses.list_nodes_to_inspect(typed, seen, NOW + timedelta(seconds=119)) == ()
        assert losses.list_nodes_to_inspect(typed, seen, NOW + timedelta(seconds=120)) == ("node-b",)
        assert losses.compute_next_check(State(typed, seen, NOW + timedelta(seconds=100))) == 20

    @pytest.mark.parametrize(
        ("node", "seconds", "freed"),
        [
            (NOT_READY, 119, False),
            (NOT_READY, 120, True),
            (view_node(None), 120, True),
            (READY, 9999, False),
            (FORBIDDEN, 269, False),
            (FORBIDDEN, 270, True),
        ],
        ids=["patience", "not ready", "gone", "ready", "unknown, in its grace time", "unknown, long after it"],
    )
    def test_frees_its_pod_after_configured_time(self, node: NodeView, seconds: float, freed: bool) -> None:
        status = replace(STARTED, attempt=2, failed_nodes=("node-b",))
        decision = run(self.STUCK, status=status, jobs=[FAILED], seconds=seconds, nodes={"node-b": node})
        results = [action for action in decision.actions if isinstance(action, FailPod)]
        assert [action.uid for action in results] == (["uid-train-1-1-abcde"] if freed else [])
        assert decision.requeue_after is not None

    def test_is_in_ledger_before_its_pod_is_touched(self) -> None:
        status = replace(STARTED, attempt=2)
        first = run(self.STUCK, status=status, jobs=[FAILED], seconds=121, nodes={"node-b": NOT_READY})
        assert (first.actions, first.requeue_after) == ((), AT_ONCE)
        assert first.status.failed_nodes == ("node-b",)
        second = run(self.STUCK, status=first.status, jobs=[FAILED], seconds=121, nodes={"node-b": NOT_READY})
        assert [action for action in second.actions if isinstance(action, FailPod)]

    @pytest.mark.parametrize(("category", "explained"), [("NCCL", True), ("Unknown", True), ("CUDAError", False)])
    def test_replaces_secondary_failure_in_ledger(self, category: str, explained: bool) -> None:
        status = replace(
            STARTED,
            attempt=2,
            last_failure=LastFailure(attempt=1, category=category),
        ).remember(restarts=RestartCounts(total=3, counted=3, used=2, free=1, without_progress=2))
        decision = run(self.STUCK, status=status, jobs=[FAILED], seconds=121, nodes={"node-b": NOT_READY})
        result = failure(decision)
        restarts = decision.status.counts
        assert (result.category == "NodeLost") is explained
        charged = (restarts.counted, restarts.used, restarts.free, restarts.without_progress)
        assert charged == ((2, 1, 2, 1) if explained else (3, 2, 1, 2))
        if explained:
            assert (result.attempt, result.node_name, result.pod) == (1, "node-b", "train-1-1-abcde")
            assert "Kubelet stopped posting" in result.message

    @pytest.mark.parametrize(("last_step", "freed"), [(-10, True), (10, False), (None, False)])
    def test_silent_pod_is_declared_failed_where_steps_have_stopped(self, last_step: float | None, freed: bool) -> None:
        moment = None if last_step is None else NOW + timedelta(seconds=last_step)
        status = replace(STARTED, progress=Progress(step=5, last_step_time=moment))
        silent = child_pod(1, unready=NOW, node="node-b")
        decision = run(child_pod(0), silent, status=status, seconds=121, nodes={"node-b": NOT_READY})
        assert (decision.status.failed_nodes == ("node-b",)) is freed

    @pytest.mark.parametrize("nodes", [{}, {"node-b": NOT_READY}, {"node-b": FORBIDDEN}], ids=["no", "yes", "may not"])
    def test_lost_node_is_not_counted_despite_earlier_secondary_failure(self, nodes: Any) -> None:
        """The peer's connection breaks at once, the node is found not ready 50 seconds later."""
        peer = child_pod(0, "Failed", code=86, message=PEER_LOST)
        once = {"recovery": {"maxRestarts": 0, "inPlaceRestarts": 0}}
        stuck = child_pod(1, deleting=True, grace=30, node="node-b")
        early = run(peer, stuck, jobs=[FAILED], seconds=45, **once)
        assert (early.status.last_failure, early.status.attempt) == (None, 1)
        assert read_state(early, "Progressing") == ("False", "WaitingForPeers")
        assert early.requeue_after == 5
        silent = child_pod(1, deleting=True, grace=30, node="node-b", unready=NOW + timedelta(seconds=50))
        result = run(peer, silent, jobs=[FAILED], seconds=51, status=early.status, nodes=nodes, **once)
        assert (failure(result).category, failure(result).node_name) == ("NodeLost", "node-b")
        assert (result.status.attempt, result.status.counts.free, result.status.failed_nodes) == (2, 1, ("node-b",))
        back = run(peer, silent, jobs=[FAILED], seconds=55, status=early.status, nodes={"node-b": READY}, **once)
        assert back.status.last_failure is None
        over = run(peer, silent, jobs=[FAILED], seconds=61, status=early.status, nodes={"node-b": READY}, **once)
        assert (over.status.phase, read_state(over, "Failed")) == ("Failed", ("True", "RestartBudgetExhausted"))

    def test_failure_with_hint_is_not_replaced_by_later_reports_of_pod(self) -> None:
        typed = job(status=STARTED, nodes=2)
        lost_pod = view_pod(self.STUCK)
        status = replace(
            STARTED, last_failure=build_node_failure(1, lost_pod, NOT_READY.message, NOW), failed_nodes=("node-b",)
        )
        gone = child_pod(1, "Failed", disrupted="DeletionByTaintManager", node="node-b")
        decision = run(child_pod(0), gone, status=status)
        assert decision.status.attempt == 2
        assert failure(decision) == status.last_failure
        assert "Kubelet stopped posting" in failure(decision).message
        reasons = [event.reason for event in list_transition_events(typed.status, decision.status)]
        assert reasons.count("FailureNodeLost") == 1
        assert "FailureNodeLost" not in [e.reason for e in list_transition_events(status, decision.status)]

    @pytest.mark.parametrize(
        ("grace", "reason", "again"), [(None, "NodeLost", True), (150, "NodeLost", True), (0, "NodeLost", False),
                                       (150, "Evicted", False)],
        ids=["not deleted", "in its grace time", "on its way", "another's word"],
    )  # fmt: skip
    def test_pod_that_was_declared_failed_and_not_removed_is_freed_again(
        self, grace: int | None, reason: str, again: bool
    ) -> None:
        deletion = {} if grace is None else {"deleting": True, "grace": grace}
        half = child_pod(1, "Failed", node="node-b", status={"reason": reason, "message": "silent"}, **deletion)
        decision = run(half, status=replace(STARTED, attempt=2, failed_nodes=("node-b",)), jobs=[FAILED])
        results = [action for action in decision.actions if isinstance(action, FailPod)]
        assert results == ([FailPod("train-1-1-abcde", "uid-train-1-1-abcde", "silent")] if again else [])

    def test_pod_deleted_by_taint_manager_or_pod_gc_was_lost_with_its_node(self) -> None:
        for reason in ("DeletionByTaintManager", "DeletionByPodGC"):
            decision = run(child_pod(0), child_pod(1, disrupted=reason, node="node-b"))
            assert (failure(decision).category, decision.status.failed_nodes) == ("NodeLost", ("node-b",))


class TestAvoidedNodes:
    WORDS = "0/2 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, 1 Insufficient cpu."

    def blocked(self, *, avoids: bool = True, message: str = WORDS) -> dict[str, Any]:
        terms = {
            "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["b"]}]}]
        }
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}} if avoids else {}
        waiting = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        stated = {"conditions": [waiting | {"lastTransitionTime": format_time(NOW)}]}
        return child_pod(0, "Pending", spec={"affinity": affinity}, status=stated)

    def test_are_admitted_again_where_scheduler_finds_no_other(self) -> None:
        status = replace(STARTED, failed_nodes=("b",))
        waiting = run(self.blocked(), status=status, seconds=50)
        assert (waiting.status.attempt, waiting.requeue_after) == (1, 10)
        decision = run(self.blocked(), status=status, seconds=60)
        assert (decision.status.attempt, decision.status.failed_nodes) == (2, ())
        assert decision.status.counts == RestartCounts(total=1, free=1)
        assert read_state(decision, "Restarting") == ("True", "NodesReadmitted")

    def test_other_scheduling_problem_keeps_avoided_nodes(self) -> None:
        status = replace(STARTED, failed_nodes=("b",))
        for pod in (self.blocked(message="0/2 nodes are available: 2 Insufficient cpu."), self.blocked(avoids=False)):
            assert run(pod, status=status, seconds=999).status.attempt == 1
