"""Deadlines, the pods that must succeed, the acknowledgement of a suspension, and the objects that remain."""

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api import constants
from ddp_operator.api.kubeobjects import format_time, parse_time
from ddp_operator.api.status import Status
from ddp_operator.decide.job_events import list_transition_events
from ddp_operator.decide.state import Decision
from ddp_operator.decide.transitions import Doubted, find_transitions
from ddp_operator.manifests.children import build_children
from ddp_pod.contract.group_facts import (
    ALONE,
    DIFFERENT,
    LOST_LOSS,
    SAME_DATA,
    SEPARATE,
    TOGETHER,
    UNKNOWN,
    WAITING,
    GroupFacts,
)
from ddp_pod.contract.records import to_json
from tests.support.builders import NOW, child_job, child_pod, job, last_words, page
from tests.support.decisions import present, run_pass
from tests.support.fake_cluster import ReconcilerHarness

STARTED = Status(attempt=1, job_name="train-1", start_time=NOW, attempt_time=NOW).remember(nodes=2)
TRAINING = page(step=7, total_steps=10, checkpoint_step=5, phase="Running")


run = partial(run_pass, status=STARTED)


def queued(**changes: Any) -> Any:
    """Return a Job that Kueue suspended or resumed now."""
    made = child_job(queue="q", written=False, **changes)
    now = {"type": "Suspended", "status": str(made["spec"]["suspend"]), "lastTransitionTime": format_time(NOW)}
    made["status"]["conditions"] = made["status"]["conditions"] or [now]
    return made


def condition(decision: Decision, kind: str) -> tuple[str, str, str]:
    result = present(decision.status.condition(kind))
    return result.status, result.reason, result.message


