"""The launcher that the jobs of a namespace share, and other objects with its name."""

import asyncio
from typing import Any

import pytest

from ddp_operator.api import child_names, constants
from ddp_operator.api.cluster import Key, Object
from ddp_operator.api.cluster_errors import Refused, ServerError
from ddp_operator.manifests.children import build_launcher_config_map, load_launcher
from ddp_operator.reconcile.reconciler import Reconciler
from ddp_operator.reconcile.turns import Turns
from tests.support.builders import job, resource
from tests.support.fake_cluster import ReconcilerHarness

NAME = child_names.launcher_config_map_name(load_launcher().digest)
OWN = child_names.child_labels("")


async def test_jobs_share_launcher_which_one_operator_creates_and_next_one_compares() -> None:
    harness = await ReconcilerHarness().settle()
    [launcher] = harness.cluster.store.list("ConfigMap")
    assert (launcher["metadata"]["name"], launcher["immutable"]) == (NAME, True)
    for name, creations in (("second", 0), ("third", 1), ("fourth", 0)):
        if name == "third":
            harness.reconciler = Reconciler(harness.cluster, turns=Turns(), clock=harness.clock)
        harness.cluster.calls.clear()
        harness.cluster.add(resource(name, labels={"team": name}))
        await harness.reconciler.reconcile(Key("default", name))
        assert harness.cluster.calls.count("create ConfigMap") == creations, name
    assert harness.cluster.store.list("ConfigMap") == [launcher]


@pytest.mark.parametrize(("refused", "creations"), [(0, 1), (2, 3)])
async def test_jobs_that_start_at_once_create_the_launcher_once(
    refused: int, creations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = ReconcilerHarness()
    create = harness.cluster.create
    tried = 0

    async def create_slowly(manifest: Object, *, dry_run: bool = False) -> Any:
        nonlocal tried
        if manifest["kind"] == "ConfigMap":
            tried += 1
            await asyncio.sleep(0)  # another pass goes on
            if tried <= refused:
                raise ServerError("unavailable")
        return await create(manifest, dry_run=dry_run)

    monkeypatch.setattr(harness.cluster, "create", create_slowly)
    names = ("train", "second", "third")
    for name in names[1:]:
        harness.cluster.add(resource(name))
    passes = (harness.reconciler.reconcile(Key("default", name)) for name in names)
    await asyncio.gather(*passes, return_exceptions=True)
    assert tried == creations


async def test_namespace_with_jobs_that_upload_has_a_second_launcher_that_those_share() -> None:
    harness = await ReconcilerHarness().settle()
    harness.cluster.calls.clear()
    for name in ("first", "second"):
        harness.cluster.add(resource(name, checkpoint={"path": "/c", "url": f"s3://bucket/{name}"}))
        await harness.reconciler.reconcile(Key("default", name))
    assert harness.cluster.calls.count("create ConfigMap") == 1
    uploading = child_names.launcher_config_map_name(load_launcher(frozenset({"mirror"})).digest)
    assert {item["metadata"]["name"] for item in harness.cluster.store.list("ConfigMap")} == {NAME, uploading}
    mounted = {
        job["metadata"]["name"]: volume["configMap"]["name"]
        for job in harness.cluster.store.list("Job")
        for volume in job["spec"]["template"]["spec"]["volumes"]
        if volume["name"] == constants.LAUNCHER_VOLUME
    }
    assert mounted == {"train-1": NAME, "first-1": uploading, "second-1": uploading}


async def test_deleted_launcher_of_a_job_that_uploads_is_recreated_as_its_own() -> None:
    harness = await ReconcilerHarness(checkpoint={"path": "/c", "url": "s3://bucket/train"}).settle()
    [launcher] = harness.cluster.store.list("ConfigMap")
    harness.cluster.store.delete(launcher)
    await harness.settle()
    [again] = harness.cluster.store.list("ConfigMap")
    assert again["metadata"]["name"] == launcher["metadata"]["name"] != NAME
    assert harness.jobs() == ["train-1"], "it is this version's, so no new Job is needed"


async def test_launcher_has_labels_of_a_job_only_if_a_policy_demands_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for demands, labels in ((False, OWN), (True, {"team": "nlp"} | OWN)):
        harness = ReconcilerHarness(labels={"team": "nlp"})
        create = harness.cluster.create

        async def check(
            manifest: Object, *, dry_run: bool = False, demands: bool = demands, create: Any = create
        ) -> Any:
            if demands and "team" not in manifest["metadata"].get("labels", {}):
                raise Refused("policy: the label team is missing", reason="Forbidden")
            return await create(manifest, dry_run=dry_run)

        monkeypatch.setattr(harness.cluster, "create", check)
        await harness.settle()
        [launcher] = harness.cluster.store.list("ConfigMap")
        assert launcher["metadata"]["labels"] == labels
        assert harness.jobs() == ["train-1"]


async def test_launcher_belongs_to_definition_of_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = ReconcilerHarness()
    definition = {"kind": "CustomResourceDefinition", "uid": "definition"}

    async def read() -> Any:
        return definition

    monkeypatch.setattr(harness.cluster, "definition", read)
    await harness.settle()
    [launcher] = harness.cluster.store.list("ConfigMap")
    assert launcher["metadata"]["ownerReferences"] == [definition]


async def test_launcher_that_is_being_deleted_is_waited_for_and_recreated() -> None:
    harness = ReconcilerHarness()
    made = build_launcher_config_map(job(), load_launcher())
    stored = harness.cluster.add({**made, "metadata": made["metadata"] | {"finalizers": ["example.org/hold"]}})
    harness.cluster.store.delete(stored)
    await harness.settle()
    assert harness.jobs() == [], "its pods would start with that launcher"
    harness.cluster.store.change(stored, meta={"finalizers": []})
    harness.clock.advance(1)
    await harness.settle()
    assert harness.jobs() == ["train-1"]
    [launcher] = harness.cluster.store.list("ConfigMap")
    assert launcher["metadata"]["uid"] != stored["metadata"]["uid"]


@pytest.mark.parametrize(
    "changes",
    [{"metadata": {"labels": {}}}, {"data": {"launcher.py": "print('another')"}}, {"immutable": False}],
    ids=["without labels", "another launcher", "changeable"],
)
async def test_foreign_object_is_neither_used_nor_changed(changes: dict[str, Any]) -> None:
    harness = ReconcilerHarness()
    made = build_launcher_config_map(job(), load_launcher()) | changes
    metadata = {"labels": OWN, "name": NAME, "namespace": "default"} | made["metadata"]
    stored = harness.cluster.add({**made, "metadata": metadata})
    await harness.settle()
    condition = harness.condition("Accepted")
    assert (condition.status, condition.reason) == ("False", "NameConflict")
    assert f"kubectl -n default delete configmap {NAME}" in condition.message
    assert harness.jobs() == []
    assert harness.cluster.store.list("ConfigMap") == [stored]
