"""Elastic jobs: the effects of a change of size and of a lost pod, and the status meanwhile."""

from __future__ import annotations

import dataclasses
from copy import deepcopy
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api.status import Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.decide import decide
from ddp_operator.decide.diagnosis import list_restart_failures
from ddp_operator.decide.state import AT_ONCE, Decision, ResizeJob
from ddp_operator.manifests.children import build_children
from ddp_pod.contract.plan import decode_plan
from tests.support.builders import NOW, child_job, child_pod, decode, job, last_words, observe, page
from tests.support.decisions import present, read_state, run_pass
from tests.support.fake_cluster import ReconcilerHarness

ELASTIC = {"minNodes": 2, "maxNodes": 4}
TRAINING = page(step=7, total_steps=10, phase="Running")
JOB = child_job(nodes=3)
STARTED = Status(attempt=1, job_name="train-1", start_time=NOW).remember(nodes=3)


run = partial(run_pass, status=STARTED, jobs=(JOB,), seconds=0, nodes=3, elastic=ELASTIC)


class TestSize:
    def test_resize_is_recorded_before_job_is_resized(self) -> None:
        decision = run(child_pod(0), child_pod(1), child_pod(2), nodes=4)
        assert (decision.status.attempt, decision.status.attempt_nodes) == (1, 4)
        assert (decision.actions, decision.requeue_after) == ((), AT_ONCE)
        assert decision.status.counts.total == 0
        assert read_state(decision, "Restarting") == ("True", "Resized")
        following = run(child_pod(0), child_pod(1), child_pod(2), nodes=4, status=decision.status)
        assert following.actions == (ResizeJob("train-1", 4),)
        done = run(child_pod(0), child_pod(1), nodes=4, status=decision.status, jobs=[child_job(nodes=4)])
        assert done.actions == ()

    @pytest.mark.parametrize("nodes", [2, 4])
    def test_resize_of_queued_running_job_waits(self, nodes: int) -> None:
        admitted = child_job(nodes=3)
        admitted["spec"]["template"] = {"metadata": {"labels": {"kueue.x-k8s.io/podset": "main"}}}
        for queued in (child_job(nodes=3, queue="q"), admitted):
            decision = run(child_pod(0), child_pod(1), child_pod(2), nodes=nodes, jobs=[queued])
            assert (decision.status.attempt, decision.status.attempt_nodes, decision.actions) == (1, 3, ())
            failed = run(*[child_pod(n, "Failed", code=1) for n in range(3)], nodes=nodes, jobs=[queued])
            assert (failed.status.attempt, failed.status.attempt_nodes) == (2, 3), "also through a restart"

    def test_resize_of_elastic_kueue_job_is_immediate(self) -> None:
        elastic = child_job(nodes=3, queue="q")
        elastic["spec"]["template"] = {"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/elastic-job"}]}}
        decision = run(child_pod(0), child_pod(1), child_pod(2), nodes=4, jobs=[elastic])
        assert (decision.status.attempt, decision.status.attempt_nodes) == (1, 4)
        partly = deepcopy(elastic)
        partly["metadata"]["annotations"]["kueue.x-k8s.io/job-min-parallelism"] = "2"
        assert run(child_pod(0), nodes=4, jobs=[partly]).status.attempt_nodes == 3, "it is of the size Kueue gave it"

    @pytest.mark.parametrize(("nodes", "has_run", "taken"), [(4, False, 4), (2, False, 2), (2, True, 2), (4, True, 3)])
    def test_resize_of_waiting_job_keeps_its_queue_position(self, nodes: int, has_run: bool, taken: int) -> None:
        """An attempt that has run should continue with its pods; it could wait without end for more."""
        status = replace(STARTED, first_run_time=NOW) if has_run else STARTED
        waiting = [child_job(nodes=3, queue="q", suspend=True, written=False)]
        decision = run(nodes=nodes, jobs=waiting, status=status)
        assert (decision.status.attempt, decision.status.attempt_nodes) == (1, taken)
        following = run(nodes=nodes, jobs=waiting, status=decision.status)
        assert following.actions == (() if taken == 3 else (ResizeJob("train-1", taken),))

    def test_waiting_resize_is_applied_on_resume(self) -> None:
        assert run(nodes=4, suspend=True, jobs=[child_job(nodes=3, queue="q")]).status.attempt == 2

    def test_resize_of_gang_starts_another_attempt(self) -> None:
        """The API server refuses to change the parallelism of such a Job."""
        pods = [child_pod(index, spec={"schedulingGroup": {"podGroupName": "g"}}) for index in range(3)]
        decision = run(*pods, nodes=4)
        assert (decision.status.attempt, decision.status.attempt_nodes) == (2, 4)
        without_pods = run(nodes=4, jobs=[child_job(nodes=3, gang="train-1")])
        assert without_pods.status.attempt == 2
        assert (decision.status.counts.free, decision.status.counts.counted) == (1, 0)

    @pytest.mark.parametrize("view", [{"deleting": True}, {"conditions": {"Failed": ""}}])
    def test_resize_of_ended_job_is_ignored(self, view: Any) -> None:
        status = replace(STARTED).remember(nodes=4)
        decision = run(child_pod(0), nodes=4, status=status, jobs=[child_job(nodes=3, **view)])
        assert not [action for action in decision.actions if isinstance(action, ResizeJob)]

    def test_restart_for_resize_is_no_failure(self) -> None:
        """A script that saves and stops when a pod is removed ends in all pods, with 85."""
        joined = c.merge_conditions((), [c.Fact(c.RENDEZVOUSED, "True", c.ALL_RANKS_JOINED)], NOW, 1)
        pods = [child_pod(0), child_pod(1), child_pod(2)]
        seconds = 0

        def train(status: Status, text: str) -> Status:
            nonlocal seconds
            seconds += 5
            typed = job(status=status, nodes=2 if seconds > 5 else 3, elastic=ELASTIC)
            seen = observe(typed, [JOB], pods, decode(text))
            reported = list_restart_failures([(pod, decode(text)) for pod in seen.pods])
            seen = dataclasses.replace(seen, failures_in_place=reported)
            return decide(typed, seen, NOW + timedelta(seconds=seconds)).status

        before = train(replace(STARTED, conditions=joined), page(step=50, phase="Running", restarts=0))
        resized = train(before, page(step=60, phase="Running", restarts=0))
        waiting = train(resized, page(step=70, steps=70, phase="Running", restarts=0))
        for status in (resized, waiting):
            assert (present(status.last_restart).cause, present(status.last_restart).level) == ("Resized", None)
            assert present(status.last_restart).recovery_seconds is None, "the former workers still train"
        stopped = last_words("Preempted", exitCode=85, restarts=1)
        restarted = train(waiting, page(step=70, phase="Rendezvous", restarts=1, answered=stopped))
        text = page(step=72, steps=1, phase="Running", restarts=1, answered=stopped)
        after = train(restarted, text)
        assert after.last_failure is None
        assert (after.counts.in_place, after.counts.all, after.counts.counted) == (1, 0, 0)
        assert after.last_restart is not None
        assert (after.last_restart.cause, after.last_restart.level) == ("Resized", "SamePods")
        assert (after.last_restart.step, after.last_restart.recovery_seconds) == (70, 15)

    async def test_resize_grows_and_shrinks_in_one_attempt(self) -> None:
        harness = await ReconcilerHarness(nodes=2, elastic=ELASTIC).train(TRAINING)
        for nodes in (4, 3):
            harness.edit(nodes=nodes)
            await harness.train(TRAINING)
            assert (harness.status.attempt, harness.status.attempt_nodes, harness.jobs()) == (1, nodes, ["train-1"])
            assert (harness.status.phase, len(harness.pods())) == ("Running", nodes)
        assert harness.status.counts.total == 0
        expected = [event.message for event in harness.cluster.events if event.reason == "Resized"]
        assert expected == [
            f"resized from {then} to {now} nodes; the other pods keep running" for then, now in ((2, 4), (4, 3))
        ]


