"""A job that names a profile: it copies it once, and waits for it."""

from typing import Any

import pytest

from ddp_operator.api import constants, other_kinds
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.schema import KERNEL
from ddp_operator.api.status import Profile
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.profiles import FEATURE
from ddp_operator.features.profiles.defaults import JOB_DEFAULTS, read_job_defaults
from ddp_operator.features.profiles.service import Profiles
from ddp_operator.manager.operator import Operator
from ddp_operator.manager.settings import Settings, SettingsError
from tests.support.builders import Json, profile, resource, template, trainer
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness

GIVEN: Json = {
    "recovery": {"maxRestarts": 9},
    "template": template(trainer(env=[{"name": "A", "value": "1"}]), nodeSelector={"pool": "gpu"}),
}
OWN = template({"name": "trainer", "command": ["python", "own.py"]})


def start(harness: ReconcilerHarness, defaults: Profile | None = None) -> ReconcilerHarness:
    """Start the operator with the feature."""
    harness.hooks = Hooks((FEATURE,), {FEATURE.name: Profiles(harness.cluster.read_profile, defaults)})
    harness.restart_operator()
    return harness


def harness_of(given: Any = GIVEN, *, kind: str = "", **spec: Any) -> ReconcilerHarness:
    """Return a job that names a profile, which exists unless ``given`` is None."""
    reference = {"name": "gpu"} | ({"kind": kind} if kind else {})
    harness = start(ReconcilerHarness(resource(**{"nodes": 2, "template": OWN, "profileRef": reference, **spec})))
    if given is not None:
        harness.cluster.add(profile(given, kind=kind or other_kinds.CLUSTER_PROFILE_KIND))
    return harness


def edit_profile(harness: ReconcilerHarness, job: Json, **members: Any) -> None:
    result = present(harness.cluster.store.get(other_kinds.CLUSTER_PROFILE_KIND, "default", "gpu"))
    harness.cluster.store.change(result, spec={"job": job, **members})


def pod_spec(harness: ReconcilerHarness) -> Json:
    *_, job = harness.cluster.store.list("Job")
    spec: Json = job["spec"]["template"]["spec"]
    return spec


class TestTaken:
    @pytest.mark.parametrize("kind", ["", *(other_kinds.CLUSTER_PROFILE_KIND, other_kinds.PROFILE_KIND)])
    async def test_its_values_are_under_jobs_own(self, kind: str) -> None:
        harness = await harness_of(kind=kind).settle()
        pod = pod_spec(harness)
        assert pod["nodeSelector"] == {"pool": "gpu"}
        assert pod["containers"][0]["image"] == "example.com/train:1"
        assert "own.py" in str(pod["containers"][0])
        taken = present(harness.status.profile)
        assert (taken.kind, taken.name, taken.job) == (kind or other_kinds.CLUSTER_PROFILE_KIND, "gpu", GIVEN)
        assert harness.raw is not None
        assert harness.raw["spec"]["template"] == OWN

    async def test_profile_is_read_before_first_object(self) -> None:
        harness = harness_of()
        await harness.reconcile()
        assert (harness.cluster.calls, harness.requeue) == ([f"get {other_kinds.CLUSTER_PROFILE_KIND}", "status"], 0)
        await harness.settle()
        calls = harness.cluster.calls
        assert calls.index("create Job") > calls.index(f"dry-run {constants.KIND}") > calls.index("status")

    async def test_later_edits_change_no_job_that_has_started(self) -> None:
        harness = await harness_of().train()
        calls = len(harness.cluster.calls)
        edit_profile(harness, {"recovery": {"maxRestarts": 0}, "template": template(trainer(image="new"))})
        harness.restart_operator()
        harness.end_pod(0, constants.EXIT_RETRYABLE)
        await harness.train()
        assert harness.status.attempt == 2
        assert pod_spec(harness)["containers"][0]["image"] == "example.com/train:1"
        assert f"get {other_kinds.CLUSTER_PROFILE_KIND}" not in harness.cluster.calls[calls:]

    async def test_profile_copy_is_kept_if_start_was_lost(self) -> None:
        harness = harness_of()
        await harness.settle()
        assert harness.raw is not None
        taken = harness.raw["status"]["profile"]
        harness.cluster.store.change(harness.raw, status={"profile": taken})  # the write of attempt 1 was lost
        edit_profile(harness, {})
        harness.restart_operator()
        await harness.settle()
        assert harness.status.attempt == 1
        assert present(harness.status.profile).digest == taken["digest"]

    async def test_job_follows_profile_edits_until_start(self) -> None:
        harness = await harness_of({"elastic": {"minNodes": 3, "maxNodes": 4}}, template=template()).settle()
        assert harness.status.phase == "Rejected"
        edit_profile(harness, {"elastic": {"minNodes": 1, "maxNodes": 4}})
        await harness.settle()
        assert (harness.status.phase, harness.status.attempt) == ("Pending", 1)

    async def test_job_that_names_none_any_more_has_none(self) -> None:
        harness = await harness_of(None, template=template()).settle()
        harness.edit(profileRef=None)
        await harness.settle()
        assert (harness.status.attempt, harness.status.profile) == (1, None)


