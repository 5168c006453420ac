"""The reconciler on a cluster in memory: actions of users and nodes, and their effect on the job and its children."""

import logging
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import yaml

from ddp_cli.client.validation import check_manifest
from ddp_operator.api import child_names, constants, faults
from ddp_operator.api.cluster import owner_uids
from ddp_operator.api.cluster_errors import Refused, ServerError
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.manifests.children import build_children
from ddp_operator.reconcile import executor
from tests.support.builders import last_words, page, resource, template, trainer
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness

TRAINING = page(step=7, total_steps=10, loss=0.5, phase="Running")


async def fail_attempt(harness: ReconcilerHarness) -> None:
    """End the pods of the current attempt, the first one by a CUDA error."""
    harness.end_pod(0, 82)
    await harness.settle()
    for pod in harness.pods():
        harness.cluster.end(pod, 137)
    harness.clock.advance(30)
    await harness.settle()


class TestCreate:
    async def test_creates_service_config_map_and_job_owned_by_resource(self) -> None:
        harness = await ReconcilerHarness().settle()
        children = harness.children()
        assert (children["Service"], children["Job"]) == (["train"], ["train-1"])
        uid = harness.raw["metadata"]["uid"] if harness.raw else ""
        [service], [launcher], [made] = map(harness.cluster.store.list, ("Service", "ConfigMap", "Job"))
        assert [owner_uids(child) for child in (service, made, launcher)] == [{uid}, {uid}, set()]

    async def test_first_job_is_created_before_status(self) -> None:
        harness = ReconcilerHarness()
        await harness.reconcile()
        made = ["create Secret", "create ConfigMap", "create Job", "create Service", "status"]
        assert harness.cluster.calls == made
        await harness.settle()
        assert set(harness.cluster.calls[len(made) :]) <= {"status"}

    async def test_ledger_that_is_lost_after_children_is_written_again(self) -> None:
        harness = ReconcilerHarness()
        await harness.reconcile()
        before = harness.status
        assert harness.raw is not None
        harness.cluster.store.change(harness.raw, status={})
        calls = len(harness.cluster.calls)
        await harness.reconcile()
        assert harness.cluster.calls[calls:] == ["status"]
        assert (harness.status.attempt, harness.status.counts) == (1, before.counts)

    async def test_children_are_built_once_for_unchanged_spec(self, monkeypatch: pytest.MonkeyPatch) -> None:
        harness = await ReconcilerHarness().settle()
        built: list[int] = []

        def build(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
            built.append(1)
            return build_children(*args, **kwargs)

        monkeypatch.setattr(executor, "build_children", build)
        await harness.reconcile()
        assert built == []
        harness.edit(nodes=3)
        await harness.reconcile()
        assert built == [1]

    @pytest.mark.parametrize(
        ("manager", "attempt"), [("example.com/dispatcher", 0), ("ddp-operator.dev/ddp-operator", 1)]
    )
    async def test_job_of_foreign_manager_is_ignored(self, manager: str, attempt: int) -> None:
        harness = await ReconcilerHarness(managedBy=manager).settle()
        assert harness.status.attempt == attempt
        assert bool(harness.cluster.calls) == bool(attempt)

    async def test_stored_field_that_cannot_be_read_is_logged_once_and_the_others_count(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        harness = await ReconcilerHarness().settle()
        for _ in range(2):
            raw = present(harness.raw)
            odd = {"phase": "Frozen", "progress": {"learningRate": 12, "step": 3}}
            harness.cluster.store.change(raw, status=raw["status"] | odd)
            await harness.reconcile()
        logged = [record.getMessage() for record in caplog.records if "cannot be read" in record.getMessage()]
        text = "status.phase, status.progress.learningRate cannot be read and are left out; the job continues without"
        assert [line.partition(": ")[2] for line in logged] == [text]
        assert (harness.status.attempt, len(harness.jobs())) == (1, 1)

    @pytest.mark.parametrize(
        ("state", "problem"),
        [(None, "is missing"), ({"version": 2}, "has version 2, and this operator reads 1")],
    )
    async def test_lost_state_of_operator_is_logged_and_used_restarts_stay_used(
        self, state: Any, problem: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        harness = ReconcilerHarness(recovery={"maxRestarts": 1, "inPlaceRestarts": 0})
        await harness.train()
        await fail_attempt(harness)
        await harness.train()
        assert (harness.status.attempt, harness.status.restarts.used) == (2, 1)

        raw = present(harness.raw)
        status = {name: value for name, value in raw["status"].items() if name != "operatorState"}
        status |= {} if state is None else {"operatorState": state}
        harness.cluster.store.change(raw, status=status)
        await fail_attempt(harness)
        assert (harness.status.phase, harness.condition("Failed").reason) == ("Failed", "RestartBudgetExhausted")
        text = f"status.operatorState {problem}; its counts are restored from status.restarts and the attempt"
        logged = [record.getMessage().partition(": ")[2] for record in caplog.records]
        assert logged.count(text) == 1

    async def test_second_pass_writes_nothing(self) -> None:
        harness = await ReconcilerHarness().settle()
        version = harness.version
        calls = len(harness.cluster.calls)
        await harness.reconcile()
        assert (harness.version, harness.cluster.calls[calls:]) == (version, [])

    async def test_pass_of_other_operator_writes_nothing(self) -> None:
        harness = await (await ReconcilerHarness().settle()).train()
        version = harness.version
        harness.restart_operator()
        await harness.reconcile()
        assert harness.version == version

    async def test_start_needs_four_creates_and_at_most_three_status_patches(self) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        assert harness.status.phase == "Running"
        calls = harness.cluster.calls
        assert len([c for c in calls if c.startswith("create")]) == 4
        assert calls.count("status") <= 3

    async def test_emits_each_event_once(self) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        for _ in range(3):
            await harness.reconcile()
        assert harness.events == ["Scheduled", "Rendezvoused"]

    async def test_deleted_resource_needs_no_pass(self) -> None:
        harness = await ReconcilerHarness().settle()
        assert harness.raw is not None
        harness.cluster.store.delete(harness.raw)
        assert await harness.reconcile() is None

    async def test_terminating_resource_is_not_changed(self) -> None:
        harness = ReconcilerHarness()
        assert harness.raw is not None
        harness.cluster.store.change(harness.raw, meta={"finalizers": ["example.com/keep"]})
        harness.cluster.store.delete(harness.raw)
        assert await harness.reconcile() is None
        assert harness.cluster.calls == []

    async def test_resource_deleted_before_status_leaves_no_child(self, monkeypatch: pytest.MonkeyPatch) -> None:
        harness = ReconcilerHarness()
        write = harness.cluster.patch_status

        async def delete_first(*args: Any, **kwargs: Any) -> None:
            assert harness.raw is not None
            harness.cluster.store.delete(harness.raw)
            await write(*args, **kwargs)

        monkeypatch.setattr(harness.cluster, "patch_status", delete_first)
        await harness.reconcile()
        await harness.reconcile()
        assert harness.children() | {"ConfigMap": []} == {"Service": [], "ConfigMap": [], "Job": []}


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

    async def test_foreign_service_refuses_job_without_children(self) -> None:
        harness = ReconcilerHarness()
        harness.cluster.add(self.service())
        await harness.settle()
        assert harness.state("Accepted") == ("False", "NameConflict")
        assert harness.condition("Accepted").message == (
            "metadata.name: Service train in namespace default does not belong to this job; "
            "rename the job or delete that object"
        )
        assert harness.status.phase == "Rejected"
        assert harness.jobs() == []

    async def test_conflict_is_resolved_when_other_service_is_deleted(self) -> None:
        harness = ReconcilerHarness()
        second = harness.cluster.add(self.service())
        await harness.settle()
        assert harness.requeue is not None
        harness.cluster.store.delete(second)
        await harness.settle()
        assert harness.jobs() == ["train-1"]

    @pytest.mark.parametrize(
        "changes",
        [{"kind": "Deployment"}, {"name": "other"}, {"apiVersion": "example.com/v1"}, {"controller": False}],
        ids=["another kind", "another name", "another group", "no controller"],
    )
    async def test_service_of_another_owner_is_foreign(self, changes: dict[str, Any]) -> None:
        harness = ReconcilerHarness()
        harness.cluster.add(self.service(**self.owner(**changes)))
        await harness.settle()
        assert harness.state("Accepted") == ("False", "NameConflict")

    async def test_orphaned_service_is_named_with_removal_command(self) -> None:
        harness = ReconcilerHarness()
        harness.cluster.add(self.service(labels=child_names.child_labels("train")))
        await harness.settle()
        assert harness.state("Accepted") == ("False", "NameConflict")
        assert "Service train remains from a job of this name" in harness.condition("Accepted").message
        assert "-l ddp-operator.dev/job-name=train" in harness.condition("Accepted").message

    async def test_service_of_deleted_resource_of_same_name_is_waited_for(self) -> None:
        harness = ReconcilerHarness()
        old = harness.cluster.add(self.service(**self.owner()))
        for _ in range(3):
            requeue = await harness.reconcile()
        assert harness.state("Accepted") == ("True", "Valid")
        assert requeue is not None
        assert 0 < requeue <= 10
        harness.cluster.store.delete(old)
        await harness.settle()
        [service] = harness.cluster.store.list("Service")
        assert (harness.jobs(), service["metadata"]["uid"]) != (["train-1"], old["metadata"]["uid"])

    async def test_service_conflict_after_job_creation_creates_no_second_job(self) -> None:
        harness = ReconcilerHarness()
        harness.cluster.add(self.service())
        await harness.settle()
        assert [call for call in harness.cluster.calls if call.endswith(" Job")] == ["create Job", "dry-run Job"]
        harness.clock.advance(30)
        await harness.settle()
        assert harness.cluster.calls.count("create Job") == 1
        assert (harness.jobs(), harness.status.attempt, harness.events) == ([], 0, ["NameConflict"])


class TestRefusedSpec:
    BAD = template(trainer(command=None))

    async def test_invalid_job_is_refused_with_message_of_ddp_render(self) -> None:
        harness = await ReconcilerHarness(template=self.BAD).settle()
        with pytest.raises(InvalidManifest) as refused:
            check_manifest(yaml.safe_dump(resource(template=self.BAD)))
        assert harness.condition("Accepted").message == str(refused.value)
        assert (harness.status.phase, harness.status.attempt) == ("Rejected", 0)
        assert harness.children() == {"Service": [], "ConfigMap": [], "Job": []}
        assert harness.events == ["InvalidSpec"]
        assert harness.requeue == 300

    async def test_refusal_of_running_job_keeps_pods(self) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        harness.edit(template=self.BAD)
        await harness.settle()
        assert harness.state("Accepted") == ("False", "InvalidSpec")
        assert harness.condition("Accepted").message.startswith("the running attempt keeps the previous spec: ")
        assert (harness.status.phase, len(harness.pods())) == ("Running", 2)

    @pytest.mark.parametrize("reason", ["Invalid", "Forbidden"])
    async def test_message_of_api_server_is_shown(self, reason: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        harness = ReconcilerHarness()

        def refuse(job: Any) -> None:
            raise Refused('pods "x" is forbidden: exceeded quota', reason=reason)

        monkeypatch.setattr(harness.cluster, "_admit", refuse)
        await harness.settle()
        condition = harness.condition("Accepted")
        assert condition.message == 'pods "x" is forbidden: exceeded quota'
        assert condition.reason == {"Invalid": "InvalidSpec", "Forbidden": "Forbidden"}[reason]
        assert harness.children()["Service"] == []
        # A quota may be raised, which no event reports.
        assert harness.requeue == {"Invalid": 300, "Forbidden": 30}[reason]

    @pytest.mark.parametrize("attempt", [1, 2])
    async def test_failing_api_server_is_reported_and_retried(
        self, attempt: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        harness = ReconcilerHarness()
        if attempt == 2:
            await harness.train(TRAINING)
        create = harness.cluster.create

        async def fail(manifest: Any, *, dry_run: bool = False) -> Any:
            if manifest["kind"] == "Job":
                raise ServerError('Job train: failed calling webhook "audit.example.com": connection refused')
            return await create(manifest, dry_run=dry_run)

        monkeypatch.setattr(harness.cluster, "create", fail)
        if attempt == 2:
            harness.end_pod(0, constants.EXIT_RETRYABLE, last_words("CUDAError"))
        report = len(harness.events)
        for _ in range(3):  # a single error is not reported
            with suppress(ServerError):
                while await harness.reconcile() == 0:
                    pass
        assert "ServerError" not in harness.events
        harness.clock.advance(10)
        await harness.settle()
        assert harness.state("Accepted") == ("Unknown", "ServerError")
        assert 'failed calling webhook "audit.example.com"' in harness.condition("Accepted").message
        assert (harness.status.phase, harness.requeue) == ({1: "Pending", 2: "Restarting"}[attempt], 30)
        assert harness.events[report:].count("ServerError") == 1
        monkeypatch.setattr(harness.cluster, "create", create)
        await harness.settle()
        assert (harness.state("Accepted"), harness.jobs()[-1]) == (("True", "Valid"), f"train-{attempt}")
        assert harness.status.counts.total == attempt - 1

    async def test_refused_patch_of_job_is_condition_and_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        harness = await ReconcilerHarness().train(TRAINING)

        async def refuse(*args: Any, seen: Any) -> None:
            raise Refused("a webhook says no", reason="Forbidden")

        monkeypatch.setattr(harness.cluster, "patch_job", refuse)
        harness.edit(suspend=True)
        await harness.settle()
        assert "a webhook says no" in harness.condition("Accepted").message


class TestPublishedProgress:
    async def test_clock_change_does_not_stop_page_reads(self) -> None:
        harness = await ReconcilerHarness(nodes=1).train(TRAINING)
        before = harness.cluster.calls.count("report")
        harness.clock.advance(-3600)
        await harness.reconcile()
        assert harness.cluster.calls.count("report") == before + 1

    async def test_pass_between_two_pages_changes_no_condition(self) -> None:
        harness = await ReconcilerHarness().settle()
        harness.run_pods()
        harness.cluster.page = page(phase="Rendezvous")
        harness.clock.advance(60)
        await harness.settle()
        version = harness.version
        harness.clock.advance(0.5)  # an event comes before the next page is due
        await harness.reconcile()
        assert harness.cluster.calls[-1] != "report"
        assert harness.version == version
        assert harness.state("Rendezvoused") == ("False", "WaitingForWorkers")

    async def test_pods_of_the_former_release_train_on_without_a_report(self) -> None:
        """Their launcher has a metrics page only, and writes other names and a text for the last failure."""
        harness = await ReconcilerHarness(nodes=2).train(page(step=7, total_steps=10, phase="Running"))
        before = harness.status
        harness.cluster.page = ""
        for _ in range(20):
            harness.clock.advance(30)
            await harness.settle()
        assert (harness.state("Rendezvoused"), harness.state("Progressing")) == (
            ("True", "AllRanksJoined"),
            ("True", "Training"),
        )
        assert (harness.status.phase, harness.status.counts, harness.status.attempt) == (
            "Running",
            before.counts,
            1,
        )
        assert (present(harness.status.progress).step, harness.status.reason) == (7, "")
        words = {"version": 1, "category": "OOM", "rank": 1, "node": 1, "hint": "h", "type": "E", "message": "m"}
        harness.end_pod(
            1, constants.EXIT_OOM, words | {"progress": {"ddp_step": 9}, "lastFailure": "{}", "awaited": "{}"}
        )
        await harness.settle()
        failure = present(harness.status.last_failure)
        assert (failure.category, failure.rank, failure.message, harness.status.attempt) == ("OOM", 1, "m", 2)

    async def test_unreadable_page_changes_nothing(self) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        progress = harness.status.progress
        harness.cluster.page = "\x00garbage{{{\nddp_step NaN\nddp_loss{rank=\n" * 10
        harness.clock.advance(11)
        await harness.settle()
        assert harness.status.phase == "Running"
        assert harness.state("Rendezvoused") == ("True", "AllRanksJoined")
        assert progress is not None


class TestSuccess:
    async def test_all_pods_succeeded(self) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        harness.end_pod(0)
        harness.end_pod(1)
        await harness.settle()
        status = harness.status
        assert status.phase == "Succeeded"
        assert (status.nodes.succeeded, status.nodes.ready, status.nodes.failed) == (2, 0, 0)
        assert status.completion_time is not None
        assert harness.events[-1] == "Succeeded"

    async def test_ended_job_ignores_later_observations(self) -> None:
        harness = await ReconcilerHarness().train(TRAINING)
        harness.end_pod(0)
        harness.end_pod(1)
        await harness.settle()
        status = harness.status
        harness.edit(nodes=5, suspend=True)
        await harness.settle()
        assert harness.status == status

    async def test_time_to_live_deletes_resource_on_time_and_all_children(self) -> None:
        harness = await ReconcilerHarness(ttlSecondsAfterFinished=100).train(TRAINING)
        harness.end_pod(0)
        harness.end_pod(1)
        await harness.settle()
        assert harness.requeue == 100.0
        harness.clock.advance(99)
        await harness.reconcile()
        assert harness.raw is not None
        harness.clock.advance(1)
        await harness.reconcile()
        assert harness.raw is None
        assert harness.children() | {"ConfigMap": []} == {"Service": [], "ConfigMap": [], "Job": []}


async def test_step_before_a_kill_is_that_of_the_peer_that_still_reports() -> None:
    """A SIGKILL of the launcher leaves no report, and the page was read some seconds before."""
    harness = ReconcilerHarness()
    await harness.train(page(step=31, phase="Running"))
    harness.cluster.page = page(step=49, phase="Running")
    harness.clock.advance(2)
    harness.end_pod(1, 137)
    await harness.settle()
    assert harness.status.attempt == 2
    assert present(harness.status.last_restart).step == 49


class TestFaults:
    """An exception in a view of the status is left out of the pass, and named once in the log."""

    @pytest.mark.parametrize(
        ("place", "view"),
        [
            ("ddp_operator.decide.report.build_progress", "progress"),
            ("ddp_operator.manager.reports.find_transitions", "transitions"),
            ("ddp_operator.decide.job_events.list_transition_events", "Events"),
        ],
    )
    async def test_pass_continues_without_view(
        self, place: str, view: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise OverflowError("date value out of range")

        monkeypatch.setattr(place, fail)
        monkeypatch.setattr(faults, "FAULTS", faults.FaultLog())
        harness = ReconcilerHarness()
        await harness.train(TRAINING)
        assert harness.status.phase == "Running"
        assert harness.state("Rendezvoused")[0] == "True"
        messages = [record.getMessage() for record in caplog.records]
        lines = [message for message in messages if " is left out: OverflowError" in message]
        assert lines
        assert {line.partition(" ")[0] for line in lines} == {view.partition(" ")[0]}
        assert len(lines) <= 2, "it is named once for each job"


async def test_one_json_line_per_ended_job(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ddp_operator.ended"):
        harness = await ReconcilerHarness(recovery={"maxRestarts": 0}).train()
        harness.end_pod(1, 81)
        await harness.settle()
        harness.restart_operator()
        await harness.settle()
    [line] = [record.getMessage() for record in caplog.records if record.name == "ddp_operator.ended"]
    fields = msgspec.json.decode(line)
    assert (fields["event"], fields["name"], fields["phase"]) == ("JobEnded", "train", "Failed")
    assert (fields["category"], fields["attempts"], fields["step"], fields["pods"]) == ("UserError", 1, 5, 2)
    assert fields["node"] == "node-a"