class TestPendingDeadline:
    WAITING = child_pod(1, "Pending", status={"conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no GPU."}
    ]})  # fmt: skip

    def test_pending_deadline_fails_job_with_last_obstacle(self) -> None:
        waiting = run(child_pod(0), self.WAITING, pendingDeadlineSeconds=60, seconds=50)
        assert (waiting.status.phase, waiting.requeue_after) == ("Pending", 10)
        ended = run(child_pod(0), self.WAITING, status=waiting.status, pendingDeadlineSeconds=60, seconds=60)
        assert condition(ended, "Failed")[:2] == ("True", "PendingDeadlineExceeded")
        assert condition(ended, "Failed")[2] == (
            "not all pods were running within pendingDeadlineSeconds (60); last: 1/2 pods scheduled"
        )

    def test_pending_deadline_names_unpullable_image(self) -> None:
        waiting = {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
        pod = child_pod(1, "Pending", node="n", status={"containerStatuses": [waiting]})
        failure = present(run(child_pod(0), pod, pendingDeadlineSeconds=60, seconds=60).status.last_failure)
        assert (failure.category, failure.pod_index, failure.message) == ("ImagePull", 1, "no such image")

    def test_pending_deadline_ends_once_all_pods_have_run(self) -> None:
        for pods in ((child_pod(0), child_pod(1)), (child_pod(0), child_pod(1, "Succeeded"))):
            assert run(*pods, pendingDeadlineSeconds=60, seconds=999).status.phase == "Running"

    def test_pending_deadline_restarts_with_attempt_and_resumption(self) -> None:
        failed = child_pod(0, "Failed", code=82, message=last_words("CUDAError"))
        second = run(failed, status=STARTED, pendingDeadlineSeconds=60, seconds=500).status
        assert second.attempt_time == NOW + timedelta(seconds=500)
        assert run(status=second, jobs=(), pendingDeadlineSeconds=60, seconds=559).status.phase == "Restarting"
        assert run(status=second, jobs=(), pendingDeadlineSeconds=60, seconds=560).status.phase == "Failed"
        suspended = run(jobs=[child_job(suspend=True)], suspend=True, pendingDeadlineSeconds=60, seconds=999).status
        assert suspended.phase == "Suspended"
        resumed = run(jobs=[child_job(suspend=True)], status=suspended, pendingDeadlineSeconds=60, seconds=1000)
        assert resumed.status.attempt_time == NOW + timedelta(seconds=1000)
        assert resumed.requeue_after == 60

    def test_pending_deadline_restarts_on_requeue_and_admission(self) -> None:
        """After an hour, a job that has trained is not failed because it must wait again."""
        hour = format_time(NOW - timedelta(hours=1))
        old = replace(STARTED, start_time=hour, attempt_time=hour)
        for waits in (queued(suspend=True), queued()):  # preempted now, or admitted now
            assert run(jobs=[waits], status=old, pendingDeadlineSeconds=60, seconds=59).requeue_after == 1
            ended = run(jobs=[waits], status=old, pendingDeadlineSeconds=60, seconds=60)
            assert condition(ended, "Failed")[1] == "PendingDeadlineExceeded"

    def test_pending_deadline_can_be_set_while_pending(self) -> None:
        assert run(child_pod(0), self.WAITING, seconds=999).status.phase == "Pending"
        assert run(child_pod(0), self.WAITING, pendingDeadlineSeconds=60, seconds=999).status.phase == "Failed"


class TestActiveDeadline:
    HOUR = replace(STARTED, start_time=NOW - timedelta(hours=1))

    def test_active_deadline_excludes_time_in_queue(self) -> None:
        waits = [queued(suspend=True)]
        for seconds in (1, 9999):
            decision = run(jobs=waits, status=self.HOUR, activeDeadlineSeconds=50, seconds=seconds)
            assert (decision.status.phase, condition(decision, "Scheduled")[1]) == ("Pending", "QuotaPending")
        admitted = [queued(status={"startTime": format_time(NOW)})]
        running = run(child_pod(0), child_pod(1), jobs=admitted, status=self.HOUR, activeDeadlineSeconds=50, seconds=49)
        assert running.status.phase == "Running"
        ended = run(child_pod(0), child_pod(1), jobs=admitted, status=self.HOUR, activeDeadlineSeconds=50, seconds=50)
        assert condition(ended, "Failed")[1] == "DeadlineExceeded"


def succeeded(index: int, **known: Any) -> Any:
    return child_pod(index, "Succeeded", message=last_words(**known))


def groups(state: str, message: str = "how the ranks train", **values: Any) -> dict[str, Any]:
    return {"groups": to_json(GroupFacts(state, 2, message, **values))}


def with_groups(facts: Mapping[str, Any]) -> str:
    """Return the page of a pod that makes steps, with a record of its process groups."""
    return page(step=3, phase="Running", groups=facts["groups"])


class TestProcessGroup:
    """Do the ranks train together?"""

    COMPLETE = child_job(conditions={"Complete": ""})

    @pytest.mark.parametrize(
        ("ends", "result"),
        [
            ((groups(TOGETHER), groups(TOGETHER)), ("True", "ProcessGroupOfAllRanks")),
            ((groups(ALONE), groups(ALONE)), ("False", "NoProcessGroup")),
            ((groups(ALONE), groups(SEPARATE)), ("False", "SeparateGroups")),
            ((groups(TOGETHER), groups(ALONE)), ("False", "NoProcessGroup")),
            ((groups(ALONE), {}), ("False", "NoProcessGroup")),
            ((groups(DIFFERENT), groups(TOGETHER)), ("False", "ReplicasDiffer")),
            ((groups(TOGETHER), groups(SAME_DATA)), ("False", "SameBatches")),
            ((groups(TOGETHER), {}), ("True", "ProcessGroupOfAllRanks")),
            ((groups(UNKNOWN), groups(UNKNOWN)), ("Unknown", "GroupUnknown")),
            (({}, {}), None),
            (({"groups": {"state": "Other", "worldSize": 2}}, {"groups": []}), ("Unknown", "GroupUnknown")),
        ],
    )  # fmt: skip
    def test_group_at_the_end_is_condition(self, ends: Any, result: tuple[str, str] | None) -> None:
        pods = [succeeded(index, **known) for index, known in enumerate(ends)]
        decision = run(*pods, jobs=[self.COMPLETE], processGroupPolicy="Warn")
        assert decision.status.phase == "Succeeded"
        distributed = decision.status.condition("TrainsAsOne")
        assert ((distributed.status, distributed.reason) if distributed else None) == result
        events = [event.reason for event in list_transition_events(STARTED, decision.status)]
        assert (result is not None and result[1] in events) is (distributed is not None and result[0] == "False")

    @pytest.mark.parametrize(
        ("facts", "result", "reason"),
        [
            (groups(TOGETHER), "True", ""),
            (groups(ALONE), "False", "NoProcessGroup"),
            (groups(SEPARATE), "False", "SeparateGroups"),
            (groups(WAITING, remedy="use RANK"), "False", "WaitingForGroup"),
            (groups(DIFFERENT, pod=1), "False", "ReplicasDiffer"),
            (groups(LOST_LOSS, pod=1), "False", "RankLossNotFinite"),
            (groups(SAME_DATA), "False", "SameBatches"),
            (groups(UNKNOWN), "Unknown", ""),
        ],
    )
    def test_group_is_condition_while_it_trains(self, facts: Any, result: str, reason: str) -> None:
        status = run(child_pod(0), child_pod(1), text=with_groups(facts), processGroupPolicy="Warn").status
        distributed = present(status.condition("TrainsAsOne"))
        assert distributed.status == result
        assert distributed.message.startswith("how the ranks train")
        assert ("use RANK" in distributed.message) is (reason == "WaitingForGroup")
        assert ("node-a" in distributed.message) is (reason in ("ReplicasDiffer", "RankLossNotFinite"))
        assert (status.phase, status.reason) == ("Running", reason)

    def test_group_of_former_ranks_is_forgotten_with_their_restart(self) -> None:
        before = run(child_pod(0), child_pod(1), text=with_groups(groups(WAITING))).status
        after = run(child_pod(0), child_pod(1), text=page(phase="Rendezvous"), status=before).status
        distributed = present(after.condition("TrainsAsOne"))
        assert (distributed.status, distributed.reason) == ("Unknown", "GroupUnknown")

    @pytest.mark.parametrize("state", [ALONE, SEPARATE, WAITING, TOGETHER, UNKNOWN])
    @pytest.mark.parametrize("policy", [{}, {"processGroupPolicy": "Fail"}, {"processGroupPolicy": "Ignore"}])
    def test_running_job_whose_ranks_train_apart_fails_unless_ignored(self, state: str, policy: dict[str, str]) -> None:
        text = with_groups(groups(state, remedy="write the script"))
        decision = run(child_pod(0), child_pod(1), text=text, **policy)
        is_failed = state in (ALONE, SEPARATE) and policy.get("processGroupPolicy") != "Ignore"
        assert (decision.status.phase == "Failed") is is_failed
        if is_failed:
            assert condition(decision, "Failed")[2] == "how the ranks train; write the script"

    @pytest.mark.parametrize(
        ("facts", "recovery", "result"),
        [
            (groups(DIFFERENT, rank=1, pod=1), {}, (1, ())),
            (groups(DIFFERENT, rank=1, pod=1), {"replicaMismatch": "Report"}, (1, ())),
            (groups(DIFFERENT, rank=1, pod=1), {"replicaMismatch": "Restart"}, (2, ("node-a",))),
            (groups(DIFFERENT), {"replicaMismatch": "Restart"}, (2, ())),
            (groups(LOST_LOSS, rank=1, pod=1), {"replicaMismatch": "Restart"}, (2, ("node-a",))),
            (groups(LOST_LOSS, rank=1, pod=1), {}, (1, ())),
            (groups(DIFFERENT, is_mistake=True), {"replicaMismatch": "Restart"}, (1, ())),
            (groups(SAME_DATA), {"replicaMismatch": "Restart"}, (1, ())),
            (groups(DIFFERENT, rank=1, pod=7), {"replicaMismatch": "Restart"}, (1, ())),
        ],
    )
    def test_replicas_that_differ_restart_without_the_node_of_the_rank(
        self, facts: Any, recovery: dict[str, Any], result: tuple[int, tuple[str, ...]]
    ) -> None:
        status = run(child_pod(0), child_pod(1), text=with_groups(facts), recovery=recovery).status
        assert (status.attempt, status.failed_nodes) == result
        assert status.counts.counted == status.attempt - 1

    @pytest.mark.parametrize(("rank", "result"), [(1, (1, "Failed")), (0, (2, "Restarting"))])
    def test_rank_that_loses_its_loss_again_after_a_restart_fails_the_job(
        self, rank: int, result: tuple[int, str]
    ) -> None:
        policy = {"replicaMismatch": "Restart"}
        text = with_groups(groups(LOST_LOSS, rank=1, pod=1))
        before = run(child_pod(0), child_pod(1), text=text, recovery=policy).status
        restarted = replace(STARTED, last_failure=before.last_failure)
        text = with_groups(groups(LOST_LOSS, rank=rank, pod=rank))
        after = run(child_pod(0), child_pod(1), text=text, status=restarted, recovery=policy).status
        assert (after.attempt, after.phase) == result

    def test_replicas_that_differ_fail_a_job_without_restarts(self) -> None:
        recovery = {"replicaMismatch": "Restart", "maxRestarts": 0}
        text = with_groups(groups(DIFFERENT, rank=1, pod=1))
        decision = run(child_pod(0), child_pod(1), text=text, recovery=recovery)
        assert condition(decision, "Failed")[1] == "RestartBudgetExhausted"

    def test_process_group_policy_fails_or_ignores_at_the_end(self) -> None:
        pods = succeeded(0, **groups(ALONE)), succeeded(1, **groups(ALONE))
        failed = run(*pods, jobs=[self.COMPLETE])
        assert failed.status.phase == "Failed"
        status, reason, message = condition(failed, "Failed")
        assert (status, reason) == ("True", "NoProcessGroup")
        assert message == "how the ranks train (the same in pods 0, 1)"
        differs = [succeeded(index, **groups(SAME_DATA)) for index in (0, 1)]
        assert run(*differs, jobs=[self.COMPLETE]).status.phase == "Succeeded"
        ignored = run(*pods, jobs=[self.COMPLETE], processGroupPolicy="Ignore")
        assert (ignored.status.phase, ignored.status.condition("TrainsAsOne")) == ("Succeeded", None)


class TestCompletion:
    """Did a job whose ranks have exited with 0 train to its end?"""

    STEPS = {"step": 10.0}
    SHORT = {"rank": 0, "step": 10.0, "total": 30.0}
    TRACE = {"rank": 1, "step": 10.0, "exception": "ValueError: bad", "secondary": False, "processes": []}
    LOST = {**SHORT, "exception": "RuntimeError: Connection closed by peer", "secondary": True}
    LEFT = {"rank": 0, "processes": ["python train.py"]}
    KEPT = {"rank": 1, "step": 10.0, "keeper": "thread uploader keeps its process alive"}
    NAN = {**STEPS, "lostLossStep": 7.0}

    @pytest.mark.parametrize(
        ("words", "reason", "parts"),
        [
            (({"progress": {**STEPS, "totalSteps": 10.0}}, {}), "AllStepsMade", ["step 10 of 10"]),
            (({"progress": STEPS}, {}), "TotalUnknown", []),
            (({}, {}), "NoStep", ["without a visible step"]),
            (({"progress": NAN}, {}), "LossNotFinite", ["the loss is nan since step 7", "last step was 10"]),
            (({"progress": STEPS, "ends": [SHORT]}, {}), "EndedShort", ["rank 0", "at step 10 of 30"]),
            (({"ends": [LEFT]}, {}), "ProcessesLeft", ["1 of its processes still ran: python train.py"]),
            (({"progress": STEPS}, {"ends": [KEPT]}), "EndedByLauncher", ["rank 1 ended", "because thread uploader"]),
            (({"ends": [SHORT]}, {"ends": [KEPT]}), "EndedShort", ["rank 0 ended", "so did 1 more"]),
            (({"ends": [{**KEPT, **TRACE}]}, {}), "TracebackAtEnd", ["because thread uploader"]),
            (({"ends": [LOST]}, {"ends": [TRACE]}), "TracebackAtEnd", ["rank 1", "ValueError: bad", "1 other rank"]),
            (({"ends": [{**TRACE, "rank": 0}]}, {"ends": [TRACE]}), "TracebackAtEnd", ["rank 0", "so did 1 more rank"]),
        ],
    )  # fmt: skip
    def test_end_of_the_ranks_is_condition(self, words: Any, reason: str, parts: list[str]) -> None:
        decision = run(
            *(succeeded(index, **own) for index, own in enumerate(words)), jobs=[child_job(conditions={"Complete": ""})]
        )
        status = decision.status
        is_doubtful = reason not in ("AllStepsMade", "TotalUnknown")
        assert (status.phase, status.reason) == ("Succeeded", reason if is_doubtful else "")
        _, known, message = condition(decision, "TrainingComplete")
        assert known == reason
        assert all(part in message for part in parts), message
        assert (reason in [event.reason for event in list_transition_events(STARTED, status)]) is is_doubtful
        assert (Doubted(reason) in find_transitions(STARTED, status, NOW)) is is_doubtful

    def test_job_that_hides_its_steps_is_not_doubted(self) -> None:
        pods = succeeded(0), succeeded(1)
        complete = child_job(conditions={"Complete": ""})
        decision = run(*pods, jobs=[complete], metrics={"autoInstrument": False})
        assert decision.status.reason == ""


class TestSuccessPolicy:
    def test_rank_zero_policy_succeeds_with_pod_0(self) -> None:
        pods = child_pod(0, "Succeeded"), child_pod(1)
        decision = run(*pods, successPolicy="RankZero")
        assert condition(decision, "Succeeded")[:2] == ("True", "RankZeroSucceeded")
        assert run(*pods).status.phase == "Running"

    def test_peer_failure_after_success_of_rank_0_is_not_counted(self) -> None:
        pods = child_pod(0, "Succeeded"), child_pod(1, "Failed", code=86, message=last_words("NCCL", secondary=True))
        failing = child_job(conditions={"FailureTarget": "x"})
        assert run(*pods, jobs=[failing], successPolicy="RankZero").status.phase == "Succeeded"

    def test_success_of_another_pod_is_not_enough(self) -> None:
        assert run(child_pod(0), child_pod(1, "Succeeded"), successPolicy="RankZero").status.phase == "Running"

    def test_success_policy_is_set_on_job(self) -> None:
        jobs = [build_children(job(**spec), attempt=1, nodes=2)[-1] for spec in ({}, {"successPolicy": "RankZero"})]
        assert "successPolicy" not in jobs[0]["spec"]
        assert jobs[1]["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}

    async def test_rank_zero_success_stops_peers(self) -> None:
        harness = await ReconcilerHarness(successPolicy="RankZero").train(TRAINING)
        harness.end_pod(0)
        await harness.settle()
        assert (harness.status.phase, harness.pods(1)) == ("Succeeded", [])


class TestSuspendedJob:
    async def suspend(self, *messages: Any, **spec: Any) -> ReconcilerHarness:
        harness = await ReconcilerHarness(**spec).train(TRAINING)
        harness.cluster.still.obedient = False
        harness.edit(suspend=True)
        await harness.settle()
        for index, message in enumerate(messages):
            harness.end_pod(index, constants.EXIT_PREEMPTED, message)
            await harness.settle()
        return harness

    async def test_suspended_message_names_checkpoint(self) -> None:
        saved = last_words(progress={"step": 9.0, "checkpointStep": 9.0})
        harness = await self.suspend(saved, saved)
        assert harness.status.checkpoint is not None
        assert (harness.status.checkpoint.step, harness.status.checkpoint.time) == (9, harness.clock.now)
        assert present(harness.status.progress).step == 9
        assert harness.condition("Suspended").message == (
            "spec.suspend is true; set it to false to resume from the checkpoint of step 9"
        )
        expected = [event for event in harness.cluster.events if event.reason == "Suspended"]
        assert ["the checkpoint of step 9" in event.message for event in expected] == [True]

    async def test_suspended_message_counts_lost_steps(self) -> None:
        harness = await self.suspend("", "")
        assert harness.condition("Suspended").message.endswith("from the checkpoint of step 5; 2 later steps are lost")

    async def test_suspended_message_without_checkpoints_names_no_loss(self) -> None:
        steps = page(step=7, phase="Running")
        harness = await ReconcilerHarness().train(steps)
        harness.edit(suspend=True)
        await harness.settle()
        assert harness.condition("Suspended").message.endswith(
            "to resume; the last step was 7, and the script reports no checkpoints"
        )


async def test_rates_and_goodput_of_ended_job_are_those_of_its_termination_message() -> None:
    began = page(step=2, steps=2, step_seconds=1.0, samples=20, total_steps=100, phase="Running")
    harness = await ReconcilerHarness().train(began)
    assert (present(harness.status.progress).steps_per_second, harness.status.goodput) != ("4", "0.25")
    created = present(parse_time(present(harness.raw)["metadata"]["creationTimestamp"]))
    harness.clock.advance(100 - (harness.clock.now - created).total_seconds())
    end = last_words(progress={"step": 100.0, "steps": 100.0, "stepSeconds": 25.0, "samples": 1000.0})
    for index in range(2):
        harness.end_pod(index, 0, end)
    await harness.settle()
    progress = present(harness.status.progress)
    assert harness.status.phase == "Succeeded"
    assert (progress.steps_per_second, progress.samples_per_second, progress.throughput) == ("4", "40", "40 samples/s")
    assert harness.status.goodput == "0.25"