class TestProfileWaits:
    async def test_missing_profile_delays_job(self) -> None:
        harness = await harness_of(None).settle()
        assert (harness.status.phase, harness.status.reason, harness.requeue) == ("Pending", "ProfileNotFound", 10.0)
        assert "does not exist" in harness.condition("Accepted").message
        assert harness.jobs() == []
        harness.cluster.add(profile(GIVEN))
        await harness.settle()
        assert (harness.state("Accepted"), harness.jobs()) == (("True", "Valid"), ["train-1"])

    async def test_profile_of_other_namespace_is_not_used(self) -> None:
        harness = harness_of(None, kind=other_kinds.PROFILE_KIND)
        there = profile(GIVEN, kind=other_kinds.PROFILE_KIND)
        harness.cluster.add(there | {"metadata": {"name": "gpu", "namespace": "other"}})
        await harness.settle()
        assert "does not exist in namespace default" in harness.condition("Accepted").message

    async def test_missing_read_permission_is_reported(self) -> None:
        harness = harness_of()
        harness.cluster.hidden = True
        await harness.settle()
        assert (harness.state("Accepted"), harness.requeue) == (("False", "Forbidden"), 10.0)
        assert "clusterddptrainingprofiles is forbidden" in harness.condition("Accepted").message
        harness.cluster.hidden = False
        await harness.settle()
        assert harness.jobs() == ["train-1"]


class TestRefused:
    async def test_profile_with_removed_locks_is_named_with_their_replacement(self) -> None:
        harness = harness_of()
        edit_profile(harness, GIVEN, locked=["recovery.maxRestarts"])
        await harness.settle()
        assert (harness.status.phase, harness.status.reason, harness.jobs()) == ("Rejected", "InvalidSpec", [])
        message = harness.condition("Accepted").message
        assert "ClusterDDPTrainingProfile gpu: spec.locked: removed; refuse the values in a Validating" in message
        edit_profile(harness, GIVEN)
        await harness.settle()
        assert harness.jobs() == ["train-1"]

    async def test_running_job_of_a_former_version_continues_without_its_locks(self) -> None:
        harness = await harness_of().train()
        raw = present(harness.raw)
        former = {**raw["status"]["profile"], "digest": "0" * 16, "locked": ["recovery.maxRestarts"]}
        harness.cluster.store.change(raw, status={**raw["status"], "profile": former})
        harness.restart_operator()
        harness.end_pod(0, constants.EXIT_RETRYABLE)
        await harness.train()
        assert (harness.status.attempt, harness.state("Accepted")) == (2, ("True", "Valid"))
        assert pod_spec(harness)["nodeSelector"] == {"pool": "gpu"}

    async def test_whole_that_breaks_rule(self) -> None:
        harness = await harness_of({"elastic": {"minNodes": 3, "maxNodes": 4}}, template=template()).settle()
        assert (harness.status.phase, harness.status.reason) == ("Rejected", "InvalidSpec")
        assert "spec.nodes" in harness.condition("Accepted").message

    async def test_size_beyond_bounds_of_profile_is_refused_while_running(self) -> None:
        harness = await harness_of({"elastic": {"minNodes": 1, "maxNodes": 3}}, template=template()).train()
        harness.edit(nodes=4)
        await harness.settle()
        assert (harness.status.attempt_nodes, harness.state("Accepted")) == (2, ("False", "InvalidSpec"))
        harness.edit(nodes=3)
        await harness.settle()
        assert (harness.status.attempt_nodes, harness.state("Accepted")) == (3, ("True", "Valid"))

    @pytest.mark.parametrize(
        ("given", "words"), [({"checkpoint": {"claimName": "c"}}, "checkpoint.path"), ({"recovery": []}, "recovery")]
    )
    async def test_whole_that_lacks_something(self, given: Json, words: str) -> None:
        harness = await harness_of(given, template=template()).settle()
        assert (harness.status.phase, harness.status.reason) == ("Rejected", "InvalidSpec")
        assert words in harness.condition("Accepted").message