class TestLoss:
    def test_lost_pod_keeps_attempt_above_min_nodes(self) -> None:
        decision = run(child_pod(0), child_pod(1), child_pod(2, disrupted=True, deleting=True))
        assert decision.status.attempt == 1

    @pytest.mark.parametrize("lost", [(0,), (1, 2)], ids=["the pod where they meet", "too many"])
    def test_lost_pod_0_or_too_many_pods_restart_without_counting(self, lost: tuple[int, ...]) -> None:
        pods = [child_pod(index, disrupted=index in lost, deleting=index in lost) for index in range(3)]
        decision = run(*pods)
        assert (decision.status.attempt, decision.status.counts.free) == (2, 1)

    def test_training_peers_end_restart(self) -> None:
        pods = (child_pod(0), child_pod(1), child_pod(2, "Pending"))
        before = run(*pods[:2], child_pod(2), text=TRAINING).status
        meeting = run(*pods, status=before, text=page(step=7, phase="Rendezvous"))
        assert read_state(meeting, "Restarting") == ("True", "PodReplacement")
        again = run(*pods, status=meeting.status, text=TRAINING)
        assert read_state(again, "Rendezvoused") == ("True", "EnoughRanksJoined")
        assert read_state(again, "Progressing") == ("True", "Training")
        assert read_state(again, "Restarting") == ("False", "NotRestarting")
        assert again.status.phase == "Running"
        between_pages = run(*pods, status=again.status)
        assert between_pages.status.phase == "Running"
        whole = run(*pods[:2], child_pod(2), status=again.status, text=TRAINING)
        assert read_state(whole, "Rendezvoused") == ("True", "AllRanksJoined")


