"""Decisions as a pure function: the recorded attempt, actions on children, and the time of the next pass."""

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api import constants
from ddp_operator.api.status import LastFailure, RestartCounts, Status
from ddp_operator.decide.conditions import is_finished
from ddp_operator.decide.converge import compute_scrape_interval
from ddp_operator.decide.decide import decide
from ddp_operator.decide.state import AT_ONCE, Decision, DeleteJob, DeleteResource, EnsureChildren, Refusal, SuspendJob
from tests.support.builders import NOW, child_job, child_pod, decode, job, last_words, observe, page
from tests.support.decisions import RUNNING, STARTED, present, read_state

JOB = child_job()
TRAINING = page(step=3, phase="Running")
QUEUED = {"kueue.x-k8s.io/queue-name": "q"}
REFUSED = Refusal("InvalidSpec", "spec.x: is wrong")


def run(
    status: Status = STARTED,
    jobs: Any = (JOB,),
    pods: Any = (),
    *,
    text: str | None = None,
    requested: bool = False,
    seconds: float = 0,
    refusal: Refusal | None = None,
    service: bool = True,
    **spec: Any,
) -> Decision:
    typed = job(status=status, **{"nodes": 2, **spec})
    result = None if text is None else decode(text)
    observation = observe(typed, jobs, pods, result, page_requested=requested, shared_complete=service)
    return decide(typed, observation, NOW + timedelta(seconds=seconds), refusal=refusal)


def trained() -> Status:
    return run(pods=RUNNING, text=TRAINING).status


def finished(**changes: Any) -> Status:
    status = run(jobs=[child_job(conditions={"Complete": ""})], pods=RUNNING).status
    assert is_finished(status)
    return replace(status, **changes)


class TestLedger:
    def test_next_attempt_is_recorded_before_child_objects_are_created(self) -> None:
        failed = child_pod(1, "Failed", code=82, message=last_words("CUDAError"))
        for decision in (
            run(trained(), pods=[child_pod(0), failed]),
            run(trained(), pods=RUNNING, nodes=3),
            run(trained(), jobs=[child_job(conditions={"Complete": ""})]),
            run(trained(), pods=RUNNING, seconds=99, activeDeadlineSeconds=9),
            run(trained(), jobs=[child_job(3)]),
        ):
            assert decision.actions == ()
            assert decision.requeue_after == AT_ONCE

    def test_first_attempt_is_recorded_with_its_child_objects(self) -> None:
        assert run(Status(), ()).actions == (EnsureChildren(1, 2),)
        assert run(Status(), (), suspend=True).actions == ()

    def test_failure_is_counted_once(self) -> None:
        pods = [child_pod(0), child_pod(1, "Failed", code=82, message=last_words("CUDAError"))]
        first = run(trained(), pods=pods).status
        second = run(first, pods=pods).status
        assert (first.attempt, second.attempt) == (2, 2)
        charged = RestartCounts(total=1, counted=1, used=1, step=3)
        assert (first.counts, second.counts) == (charged, charged)

    @pytest.mark.parametrize(("category", "avoided"), [("NodeFault", ("node-b",)), ("UserError", ())])
    def test_next_attempt_avoids_node_whose_hardware_failed(self, category: str, avoided: tuple[str, ...]) -> None:
        failed = child_pod(1, "Failed", code=82, message=last_words(category), node="node-b")
        assert run(trained(), pods=[child_pod(0), failed]).status.failed_nodes == avoided

    def test_lost_status_is_recovered_from_newest_job(self) -> None:
        jobs = [child_job(2, conditions={"Failed": ""}), child_job(3, nodes=4)]
        status = run(Status(), jobs).status
        assert (status.attempt, status.attempt_nodes, status.job_name) == (3, 4, "train-3")
        assert status.counts == RestartCounts(total=2, counted=2, used=2)

    def test_jobs_of_deleted_resource_of_same_name_are_ignored(self) -> None:
        assert run(Status(), [child_job(9, owner="another")]).status.attempt == 1