SECURE: Json = {"securityProfile": "Restricted"}


def with_defaults(harness: ReconcilerHarness, given: Json = SECURE) -> ReconcilerHarness:
    """Return a harness whose operator was started with these defaults."""
    return start(harness, read_job_defaults(given, KERNEL))


def may_be_root(harness: ReconcilerHarness) -> bool:
    return not pod_spec(harness)["securityContext"].get("runAsNonRoot")


class TestDefaultsOfTheOperator:
    async def test_defaults_apply_to_job_without_own_values(self) -> None:
        harness = await with_defaults(ReconcilerHarness()).train()
        assert not may_be_root(harness)
        taken = present(harness.status.profile)
        assert (taken.kind, taken.name, taken.job) == (JOB_DEFAULTS, "", SECURE)
        assert f"dry-run {constants.KIND}" not in harness.cluster.calls  # it has only its own rules

    async def test_job_overrides_defaults(self) -> None:
        assert may_be_root(await with_defaults(ReconcilerHarness(securityProfile="Default")).train())

    async def test_are_under_profiles_values(self) -> None:
        harness = await with_defaults(harness_of(GIVEN | {"securityProfile": "Default"})).train()
        assert may_be_root(harness)
        assert present(harness.status.profile).name == "gpu"

    async def test_started_job_keeps_initial_defaults(self) -> None:
        harness = await ReconcilerHarness(template=template(trainer())).train()
        calls = len(harness.cluster.calls)
        jobs = harness.cluster.store.list("Job")
        with_defaults(harness)
        await harness.settle()
        assert harness.cluster.store.list("Job") == jobs
        assert not [call for call in harness.cluster.calls[calls:] if call.startswith(("create", "delete", "dry-run"))]
        harness.end_pod(0, constants.EXIT_RETRYABLE)
        await harness.train()
        assert (harness.status.attempt, may_be_root(harness)) == (2, True)

    async def test_queued_job_keeps_its_job(self) -> None:
        labels = {constants.KUEUE_QUEUE_LABEL: "q"}
        harness = await ReconcilerHarness(resource(labels=labels, nodes=2)).settle()
        (job,) = harness.cluster.store.list("Job")
        await with_defaults(harness).settle()
        assert harness.cluster.store.list("Job") == [job]

    async def test_defaults_of_job_survive_their_removal_from_operator(self) -> None:
        harness = await with_defaults(ReconcilerHarness()).train()
        with_defaults(harness, {})
        harness.end_pod(0, constants.EXIT_RETRYABLE)
        await harness.train()
        assert (harness.status.attempt, may_be_root(harness)) == (2, False)

    async def test_defaults_are_kept_if_start_was_lost(self) -> None:
        harness = await with_defaults(ReconcilerHarness()).settle()
        raw = present(harness.raw)
        harness.cluster.store.change(raw, status={"profile": raw["status"]["profile"]})
        await with_defaults(harness, {}).settle()
        assert (harness.status.attempt, may_be_root(harness)) == (1, False)

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"nodes": 3}, 'unknown field "nodes"; known fields: securityProfile'),
            ({"securityProfile": "Strict"}, 'spec.securityProfile: Unsupported value: "Strict"'),
        ],
    )
    def test_that_cannot_be_used_are_refused(self, given: Json, words: str) -> None:
        with pytest.raises(InvalidManifest) as caught:
            read_job_defaults(given, KERNEL)
        assert words in str(caught.value)


def test_operator_does_not_start_with_invalid_defaults() -> None:
    settings = Settings.from_env({"DDP_OPERATOR_JOB_DEFAULTS": '{"nodes": 3}'}, (FEATURE,))
    with pytest.raises(SettingsError, match=r'^DDP_OPERATOR_JOB_DEFAULTS: unknown field "nodes"'):
        Operator(settings, (FEATURE,))