class TestLateComers:
    """Pods that start after their peers have finished would wait for pod 0 until joinTimeoutSeconds."""

    def over(self, *pods: Any, seconds: float, **spec: Any) -> Decision:
        typed = job(status=STARTED, **{"nodes": 3, "elastic": ELASTIC, **spec})
        return decide(typed, observe(typed, (JOB,), pods), NOW + timedelta(seconds=seconds))

    @pytest.mark.parametrize("late", [child_pod(2), child_pod(2, "Pending")])
    def test_late_joiners_do_not_delay_success(self, late: Any) -> None:
        pods = (child_pod(0, "Succeeded"), child_pod(1, "Succeeded"), late)
        waiting = self.over(*pods, seconds=10)
        assert waiting.status.phase in ("Running", "Pending")
        assert waiting.requeue_after is not None
        assert waiting.requeue_after <= 20
        ended = self.over(*pods, seconds=30)
        assert ended.status.phase == "Succeeded"
        result = present(ended.status.condition(c.SUCCEEDED))
        assert result.message == "2/3 pods succeeded; 1 joined after the end of training"

    def test_late_joiners_are_ignored_after_failure(self) -> None:
        pods = (child_pod(0, "Succeeded"), child_pod(1, "Failed", code=82, message=last_words("OOM")), child_pod(2))
        assert self.over(*pods, seconds=900).status.phase == "Restarting"


def test_plan_has_bounds_and_size() -> None:
    *_, child = build_children(job(nodes=3, elastic=ELASTIC), attempt=1, nodes=3)
    [trainer] = child["spec"]["template"]["spec"]["containers"]
    env = {item["name"]: item.get("value") for item in trainer["env"]}
    plan = decode_plan(env["DDP_LAUNCHER_CONFIG"])
    assert (plan.nodes, plan.elastic, plan.min_nodes, plan.max_nodes) == (3, True, 2, 4)
    assert (child["spec"]["completions"], child["spec"]["parallelism"]) == (3, 3)
