"""The reconcile in a world in memory: what users and nodes do, and what becomes of the job and its children."""

from contextlib import suppress
from typing import Any

import pytest
import yaml

from ddp_operator import constants, names, reconcile
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.cluster import Refused, Unable
from ddp_operator.manifests.children import build_children
from ddp_operator.validation import check_manifest
from tests.builders import last_words, page, resource, template, trainer
from tests.memory import World

TRAINING = page(ddp_step=7, ddp_total_steps=10, ddp_loss=0.5, phase="Running")


class TestCreate:
    async def test_makes_service_config_map_and_job_owned_by_the_resource(self) -> None:
        world = await World().settle()
        children = world.children()
        assert (children["Service"], children["Job"], len(children["ConfigMap"])) == (["train"], ["train-1"], 1)
        uid = world.raw["metadata"]["uid"] if world.raw else ""
        for kind in children:
            [child] = world.cluster.store.list(kind)
            assert [owner["uid"] for owner in child["metadata"]["ownerReferences"]] == [uid]

    async def test_writes_the_ledger_before_the_first_child_of_an_attempt(self) -> None:
        world = await World().settle()
        calls = world.cluster.calls
        assert calls == ["dry-run Job", "create Service", "status", "create ConfigMap", "create Job", *calls[5:]]

    async def test_asks_the_api_server_about_the_job_before_anything_is_made(self) -> None:
        world = World()
        await world.reconcile()
        assert world.cluster.calls == ["dry-run Job", "create Service", "status"]

    async def test_suspended_job_that_is_refused_makes_nothing_either(self) -> None:
        world = World(suspend=True)
        await world.reconcile()
        assert world.cluster.calls == ["dry-run Job", "dry-run Service", "status"]

    async def test_service_of_an_earlier_pass_is_not_asked_for_again(self) -> None:
        world = World()
        await world.reconcile()
        assert world.raw is not None
        world.cluster.store.change(world.raw, status={})
        await world.reconcile()
        assert world.cluster.calls[3:] == ["dry-run Job", "status"]

    async def test_builds_children_once_for_a_spec_that_does_not_change(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = await World().settle()
        built: list[int] = []

        def build(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
            built.append(1)
            return build_children(*args, **kwargs)

        monkeypatch.setattr(reconcile, "build_children", build)
        await world.reconcile()
        assert built == []
        world.edit(nodes=3)
        await world.reconcile()
        assert built == [1]

    async def test_second_pass_writes_nothing(self) -> None:
        world = await World().settle()
        version, calls = world.version, len(world.cluster.calls)
        await world.reconcile()
        assert (world.version, world.cluster.calls[calls:]) == (version, [])

    async def test_pass_of_another_operator_writes_nothing(self) -> None:
        world = await (await World().settle()).train()
        version = world.version
        world.restart_operator()
        await world.reconcile()
        assert world.version == version

    async def test_needs_three_creates_and_at_most_three_status_patches_until_it_runs(self) -> None:
        world = await World().train(TRAINING)
        assert world.status.phase == "Running"
        calls = world.cluster.calls
        assert len([c for c in calls if c.startswith("create")]) == 3
        assert calls.count("status") <= 3

    async def test_says_each_event_once(self) -> None:
        world = await World().train(TRAINING)
        for _ in range(3):
            await world.reconcile()
        assert world.events == ["Started", "Scheduled", "Rendezvoused"]

    async def test_gone_resource_wants_no_other_pass(self) -> None:
        world = await World().settle()
        assert world.raw is not None
        world.cluster.store.delete(world.raw)
        assert await world.reconcile() is None

    async def test_resource_that_is_being_deleted_is_left_alone(self) -> None:
        world = World()
        assert world.raw is not None
        world.cluster.store.change(world.raw, meta={"finalizers": ["example.com/keep"]})
        world.cluster.store.delete(world.raw)
        assert await world.reconcile() is None
        assert world.cluster.calls == []

    async def test_resource_deleted_between_ledger_and_children_leaves_no_child_behind(self) -> None:
        world = World()
        await world.reconcile()
        assert world.raw is not None
        world.cluster.store.delete(world.raw)
        await world.reconcile()
        assert world.children() == {"Service": [], "ConfigMap": [], "Job": []}


class TestNameConflict:
    def service(self, **metadata: Any) -> dict[str, Any]:
        return {
            "apiVersion": "v1", "kind": "Service", "spec": {},
            "metadata": {"name": "train", "namespace": "default", **metadata},
        }  # fmt: skip

    def owner(self, **changes: Any) -> dict[str, Any]:
        made = {
            "apiVersion": constants.API_VERSION, "kind": constants.KIND, "name": "train", "uid": "old",
            "controller": True,
        }  # fmt: skip
        return {"ownerReferences": [made | changes]}

    async def test_foreign_service_refuses_the_job_and_no_child_is_made(self) -> None:
        world = World()
        world.cluster.add(self.service())
        await world.settle()
        assert world.state("Accepted") == ("False", "NameConflict")
        assert world.condition("Accepted").message == (
            "metadata.name: a Service named train that is not ours exists in namespace default; "
            "rename the job or remove that object"
        )
        assert world.status.phase == "Rejected"
        assert (world.jobs(), world.children()["ConfigMap"]) == ([], [])

    async def test_conflict_passes_when_the_other_service_goes(self) -> None:
        world = World()
        other = world.cluster.add(self.service())
        await world.settle()
        assert world.requeue is not None
        world.cluster.store.delete(other)
        await world.settle()
        assert world.jobs() == ["train-1"]

    @pytest.mark.parametrize(
        "changes",
        [{"kind": "Deployment"}, {"name": "other"}, {"apiVersion": "example.com/v1"}, {"controller": False}],
        ids=["another kind", "another name", "another group", "no controller"],
    )
    async def test_service_of_another_owner_is_foreign(self, changes: dict[str, Any]) -> None:
        world = World()
        world.cluster.add(self.service(**self.owner(**changes)))
        await world.settle()
        assert world.state("Accepted") == ("False", "NameConflict")

    async def test_service_that_was_orphaned_is_named_with_the_command_that_removes_all_that_is_left(self) -> None:
        world = World()
        world.cluster.add(self.service(labels=names.child_labels("train")))
        await world.settle()
        assert world.state("Accepted") == ("False", "NameConflict")
        assert "Service train is left of a job of this name" in world.condition("Accepted").message
        assert "-l ddp-operator.dev/job-name=train" in world.condition("Accepted").message

    async def test_service_left_by_a_deleted_namesake_is_waited_for(self) -> None:
        world = World()
        old = world.cluster.add(self.service(**self.owner()))
        for _ in range(3):
            requeue = await world.reconcile()
        assert world.state("Accepted") == ("True", "Valid")
        assert world.jobs() == []
        assert requeue is not None
        assert 0 < requeue <= 10
        world.cluster.store.delete(old)
        await world.settle()
        assert world.jobs() == ["train-1"]

    async def test_conflict_met_only_at_creation_is_said_and_looked_at_again(self) -> None:
        world = World()
        await world.reconcile()
        [ours] = world.cluster.store.list("Service")
        world.cluster.store.delete(ours)
        other = world.cluster.add(self.service())
        await world.settle()
        assert world.state("Accepted") == ("False", "NameConflict")
        assert "attempt 1 cannot start" in world.condition("Accepted").message
        assert world.requeue is not None
        assert world.requeue >= 10
        world.cluster.store.delete(other)
        await world.settle()
        assert (world.jobs(), world.state("Accepted")) == (["train-1"], ("True", "Valid"))


class TestRefusedSpec:
    BAD = template(trainer(command=None))

    async def test_is_rejected_with_the_sentence_of_ddp_render_and_no_child(self) -> None:
        world = await World(template=self.BAD).settle()
        with pytest.raises(InvalidManifest) as refused:
            check_manifest(yaml.safe_dump(resource(template=self.BAD)))
        assert world.condition("Accepted").message == str(refused.value)
        assert (world.status.phase, world.status.attempt) == ("Rejected", 0)
        assert world.children() == {"Service": [], "ConfigMap": [], "Job": []}
        assert world.events == ["InvalidSpec"]
        assert world.requeue == 300

    async def test_goes_on_once_it_is_mended(self) -> None:
        world = await World(template=self.BAD).settle()
        world.edit(template=template())
        await world.train(TRAINING)
        assert (world.status.phase, world.status.attempt) == ("Running", 1)
        assert world.state("Accepted") == ("True", "Valid")

    async def test_refusal_while_running_leaves_the_pods_alone(self) -> None:
        world = await World().train(TRAINING)
        world.edit(template=self.BAD)
        await world.settle()
        assert world.state("Accepted") == ("False", "InvalidSpec")
        assert world.condition("Accepted").message.startswith("the running attempt goes on with the former spec: ")
        assert (world.status.phase, len(world.pods())) == ("Running", 2)

    async def test_failure_under_a_refused_spec_waits_for_the_mended_one(self) -> None:
        world = await World().train(TRAINING)
        world.edit(template=self.BAD)
        world.end_pod(0, constants.EXIT_RETRYABLE, last_words("CUDAError"))
        await world.settle()
        assert (world.status.attempt, world.jobs()) == (2, ["train-1"])
        assert world.condition("Accepted").message.startswith("attempt 2 cannot start: ")
        world.edit(template=template())
        await world.settle()
        assert world.jobs() == ["train-1", "train-2"]

    @pytest.mark.parametrize("reason", ["Invalid", "Forbidden"])
    async def test_words_of_the_api_server_are_shown(self, reason: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        world = World()

        def refuse(job: Any) -> None:
            raise Refused('pods "x" is forbidden: exceeded quota', reason=reason)

        monkeypatch.setattr(world.cluster, "_admit", refuse)
        await world.settle()
        condition = world.condition("Accepted")
        assert condition.message == 'pods "x" is forbidden: exceeded quota'
        assert condition.reason == {"Invalid": "InvalidSpec", "Forbidden": "Forbidden"}[reason]
        assert world.children()["Service"] == []
        # A quota may be raised, which no event tells of.
        assert world.requeue == {"Invalid": 300, "Forbidden": 30}[reason]

    async def test_refusal_at_creation_is_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = World()
        await world.reconcile()
        admit = world.cluster._admit

        def refuse(job: Any) -> None:
            raise Refused("exceeded quota", reason="Forbidden")

        monkeypatch.setattr(world.cluster, "_admit", refuse)
        await world.settle()
        assert world.state("Accepted") == ("False", "Forbidden")
        assert world.requeue is not None
        monkeypatch.setattr(world.cluster, "_admit", admit)
        await world.settle()
        assert (world.state("Accepted"), world.jobs()) == (("True", "Valid"), ["train-1"])

    @pytest.mark.parametrize("attempt", [1, 2])
    async def test_api_server_that_fails_for_long_is_told_and_asked_again(
        self, attempt: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world = World()
        if attempt == 2:
            await world.train(TRAINING)
        create = world.cluster.create

        async def fail(manifest: Any, *, dry_run: bool = False) -> None:
            if manifest["kind"] == "Job":
                raise Unable('Job train: failed calling webhook "audit.example.com": connection refused')
            await create(manifest, dry_run=dry_run)

        monkeypatch.setattr(world.cluster, "create", fail)
        if attempt == 2:
            world.end_pod(0, constants.EXIT_RETRYABLE, last_words("CUDAError"))
        told = len(world.events)
        for _ in range(3):  # a single error is nobody's business
            with suppress(Unable):
                while await world.reconcile() == 0:
                    pass
        assert "ServerError" not in world.events
        world.clock.advance(10)
        await world.settle()
        assert world.state("Accepted") == ("Unknown", "ServerError")
        assert 'failed calling webhook "audit.example.com"' in world.condition("Accepted").message
        assert (world.status.phase, world.requeue) == ({1: "Pending", 2: "Restarting"}[attempt], 30)
        assert world.events[told:].count("ServerError") == 1
        monkeypatch.setattr(world.cluster, "create", create)
        await world.settle()
        assert (world.state("Accepted"), world.jobs()[-1]) == (("True", "Valid"), f"train-{attempt}")
        assert world.status.restarts.total == attempt - 1

    async def test_refused_patch_of_a_job_is_said_not_raised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = await World().train(TRAINING)

        async def refuse(*args: Any, seen: Any) -> None:
            raise Refused("a webhook says no", reason="Forbidden")

        monkeypatch.setattr(world.cluster, "patch_job", refuse)
        world.edit(suspend=True)
        await world.settle()
        assert "a webhook says no" in world.condition("Accepted").message

    async def test_spec_of_another_version_is_reported_and_told(self) -> None:
        item = resource()
        item["spec"]["futureField"] = 1
        world = World(item)
        await world.settle()
        assert 'unknown field "spec.futureField"' in world.condition("Accepted").message
        assert "the operator, or apply the definition of its version" in world.condition("Accepted").message
        assert (world.status.phase, world.events) == ("Rejected", ["InvalidSpec"])


class TestProgress:
    async def test_goes_into_status(self) -> None:
        world = await World().train(TRAINING)
        progress = world.status.progress
        assert progress is not None
        assert (progress.step, progress.total_steps, progress.percent, progress.loss) == (7, 10, "70.0%", "0.5")

    async def test_page_is_read_every_ten_seconds_at_most_while_training(self) -> None:
        world = await World().train(TRAINING)
        before = world.cluster.calls.count("scrape")
        for _ in range(9):
            world.clock.advance(1)
            await world.reconcile()
        assert world.cluster.calls.count("scrape") - before <= 1
        assert world.requeue == 10.0

    async def test_clock_set_back_does_not_silence_the_page(self) -> None:
        world = await World(nodes=1).train(TRAINING)
        before = world.cluster.calls.count("scrape")
        world.clock.advance(-3600)
        await world.reconcile()
        assert world.cluster.calls.count("scrape") == before + 1

    async def test_pass_between_two_pages_does_not_shake_conditions(self) -> None:
        world = await World().settle()
        world.run_pods()
        world.cluster.page = page(phase="Rendezvous")
        world.clock.advance(60)
        await world.settle()
        version = world.version
        world.clock.advance(0.5)  # an event comes before the next page is due
        await world.reconcile()
        assert world.cluster.calls[-1] != "scrape"
        assert world.version == version
        assert world.state("Rendezvoused") == ("False", "WaitingForWorkers")

    async def test_silent_page_is_said_after_a_while_and_not_asked_for_every_second(self) -> None:
        world = await World().settle()
        world.run_pods()
        world.cluster.page = None
        for _ in range(200):
            world.clock.advance(1)
            await world.reconcile()
        assert world.state("Rendezvoused") == ("Unknown", "NoMetricsPage")
        before = world.cluster.calls.count("scrape")
        for _ in range(30):
            world.clock.advance(1)
            await world.reconcile()
        assert world.cluster.calls.count("scrape") - before <= 3
        assert world.requeue == 10.0

    async def test_steps_that_a_log_has_shown_are_none_of_workers_that_wait_for_each_other(self) -> None:
        """A pod that cannot reach its peer after a restart in place waits for it up to joinTimeoutSeconds."""
        world = await World().train(page(ddp_step=7, phase="Running"))
        assert world.state("Progressing") == ("True", "Training")
        world.cluster.page = page(ddp_step=7, phase="Rendezvous") + f"{constants.METRIC_LAUNCHER_RESTARTS} 1\n"
        world.clock.advance(11)
        await world.settle()
        assert world.state("Rendezvoused") == ("False", "WaitingForWorkers")
        words = "all 2 pods run; workers start again in place, restart 1 (pod 0: Rendezvous)"
        assert world.condition("Rendezvoused").message == words
        assert world.state("Progressing") == ("False", "NoStepYet")
        assert world.condition("Progressing").message.endswith("since restart 1 in place")
        assert world.status.progress is not None
        assert world.status.progress.step == 7
        world.cluster.page = page(ddp_step=8, phase="Running")
        world.clock.advance(11)
        await world.settle()
        assert world.state("Progressing") == ("True", "Training")

    async def test_garbage_page_changes_nothing(self) -> None:
        world = await World().train(TRAINING)
        progress = world.status.progress
        world.cluster.page = "\x00garbage{{{\nddp_step NaN\nddp_loss{rank=\n" * 10
        world.clock.advance(11)
        await world.settle()
        assert world.status.phase == "Running"
        assert world.state("Rendezvoused") == ("True", "AllRanksJoined")
        assert progress is not None

    async def test_last_words_win_over_the_last_page(self) -> None:
        world = await World().train(TRAINING)
        words = last_words(progress={"ddp_step": 10.0, "ddp_total_steps": 10.0, "ddp_validation_accuracy": 0.97})
        world.end_pod(1)
        world.end_pod(0, 0, words)
        await world.settle()
        progress = world.status.progress
        assert progress is not None
        assert (world.status.phase, progress.step, progress.percent) == ("Succeeded", 10, "100.0%")
        assert (progress.val_accuracy, progress.eta) == ("0.97", None)


class TestSuccess:
    async def test_all_pods_succeeded(self) -> None:
        world = await World().train(TRAINING)
        world.end_pod(0)
        world.end_pod(1)
        await world.settle()
        status = world.status
        assert status.phase == "Succeeded"
        assert (status.nodes.succeeded, status.nodes.ready, status.nodes.failed) == (2, 0, 0)
        assert status.completion_time is not None
        assert world.events[-1] == "Succeeded"

    async def test_phase_never_falls_back_to_pending_on_the_way(self) -> None:
        world = await World().train(TRAINING)
        world.tell_end(0, 0)
        await world.settle()
        assert world.status.phase == "Running"
        world.tell_end(1, 0)  # and the Job controller has not said Complete yet
        await world.settle()
        assert world.status.phase == "Running"
        assert world.state("Progressing") == ("True", "Training")
        world.cluster.settle()
        await world.settle()
        assert world.status.phase == "Succeeded"

    async def test_end_absorbs_what_comes_later(self) -> None:
        world = await World().train(TRAINING)
        world.end_pod(0)
        world.end_pod(1)
        await world.settle()
        status = world.status
        world.edit(nodes=5, suspend=True)
        await world.settle()
        assert world.status == status

    async def test_time_to_live_deletes_the_resource_on_time_and_all_children(self) -> None:
        world = await World(ttlSecondsAfterFinished=100).train(TRAINING)
        world.end_pod(0)
        world.end_pod(1)
        await world.settle()
        assert world.requeue == 100.0
        world.clock.advance(99)
        await world.reconcile()
        assert world.raw is not None
        world.clock.advance(1)
        await world.reconcile()
        assert world.raw is None
        assert world.children() == {"Service": [], "ConfigMap": [], "Job": []}
