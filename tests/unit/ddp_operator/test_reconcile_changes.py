"""The reconcile when things change: pods that fail, users who edit, time that passes."""

import dataclasses
from typing import Any

import pytest

from ddp_operator import constants, reconcile
from ddp_operator.cluster import Key, Snapshot
from ddp_operator.manifests import children
from tests.builders import child_pod, last_words, page, resource
from tests.memory import World

TRAINING = page(ddp_step=7, ddp_total_steps=10, ddp_loss=0.5, phase="Running")
ERROR = last_words("CUDAError", rank=1, node=1, message="RuntimeError: boom", traceback="line 1\nline 2", hint="do x")
PEER_LOST = last_words("NCCL", victim=True, message="connection closed by peer")


async def reconcile_with_late_news_of_pods(world: World, before: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one pass whose watches still show the pods as they were; who asks the API server sees them as they are."""
    fresh = await world.observe()

    async def from_cache(key: Key) -> Snapshot:
        return dataclasses.replace(fresh, pods=before.pods)

    async def from_server(key: Key) -> Snapshot:
        return fresh

    monkeypatch.setattr(world.cluster, "observe", from_cache)
    monkeypatch.setattr(world.cluster, "fetch", from_server)
    await world.reconcile()


class TestFailure:
    async def test_after_an_outage_the_pod_is_blamed_whose_end_is_heard_of_after_its_jobs(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world = await World().train()
        before = await world.observe()
        world.end_pod(1, constants.EXIT_RETRYABLE)
        world.clock.advance(61)  # nobody hears of anything
        await reconcile_with_late_news_of_pods(world, before, monkeypatch)
        failure = world.status.last_failure
        assert failure is not None
        assert (world.status.attempt, failure.node, failure.exit_code) == (2, 1, constants.EXIT_RETRYABLE)

    async def test_a_good_end_has_all_pods_also_where_one_is_heard_of_after_its_job(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world = await World().train(TRAINING)
        before = await world.observe()
        for node in (0, 1):
            world.end_pod(node)
        world.clock.advance(1)
        await reconcile_with_late_news_of_pods(world, before, monkeypatch)
        assert (world.status.phase, world.status.nodes.succeeded) == ("Succeeded", 2)

    async def test_next_attempt_begins_with_the_cause_in_status(self) -> None:
        world = await World().train(TRAINING)
        world.end_pod(1, constants.EXIT_RETRYABLE, ERROR)
        await world.settle()
        failure = world.status.last_failure
        assert failure is not None
        assert (failure.attempt, failure.rank, failure.node, failure.category) == (1, 1, 1, "CUDAError")
        assert (failure.message, failure.traceback, failure.hint) == ("RuntimeError: boom", "line 1\nline 2", "do x")
        assert (world.status.attempt, world.status.restarts.counted) == (2, 1)
        assert world.state("Restarting") == ("True", "GroupRestart")
        assert world.status.phase == "Restarting"

    async def test_hang_ends_the_job_where_the_watchdog_says_so_also_if_all_ranks_wait_for_each_other(self) -> None:
        for victims in ((False, True), (True, True)):
            world = await World(watchdog={"action": "Fail"}).train(TRAINING)
            for node, victim in enumerate(victims):
                words = last_words("Hang", rank=node, node=node, victim=victim, message="no step for 300 s")
                world.tell_end(node, constants.EXIT_USER_ERROR, words)
            await world.settle()
            assert (world.status.phase, world.status.attempt, world.state("Failed")) == ("Failed", 1, ("True", "Hang"))
            failure = world.status.last_failure
            assert failure is not None
            assert (failure.category, failure.rank) == ("Hang", 0)

    async def test_hang_is_followed_by_another_attempt_where_the_watchdog_restarts(self) -> None:
        world = await World().train(TRAINING)
        world.end_pod(1, constants.EXIT_HANG, last_words("Hang", rank=1, node=1, message="no step for 300 s"))
        await world.settle()
        assert (world.status.attempt, world.status.restarts.counted) == (2, 1)
        assert world.status.last_failure is not None
        assert world.status.last_failure.category == "Hang"

    async def test_failed_job_stays_for_its_logs_and_older_ones_go(self) -> None:
        world = await World().train(TRAINING)
        for attempt in (2, 3):
            world.end_pod(1, constants.EXIT_RETRYABLE, ERROR)
            await world.settle()
            assert world.jobs() == [f"train-{attempt - 1}", f"train-{attempt}"]
            await world.train(TRAINING)

    async def test_new_pods_wait_for_the_old_ones_to_stop(self) -> None:
        world = await World().train(TRAINING)
        world.cluster.still.obedient = False
        world.end_pod(1, constants.EXIT_RETRYABLE, ERROR)
        await world.settle()
        assert world.jobs() == ["train-1"]
        assert world.state("Scheduled") == ("False", "WaitingForFormerPods")
        [left] = world.pods(1)
        world.cluster.end(left, constants.EXIT_PEER_LOST)
        await world.settle()
        assert world.jobs() == ["train-1", "train-2"]

    async def test_restart_ends_when_the_workers_have_met_again(self) -> None:
        world = await World().train(TRAINING)
        world.end_pod(1, constants.EXIT_RETRYABLE, ERROR)
        await world.train(TRAINING)
        assert (world.status.phase, world.state("Restarting")) == ("Running", ("False", "NotRestarting"))

    async def test_victim_waits_for_a_witness_and_the_cause_is_the_one_that_is_no_victim(self) -> None:
        world = await World(nodes=3).train(TRAINING)
        world.tell_end(0, constants.EXIT_PEER_LOST, PEER_LOST)
        world.clock.advance(1)
        await world.settle()
        assert (world.status.attempt, world.status.last_failure) == (1, None)
        assert world.state("Progressing") == ("False", "WaitingForPeers")
        assert world.requeue is not None
        world.tell_end(2, constants.EXIT_RETRYABLE, last_words("CUDAError", rank=2, node=2))
        await world.settle()
        failure = world.status.last_failure
        assert failure is not None
        assert (failure.node, failure.category, world.status.attempt) == (2, "CUDAError", 2)

    async def test_victim_is_believed_when_nobody_else_speaks(self) -> None:
        world = await World().train(TRAINING)
        world.cluster.still.obedient = False
        world.end_pod(0, constants.EXIT_PEER_LOST, PEER_LOST)
        world.clock.advance(61)
        await world.settle()
        assert world.status.last_failure is not None
        assert world.status.last_failure.category == "NCCL"

    async def test_user_error_ends_the_job_at_once(self) -> None:
        world = await World().train(TRAINING)
        words = last_words("UserError", message="ModuleNotFoundError: No module named 'nothere'", exitCode=2)
        world.end_pod(0, constants.EXIT_USER_ERROR, words)
        await world.settle()
        assert (world.status.phase, world.status.attempt) == ("Failed", 1)
        assert world.state("Failed") == ("True", "UserError")
        assert world.condition("Failed").message == (
            "UserError: rank 0 on pod 0: ModuleNotFoundError: No module named 'nothere'"
        )
        assert world.events[-2:] == ["FailureUserError", "Failed"]

    async def test_a_cause_of_many_lines_is_one_line_in_the_condition(self) -> None:
        world = await World(recovery={"maxRestarts": 0}).train(TRAINING)
        world.end_pod(0, constants.EXIT_RETRYABLE, last_words("UserError", message="KeyError: 1\nTraceback\nmore"))
        await world.settle()
        words = "not started again, as recovery.maxRestarts is 0; last: UserError: rank 0 on pod 0: KeyError: 1"
        assert world.condition("Failed").message == words

    async def test_budget_ends_the_job(self) -> None:
        world = await World(recovery={"maxRestarts": 1}).train(TRAINING)
        world.end_pod(0, constants.EXIT_RETRYABLE, ERROR)
        await world.train(TRAINING)
        world.end_pod(0, constants.EXIT_RETRYABLE, ERROR)
        await world.settle()
        assert world.status.phase == "Failed"
        assert world.state("Failed") == ("True", "RestartBudgetExhausted")
        assert world.condition("Failed").message.startswith(
            "failed 2 times, recovery.maxRestarts is 1; last: CUDAError"
        )
        assert world.status.attempt == 2

    async def test_out_of_memory_kill_ends_the_attempt_although_its_code_is_that_of_a_killed_pod(self) -> None:
        world = await World().train(TRAINING)
        world.end_pod(1, 137, reason="OOMKilled")
        await world.settle()
        failure = world.status.last_failure
        assert failure is not None
        assert (failure.category, failure.node, failure.exit_code) == ("OOM", 1, 137)
        assert "limits.memory" in failure.hint
        assert (world.status.attempt, world.jobs()) == (2, ["train-2"])

    async def test_killed_pod_is_a_new_attempt_that_counts(self) -> None:
        world = await World().train(TRAINING)
        world.end_pod(1, 137)
        await world.settle()
        assert (world.status.attempt, world.jobs()) == (2, ["train-2"]), "the former Job would have gone on"
        assert world.state("Restarting") == ("True", "GroupRestart")
        assert (world.status.restarts.counted, world.status.restarts.used) == (1, 1)

    async def test_killed_pod_of_a_queued_job_is_replaced_in_the_same_attempt(self) -> None:
        item = resource(labels={"kueue.x-k8s.io/queue-name": "gpu"}, nodes=2)
        world = await World(item).train(TRAINING)
        world.end_pod(1, 137)
        await world.settle()
        assert (world.status.phase, world.state("Restarting")) == ("Restarting", ("True", "PodReplacement"))
        world.clock.advance(11)
        world.cluster.settle()  # the Job controller's back-off is over
        world.run_pods()
        world.clock.advance(11)
        await world.settle()
        assert (world.status.phase, world.status.attempt, world.status.restarts.total) == ("Running", 1, 0)
        assert len(world.pods()) == 2
        world.end_pod(0)
        world.end_pod(1)
        await world.settle()
        assert (world.status.phase, world.status.nodes.succeeded, world.status.nodes.failed) == ("Succeeded", 2, 0)

    async def test_only_pod_that_is_killed_is_a_restart_too(self) -> None:
        world = await World(nodes=1).train(TRAINING)
        world.end_pod(0, 137)
        await world.settle()
        assert (world.status.attempt, world.state("Restarting")) == (2, ("True", "GroupRestart"))

    async def test_init_container_that_fails_is_not_tried_for_ever(self) -> None:
        world = await World(recovery={"maxRestarts": 0}).settle()
        pod = world.pods()[1]
        init = {"name": "fetch", "state": {"terminated": {"exitCode": 1, "message": "no route to data"}}}
        world.cluster.store.change(pod, status={"phase": "Failed", "initContainerStatuses": [init]})
        await world.settle()
        assert world.status.phase == "Failed"
        assert world.status.last_failure is not None
        assert world.status.last_failure.message == "init container fetch: no route to data"
        assert (world.jobs(), world.pods(1)) == (["train-1"], [])

    async def test_hostile_last_words_do_not_stop_the_job_from_being_decided(self) -> None:
        world = await World().train(TRAINING)
        words = (
            '{"category": "CUDAError", "rank": 99999999999999999999, "time": 1e308, "message": "' + "x" * 9999 + '"}'
        )
        world.end_pod(0, constants.EXIT_RETRYABLE, words)
        await world.settle()
        failure = world.status.last_failure
        assert failure is not None
        assert (failure.category, failure.rank) == ("CUDAError", None)
        assert len(failure.message) <= 2048

    async def test_pods_of_a_job_that_somebody_deleted_are_waited_for(self) -> None:
        world = await World().train(TRAINING)
        world.cluster.still.obedient = False
        world.cluster.store.delete(world.cluster.store.list("Job")[0])
        world.cluster.settle()
        await world.settle()
        assert world.jobs() == []
        assert world.state("Scheduled") == ("False", "WaitingForFormerPods")
        for pod in world.pods(1):
            world.cluster.end(pod, constants.EXIT_PREEMPTED)
        await world.settle()
        assert (world.jobs(), world.status.attempt) == (["train-1"], 1)

    async def test_service_that_somebody_deleted_is_made_anew(self) -> None:
        world = await World().train(TRAINING)
        world.cluster.store.delete(world.cluster.store.list("Service")[0])
        await world.settle()
        assert world.children()["Service"] == ["train"]
        assert (world.status.phase, world.status.attempt, len(world.pods())) == ("Running", 1, 2)

    async def test_living_pods_of_a_deleted_namesake_are_waited_for(self) -> None:
        world = World()
        stray = child_pod(0, "Running", owner="a job that is gone")
        stray["metadata"]["finalizers"] = ["example.com/keep"]
        world.cluster.add(stray)
        await world.settle()
        assert world.jobs() == []
        assert world.state("Scheduled") == ("False", "WaitingForFormerPods")

    async def test_lost_status_is_taken_up_from_the_newest_job(self) -> None:
        world = await World().train(TRAINING)
        world.end_pod(1, constants.EXIT_RETRYABLE, ERROR)
        await world.train(TRAINING)
        assert world.raw is not None
        world.cluster.store.change(world.raw, status={})
        await world.settle()
        assert (world.status.attempt, world.status.attempt_nodes, world.status.phase) == (2, 2, "Running")
        assert world.status.restarts.counted == 1
        assert len(world.pods(1)) == 0
        assert len(world.pods(2)) == 2


class TestEdit:
    async def test_other_number_of_nodes_is_a_new_attempt_that_costs_nothing(self) -> None:
        world = await World().train(TRAINING)
        world.edit(nodes=4)
        await world.settle()
        assert (world.status.attempt, world.status.attempt_nodes, world.jobs()) == (2, 4, ["train-2"])
        assert (world.status.restarts.counted, world.status.restarts.free) == (0, 1)
        assert world.state("Restarting") == ("True", "Resized")
        await world.train(TRAINING)
        assert (world.status.phase, len(world.pods())) == ("Running", 4)

    async def test_resize_waits_until_the_old_pods_have_saved(self) -> None:
        world = await World().train(TRAINING)
        world.cluster.still.obedient = False
        world.edit(nodes=3)
        await world.settle()
        assert world.jobs() == []
        assert world.condition("Scheduled").message == "2 pods of the former attempt still run"
        for pod in world.pods(1):
            world.cluster.end(pod, constants.EXIT_PREEMPTED)
        await world.settle()
        assert world.jobs() == ["train-2"]

    async def test_resize_before_the_first_pod_makes_no_pods_of_the_old_size(self) -> None:
        world = World()
        await world.reconcile()
        world.edit(nodes=3)
        await world.settle()
        assert [len(world.pods(attempt)) for attempt in (1, world.status.attempt)] == [0, 3]

    async def test_suspend_stops_the_pods_and_resume_goes_on_in_the_same_attempt(self) -> None:
        world = await World().train(TRAINING)
        world.cluster.still.obedient = False
        world.edit(suspend=True)
        await world.settle()
        assert world.state("Suspended") == ("False", "Stopping")
        assert world.status.phase == "Running"
        for pod in world.pods():
            world.cluster.end(pod, constants.EXIT_PREEMPTED)
        await world.settle()
        assert (world.status.phase, world.state("Suspended")) == ("Suspended", ("True", "SuspendedBySpec"))
        assert world.pods() == []
        world.clock.advance(1)
        world.edit(suspend=False)
        world.cluster.still.obedient = True
        await world.train(TRAINING)
        assert (world.status.phase, world.status.attempt, world.jobs()) == ("Running", 1, ["train-1"])
        assert world.status.restarts.total == 0
        assert [e for e in world.events if e in ("Suspended", "Resumed")] == ["Suspended", "Resumed"]

    async def test_suspended_from_the_start_runs_no_pod(self) -> None:
        world = await World(suspend=True).settle()
        assert (world.status.phase, world.jobs(), world.pods()) == ("Suspended", [], [])
        assert world.requeue is None

    async def test_deadlines_of_a_suspended_job_ask_for_no_pass(self) -> None:
        world = await World(activeDeadlineSeconds=600, pendingDeadlineSeconds=600).train(TRAINING)
        world.edit(suspend=True)
        await world.settle()
        assert (world.status.phase, world.requeue) == ("Suspended", None)

    async def test_nodes_changed_while_suspended_take_effect_on_resume(self) -> None:
        world = await World(suspend=True).settle()
        world.edit(nodes=3)
        await world.settle()
        assert (world.status.phase, world.pods()) == ("Suspended", [])
        world.edit(suspend=False)
        await world.settle()
        assert len(world.pods()) == 3

    async def test_failure_while_suspended_is_judged_on_resume(self) -> None:
        world = await World().train(TRAINING)
        world.end_pod(1, constants.EXIT_RETRYABLE, ERROR)
        world.edit(suspend=True)
        await world.settle()
        assert (world.status.attempt, world.status.phase) == (1, "Suspended")
        world.edit(suspend=False)
        await world.settle()
        assert (world.status.attempt, world.status.restarts.counted) == (2, 1)

    async def test_queued_job_is_left_suspended_for_its_queue(self) -> None:
        item = resource(labels={"kueue.x-k8s.io/queue-name": "gpu"}, nodes=1)
        world = World(item)
        await world.settle()
        job = world.cluster.store.list("Job")[0]
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
        world.cluster.store.change(job, spec={**job["spec"], "suspend": True})
        await world.settle()
        assert not [call for call in world.cluster.calls if call.startswith("patch")]


class TestDeadline:
    async def test_ends_the_job_and_stops_its_pods(self) -> None:
        world = await World(activeDeadlineSeconds=60).train(TRAINING)
        assert world.requeue is not None
        assert world.requeue <= 49
        world.clock.advance(49)
        await world.settle()
        assert world.state("Failed") == ("True", "DeadlineExceeded")
        assert (world.pods(1), world.jobs()) == ([], ["train-1"])

    async def test_counts_from_the_latest_resumption(self) -> None:
        world = await World(activeDeadlineSeconds=60).train(TRAINING)
        world.edit(suspend=True)
        await world.settle()
        world.clock.advance(3600)
        await world.settle()
        world.edit(suspend=False)
        await world.train(TRAINING)
        assert world.status.phase == "Running"
        world.clock.advance(60)
        await world.settle()
        assert world.status.phase == "Failed"

    async def test_farthest_deadline_and_time_to_live_are_within_what_can_be_computed(self) -> None:
        year = 366 * 24 * 3600
        world = await World(activeDeadlineSeconds=year, ttlSecondsAfterFinished=year).train(TRAINING)
        world.end_pod(0)
        world.end_pod(1)
        await world.settle()
        assert world.requeue == year


class TestOtherVersion:
    async def test_running_job_of_another_version_goes_on_once_the_definition_hides_what_is_unknown(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A rollback of the operator alone; then the definition follows, by which no resource's version changes."""
        world = await World().train(TRAINING)
        world.edit(futureField=1)
        await world.reconcile()
        words = world.condition("Accepted").message
        assert "; the definition ddptrainingjobs.ddp-operator.dev in the cluster is not that of this operator" in words
        assert "nobody answers a failure" in words
        assert (world.status.phase, world.requeue, world.jobs()) == ("Running", 300, ["train-1"])

        async def fetch(key: Any) -> Snapshot:
            snapshot = await world.observe()
            spec = {name: value for name, value in snapshot.resource["spec"].items() if name != "futureField"}
            return dataclasses.replace(snapshot, resource={**snapshot.resource, "spec": spec})

        monkeypatch.setattr(world.cluster, "fetch", fetch)
        await world.reconcile()
        assert world.state("Accepted") == ("True", "Valid")

    async def test_finished_job_of_another_version_is_left_alone(self) -> None:
        world = await World(nodes=1).train(TRAINING)
        world.end_pod(0)
        await world.settle()
        world.edit(futureField=1)
        version = world.version
        await world.reconcile()
        assert (world.status.phase, world.version) == ("Succeeded", version)

    @pytest.mark.parametrize("stage", ["suspended", "starting", "training"])
    async def test_launcher_of_an_older_operator_that_somebody_deletes_costs_no_job_that_trains(
        self, monkeypatch: pytest.MonkeyPatch, stage: str
    ) -> None:
        world = World()
        await (world.train(TRAINING) if stage == "training" else world.settle())
        if stage == "suspended":
            world.edit(suspend=True)
            await world.settle()
        newer = children.Launcher("# newer", "f" * 64)
        for module in (children, reconcile):
            monkeypatch.setattr(module, "load_launcher", lambda: newer)
        [config_map] = world.cluster.store.list("ConfigMap")
        [before] = world.cluster.store.list("Job")
        await world.settle()
        assert [item["metadata"]["uid"] for item in world.cluster.store.list("Job")] == [before["metadata"]["uid"]]
        world.cluster.store.delete(config_map)
        for _ in range(3):
            await world.settle()
            world.clock.advance(1)
        if stage == "suspended":
            assert world.cluster.store.list("Job") == []
            world.edit(suspend=False)
            await world.settle()
        [after] = world.cluster.store.list("Job")
        kept = stage == "training"
        assert (after["metadata"]["uid"] == before["metadata"]["uid"]) is kept
        assert [item["metadata"]["name"] for item in world.cluster.store.list("ConfigMap")] == [
            "train-launcher-ffffffffff"
        ]
        assert (world.status.attempt, world.status.restarts.total) == (1, 0)

    async def test_launcher_that_a_kubelet_does_not_find_is_made_anew_though_nobody_told_of_its_deletion(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world = await World().settle()
        [config_map] = world.cluster.store.list("ConfigMap")
        remembered, truth = await world.observe(), world.cluster.observe
        world.cluster.store.delete(config_map)

        async def observe(key: Key) -> Snapshot:
            found = await truth(key)
            assert found is not None
            return dataclasses.replace(found, config_maps=remembered.config_maps)

        async def events_of(item: Any) -> Any:
            name = config_map["metadata"]["name"]
            words = f'MountVolume.SetUp failed for volume "ddp-launcher" : configmap "{name}" not found'
            return ({"type": "Warning", "reason": "FailedMount", "message": words},)

        monkeypatch.setattr(world.cluster, "observe", observe)
        monkeypatch.setattr(world.cluster, "events_of", events_of)
        for pod in world.pods():
            world.cluster.store.change(pod, spec=pod["spec"] | {"nodeName": "node-a"})
        await world.reconcile()
        assert world.cluster.store.list("ConfigMap") == []
        world.clock.advance(10)
        await world.reconcile()
        assert [item["metadata"]["name"] for item in world.cluster.store.list("ConfigMap")] == [
            config_map["metadata"]["name"]
        ]