class TestActions:
    def test_missing_service_is_created_until_job_finishes(self) -> None:
        assert run(service=False).actions == (EnsureChildren(1, 2),)
        assert run(service=False, refusal=REFUSED).actions == ()
        assert run(service=False, jobs=[child_job(conditions={"Failed": ""})], suspend=True).actions == ()

    @pytest.mark.parametrize(
        "jobs",
        [
            [child_job(1)],
            [child_job(1, deleting=True)],
            [child_job(1, suspend=True)],
        ],
        ids=["running", "being deleted", "suspended"],
    )
    def test_next_job_waits_until_previous_one_creates_no_more_pods(self, jobs: Any) -> None:
        second = replace(STARTED, attempt=2)
        decision = run(second, jobs)
        assert not [action for action in decision.actions if isinstance(action, EnsureChildren)]
        assert decision.requeue_after is not None

    def test_next_job_waits_for_orphaned_pods(self) -> None:
        decision = run(jobs=(), pods=[child_pod(0, owner="gone")])
        assert decision.actions == ()
        assert read_state(decision, "Scheduled") == ("False", "WaitingForFormerPods")

    def test_next_job_does_not_wait_for_foreign_pod_with_label(self) -> None:
        pod = child_pod(0, owner="x")
        pod["metadata"]["ownerReferences"][0]["name"] = "somebody-else"
        assert run(jobs=(), pods=[pod]).actions == (EnsureChildren(1, 2),)

    def test_previous_jobs_are_deleted_but_last_failed_one(self) -> None:
        third = replace(STARTED, attempt=3)
        jobs = [child_job(n, conditions={"Failed": "x"}) for n in (1, 2)] + [child_job(3)]
        assert run(third, jobs).actions == (DeleteJob("train-1", "job-1"),)

    @pytest.mark.parametrize(("seconds", "deleted"), [(1, False), (59, False), (61, True)])
    def test_failing_former_job_is_kept_for_its_logs(self, seconds: float, deleted: bool) -> None:
        failure = LastFailure(attempt=1, category="CUDAError", time=NOW)
        second = replace(STARTED, attempt=2, last_failure=failure)
        decision = run(second, [child_job(1)], [child_pod(0, "Failed", code=82)], seconds=seconds)
        assert (DeleteJob("train-1", "job-1") in decision.actions) is deleted
        assert decision.requeue_after is not None

    def test_job_that_would_replace_its_pod_is_deleted_at_once(self) -> None:
        failure = LastFailure(attempt=1, category="OOM", time=NOW)
        second = replace(STARTED, attempt=2, last_failure=failure)
        decision = run(second, [child_job(1)], [child_pod(0, "Failed", code=137, reason="OOMKilled")])
        assert decision.actions == (DeleteJob("train-1", "job-1"),)

    @pytest.mark.parametrize(
        ("requested", "is_so", "about", "actions"),
        [
            (True, False, {}, (SuspendJob("train-1", True),)),
            (True, True, {}, ()),
            (False, True, {}, (SuspendJob("train-1", False),)),
            # Kueue's label, which it may have added itself; another owner has suspended it; or resumed it.
            (False, True, {"queue": "q"}, ()),
            (False, True, {"written": False}, ()),
            (False, False, {"written": True}, ()),
            (True, True, {"queue": "q"}, (DeleteJob("train-1", "job-1"),)),
            (True, False, {"queue": "q"}, (DeleteJob("train-1", "job-1"),)),
            (True, True, {"written": False}, (DeleteJob("train-1", "job-1"),)),
            (True, False, {"written": True}, (DeleteJob("train-1", "job-1"),)),
        ],
    )
    def test_suspend_follows_spec_unless_queue_owns_it(
        self, requested: bool, is_so: bool, about: Any, actions: Any
    ) -> None:
        assert run(jobs=[child_job(suspend=is_so, **about)], suspend=requested).actions == actions

    @pytest.mark.parametrize("stopping", [True, False])
    def test_job_suspended_by_older_operator_is_resumed(self, stopping: bool) -> None:
        """It has no record in the Job; its status shows that the operator has suspended it."""
        old = child_job(suspend=True, written=None)
        pods = [child_pod(0, deleting=True)] if stopping else []
        suspended = run(jobs=[child_job(suspend=True)], pods=pods, suspend=True).status
        assert run(suspended, [old], pods, suspend=True).actions == ()
        assert run(suspended, [old], pods).actions == (SuspendJob("train-1", False),)
        assert run(jobs=[old]).actions == (), "somebody else has suspended it"

    def test_finished_job_is_not_suspended(self) -> None:
        assert run(jobs=[child_job(conditions={"Failed": ""})], suspend=True).actions == ()


class TestRefusal:
    @pytest.mark.parametrize(
        ("reason", "again"), [("InvalidSpec", 300), ("NameConflict", 30), ("Forbidden", 30), ("ServerError", 30)]
    )
    def test_refused_job_is_rechecked(self, reason: Any, again: float) -> None:
        assert run(Status(), (), refusal=Refusal(reason, "x")).requeue_after == again
        assert run(jobs=(), refusal=Refusal(reason, "x")).requeue_after == 30

    def test_refused_spec_creates_no_children_and_no_new_size(self) -> None:
        assert run(jobs=(), refusal=REFUSED).actions == ()
        assert run(trained(), pods=RUNNING, nodes=3, refusal=REFUSED).status.attempt == 1


class TestAfterTheEnd:
    def test_running_jobs_are_suspended_after_end(self) -> None:
        jobs = [child_job(1, conditions={"Failed": ""}), child_job(2)]
        assert run(finished(), jobs).actions == (SuspendJob("train-2", True),)
        assert run(finished(), [child_job(2, suspend=True)]).actions == ()

    def test_queued_job_is_deleted_to_prevent_restart_by_queue(self) -> None:
        assert run(finished(), [child_job(2, queue="q")]).actions == (DeleteJob("train-2", "job-2"),)
        waits = child_job(2, suspend=True, written=False)
        assert run(finished(), [waits]).actions == (DeleteJob("train-2", "job-2"),)

    def test_job_that_older_operator_has_stopped_keeps_its_pods_logs(self) -> None:
        assert run(finished(), [child_job(2, suspend=True, written=None)]).actions == ()

    @pytest.mark.parametrize(
        ("policy", "actions"),
        [
            ("All", (DeleteJob("train-1", "job-1"), DeleteJob("train-2", "job-2"))),
            ("Running", (SuspendJob("train-2", True),)),
            ("None", ()),
        ],
    )
    def test_pods_are_cleaned_by_policy(self, policy: str, actions: Any) -> None:
        jobs = [child_job(1, conditions={"Failed": ""}), child_job(2), child_job(3, deleting=True)]
        assert run(finished(), jobs, cleanPodPolicy=policy).actions == actions

    @pytest.mark.parametrize("policy", ["All", "Running", "None"])
    def test_recreated_former_job_is_deleted(self, policy: str) -> None:
        jobs = [child_job(1), child_job(2, suspend=True)]
        ended = finished(attempt=2, job_name="train-2")
        assert run(ended, jobs, cleanPodPolicy=policy).actions[0] == DeleteJob("train-1", "job-1")

    def test_job_that_is_about_to_fail_keeps_its_logs(self) -> None:
        failure = LastFailure(attempt=1, category="UserError", time=NOW)
        pods = [child_pod(0, "Failed", code=81), child_pod(1)]
        failed = run(trained(), [child_job(1)], RUNNING, seconds=10, activeDeadlineSeconds=9).status
        assert failed.phase == "Failed"
        failed = replace(failed, last_failure=failure)
        assert run(failed, [child_job(1)], pods, seconds=10).actions == ()
        assert run(failed, [child_job(1)], pods, seconds=71).actions != ()

    @pytest.mark.parametrize(("seconds", "left"), [(0, 10), (9, 1), (-5, 15)])
    def test_pass_is_due_when_time_to_live_ends(self, seconds: float, left: float) -> None:
        decision = run(finished(), (), ttlSecondsAfterFinished=10, seconds=seconds)
        assert (decision.requeue_after, decision.actions) == (left, ())

    @pytest.mark.parametrize("seconds", [10, 1e6])
    def test_resource_is_deleted_after_time_to_live(self, seconds: float) -> None:
        assert run(finished(), (), ttlSecondsAfterFinished=10, seconds=seconds).actions == (DeleteResource(),)

    def test_success_message_has_admitted_pods(self) -> None:
        done = [child_job(nodes=1, queue="gpu", conditions={"Complete": ""})]
        status = run(trained(), done, [child_pod(0, "Succeeded", code=0)]).status
        statement = [
            result.message for kind in ("Scheduled", "Rendezvoused", "Succeeded") if (result := status.condition(kind))
        ]
        admitted = "; queue admitted 1/2 pods"
        joined = "1/1 pods joined the rendezvous"
        assert statement == [f"1/1 pods scheduled{admitted}", joined, f"1/1 pods succeeded{admitted}"]


class TestLookingAgain:
    def test_starting_job_is_polled_every_second_and_training_one_every_ten(self) -> None:
        assert run(pods=RUNNING).requeue_after == 1.0
        assert run(pods=RUNNING, text=TRAINING).requeue_after == 10.0

    def test_job_without_first_step_is_polled_every_second_for_two_minutes(self) -> None:
        joined = run(pods=RUNNING, text=page(phase="Running")).status
        assert compute_scrape_interval(joined, NOW + timedelta(seconds=119), 10.0) == 1.0
        assert compute_scrape_interval(joined, NOW + timedelta(seconds=121), 10.0) == 10.0

    def test_pass_is_due_at_deadline(self) -> None:
        decision = run(trained(), pods=RUNNING, activeDeadlineSeconds=7, text=TRAINING)
        assert decision.requeue_after == 7.0

    def test_every_requeue_leaves_time_between_passes(self) -> None:
        secondary = child_pod(0, "Failed", code=constants.EXIT_PEER_LOST, message=last_words("NCCL", secondary=True))
        for decision in (
            run(trained(), pods=[secondary, child_pod(1)]),
            run(jobs=(), pods=[child_pod(0, owner="gone")]),
            run(trained(), pods=RUNNING, seconds=6.99, activeDeadlineSeconds=7),
        ):
            assert decision.requeue_after is None or decision.requeue_after >= 0.009


class TestPhase:
    @pytest.mark.parametrize(
        ("pods", "phase"),
        [
            ((), "Pending"),
            ((child_pod(0), child_pod(1, "Pending")), "Pending"),
            (RUNNING, "Running"),
            ((child_pod(0), child_pod(1, "Succeeded")), "Running"),
            ((child_pod(0, "Succeeded"), child_pod(1, "Succeeded")), "Running"),
        ],
    )
    def test_phase_sums_up_pods(self, pods: Any, phase: str) -> None:
        assert run(pods=pods).status.phase == phase

    def test_job_is_not_suspended_while_pods_of_former_attempt_stop(self) -> None:
        second = replace(STARTED, attempt=2)
        decision = run(second, [child_job(1)], [child_pod(0)], suspend=True)
        assert read_state(decision, "Suspended") == ("False", "Stopping")

    def test_suspended_job_is_unchanged_over_time(self) -> None:
        status = run(trained(), [child_job(suspend=True)], suspend=True).status
        assert run(status, [child_job(suspend=True)], suspend=True, seconds=3600).status == status

    def test_resumption_restarts_active_deadline(self) -> None:
        status = run(trained(), [child_job(suspend=True)], suspend=True).status
        resumed = run(status, [child_job(suspend=True)], seconds=3600).status
        assert resumed.start_time == NOW + timedelta(seconds=3600)

    def test_progressing_is_unknown_only_after_workers_may_have_joined(self) -> None:
        assert read_state(run(pods=RUNNING, text=page(phase="Rendezvous")), "Progressing") == ("False", "NoStepYet")
        assert read_state(run(pods=RUNNING, text=page(phase="Running")), "Progressing") == ("Unknown", "NoStepYet")
        assert read_state(run(pods=RUNNING, text=TRAINING), "Progressing") == ("True", "Training")
        assert read_state(run(pods=[child_pod(0)]), "Progressing") == ("False", "NotRunning")

    def test_absent_step_has_launchers_explanation(self) -> None:
        hint = "no step is visible: metrics.autoInstrument is false. To show progress, …"
        text = page(phase="Running", stepHint=hint)
        progressing = present(run(pods=RUNNING, text=text).status.condition("Progressing"))
        assert (progressing.reason, progressing.message) == ("NoStepYet", hint)


class TestRestarting:
    @pytest.mark.parametrize("seen_first", ["job", "pods"])
    def test_requeued_pods_are_not_replaced(self, seen_first: str) -> None:
        taken = [child_pod(0, deleting=True), child_pod(1, deleting=True)]
        admitted = child_job(queue="q")
        preempted = child_job(queue="q", suspend=True, written=False)
        status = run(trained(), [preempted if seen_first == "job" else admitted], taken).status
        decision = run(status, [preempted])
        assert read_state(decision, "Restarting")[0] == "False"
        assert (decision.status.phase, read_state(decision, "Scheduled")) == ("Pending", ("False", "QuotaPending"))
        assert (decision.status.attempt, decision.actions) == (1, ())


class TestLostLauncher:
    """The ConfigMap with the launcher of a Job's pods is another operator's, and deleted."""

    @pytest.mark.parametrize(
        ("pods", "made_anew"),
        [
            ((child_pod(0, "Pending", node=""),), True),
            ((), True),
            (RUNNING, False),
            ((child_pod(0, "Succeeded"), child_pod(1, "Pending", node="")), True),
        ],
    )
    def test_job_with_lost_launcher_is_recreated_unless_pods_train(self, pods: Any, made_anew: bool) -> None:
        typed = job(status=STARTED, nodes=2)
        observation = observe(typed, (JOB,), pods, launcher_lost=True, shared_complete=True)
        assert (DeleteJob("train-1", "job-1") in decide(typed, observation, NOW).actions) is made_anew


def test_in_place_restarts_of_failed_attempt_are_kept() -> None:
    words = last_words("CUDAError", restarts=2, step=9)
    failed = child_pod(0, "Failed", code=82, message=words)
    decision = run(jobs=(child_job(conditions={"Failed": "why"}),), pods=(failed, child_pod(1, "Failed", code=143)))
    assert decision.status.attempt == 2
    result = decision.status.counts
    assert (result.in_place, result.in_place_before) == (2, 2)
    assert (result.used, result.counted) == (3, 3), (
        "those that nobody has seen count with the failure that ended the pod"
    )


@pytest.mark.parametrize(("peers", "unseen"), [((child_pod(1),), True), ((child_pod(1, "Failed", code=143),), False)])
def test_secondary_failure_needs_fresh_read(peers: Any, unseen: bool) -> None:
    lost = last_words("NCCL", secondary=True)
    failed = child_pod(0, "Failed", code=constants.EXIT_PEER_LOST, message=lost)
    decision = run(jobs=(child_job(conditions={"Failed": "why"}),), pods=(failed, *peers), seconds=600)
    assert decision.needs_fresh_read is unseen
