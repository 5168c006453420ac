"""The contract of every cluster with the reconciler: one suite for all implementations (the fixture ``driver``)."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api import constants
from ddp_operator.api.cluster import Key, Object, Snapshot
from ddp_operator.api.cluster_errors import AlreadyExists, Refused, VersionConflict
from ddp_operator.api.job import owner_reference
from ddp_operator.api.parse import parse_resource
from ddp_operator.features import SCHEMA
from tests.support.cluster_drivers import ClusterDriver
from tests.support.cluster_drivers.base import index_of, living, serve

KEY = Key("default", "train")
JOB = "train-1"
FATAL = 82
REPLACED = 85
LABELS = {constants.LABEL_JOB_NAME: KEY.name, constants.LABEL_MANAGED_BY: constants.MANAGED_BY}


def metadata(name: str, owner: Object | None = None) -> dict[str, Any]:
    references = [owner_reference(parse_resource(owner, SCHEMA))] if owner is not None else []
    return {"name": name, "namespace": KEY.namespace, "labels": LABELS, "ownerReferences": references}


def service(owner: Object | None = None, name: str = "train") -> dict[str, Any]:
    spec = {"clusterIP": "None", "ports": [{"name": "rendezvous", "port": 29400}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(name, owner), "spec": spec}


def config_map(owner: Object | None = None) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata("train-launcher", owner), "data": {"a": "b"}}


def job(owner: Object | None = None, nodes: int = 2, *, suspend: bool = False) -> dict[str, Any]:
    container = {"name": "trainer", "image": "x", "command": ["python", "train.py"]}
    pod = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": "trainer", "operator": "NotIn", "values": [REPLACED, 130, 137, 143, 255]},
        },
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(JOB, owner),
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 2**31 - 1,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": rules},
            "suspend": suspend,
            "template": {"metadata": {"labels": LABELS}, "spec": pod},
        },
    }


async def start_job(driver: ClusterDriver, nodes: int = 2) -> Object:
    """Create a resource and its Job, and run all pods."""
    owner = await driver.add_resource(KEY.name)
    await driver.cluster.create(driver.dress(job(owner, nodes)))
    await until_running(driver, nodes)
    return owner


async def until_running(driver: ClusterDriver, nodes: int) -> Snapshot:
    snapshot = await driver.until(KEY, lambda seen: len(living(seen)) == nodes, f"{nodes} pods")
    for index, pod in living(snapshot).items():
        if not runs(pod):
            await driver.run_pod(JOB, index)
    return await driver.until(KEY, lambda seen: all(map(runs, living(seen).values())), "all pods running")


def runs(pod: Object) -> bool:
    return bool(pod["status"].get("phase") == "Running")


def has(item: Object, kind: str) -> bool:
    conditions = (item.get("status") or {}).get("conditions") or ()
    return any(c["type"] == kind and c["status"] == "True" for c in conditions)


def ended(snapshot: Snapshot) -> dict[int, Any]:
    """Return index -> terminated state of the trainer, of every pod that ended."""
    states = {}
    for pod in snapshot.pods:
        for status in pod["status"].get("containerStatuses") or ():
            if terminated := status["state"].get("terminated"):
                states[index_of(pod)] = terminated
    return states


# --- pods -------------------------------------------------------------------------------------------------------------


async def test_exit_code_and_termination_message_of_pod_are_in_its_status(driver: ClusterDriver) -> None:
    await start_job(driver)
    await driver.finish_pod(JOB, 1, code=FATAL, message='{"category": "OOM"}')
    snapshot = await driver.until(KEY, lambda seen: 1 in ended(seen), "the end of pod 1")
    state = ended(snapshot)[1]
    assert (state["exitCode"], state["message"]) == (FATAL, '{"category": "OOM"}')
    assert state["finishedAt"] >= state["startedAt"]


# --- objects ----------------------------------------------------------------------------------------------------------


async def test_resources_with_checkpoint_claim_are_listed(driver: ClusterDriver) -> None:
    for name, claim in (("one", "weights"), ("two", "weights"), ("three", "weights-2"), ("four", None)):
        await driver.add_resource(name, **({"checkpoint": {"path": "/ckpt", "claimName": claim}} if claim else {}))
    elsewhere = {"path": "/ckpt", "claimName": "weights"}
    await driver.add_resource("five", checkpoint=elsewhere, managedBy="kueue.x-k8s.io/multikueue")
    resources_on_claim = await driver.cluster.resources_on_claim("default", "weights")
    assert sorted(item["metadata"]["name"] for item in resources_on_claim) == ["one", "two"]
    assert list(await driver.cluster.resources_on_claim("another", "weights")) == []


async def test_only_children_with_label_are_observed(driver: ClusterDriver) -> None:
    owner = await driver.add_resource(KEY.name)
    await driver.cluster.create(service(owner))
    second = service(owner, name="other")
    second["metadata"]["labels"] = {constants.LABEL_JOB_NAME: "another"}
    await driver.cluster.create(second)
    await driver.cluster.create(config_map(owner))
    snapshot = await driver.until(KEY, lambda seen: seen.services and seen.config_maps, "both children")
    assert [s["metadata"]["name"] for s in snapshot.services] == ["train"]
    assert [s["kind"] for s in (*snapshot.services, *snapshot.config_maps)] == ["Service", "ConfigMap"]


async def test_taken_name_is_refused_with_existing_object(driver: ClusterDriver) -> None:
    owner = await driver.add_resource(KEY.name)
    await driver.cluster.create(service())
    with pytest.raises(AlreadyExists) as caught:
        await driver.cluster.create(service(owner))
    assert caught.value.existing["metadata"]["uid"]
    assert not caught.value.existing["metadata"].get("ownerReferences")


async def test_unobserved_object_is_discarded_by_name_and_owner(driver: ClusterDriver) -> None:
    owner = await driver.add_resource(KEY.name)
    await driver.cluster.create(service())  # another owner's
    await driver.cluster.create(config_map(owner))
    await driver.cluster.discard(service(owner))
    await driver.cluster.discard(config_map(owner))
    await driver.cluster.discard(config_map(owner))  # deleted already
    await driver.until(KEY, lambda seen: not seen.config_maps, "the end of the own one")
    with pytest.raises(AlreadyExists):
        await driver.cluster.create(service())


async def test_dry_run_stores_nothing(driver: ClusterDriver) -> None:
    owner = await driver.add_resource(KEY.name)
    await driver.cluster.create(driver.dress(job(owner)), dry_run=True)
    await driver.cluster.create(service(owner), dry_run=True)
    snapshot = await driver.cluster.observe(KEY)
    assert snapshot == Snapshot(snapshot.resource if snapshot else {})


async def test_impossible_job_and_its_dry_run_are_refused(driver: ClusterDriver) -> None:
    owner = await driver.add_resource(KEY.name)
    spoiled = driver.unacceptable(driver.dress(job(owner)))
    for dry_run in (True, False):
        with pytest.raises(Refused) as caught:
            await driver.cluster.create(spoiled, dry_run=dry_run)
        assert caught.value.reason == "Invalid"
        assert caught.value.message
    snapshot = await driver.cluster.observe(KEY)
    assert snapshot is not None
    assert snapshot.jobs == ()


async def test_new_status_replaces_status_and_keeps_spec(driver: ClusterDriver) -> None:
    owner = await driver.add_resource(KEY.name)
    await driver.cluster.patch_status(
        KEY, {"phase": "Running", "attempt": 1}, resource_version=owner["metadata"]["resourceVersion"]
    )
    first = await driver.until(KEY, lambda seen: seen.resource.get("status"), "a status")
    version = first.resource["metadata"]["resourceVersion"]
    await driver.cluster.patch_status(KEY, {"phase": "Failed"}, resource_version=version)
    second = await driver.until(KEY, lambda seen: seen.resource["status"]["phase"] == "Failed", "the new status")
    assert second.resource["status"].get("attempt") in (None, 0)
    assert second.resource["spec"] == owner["spec"]
    assert second.resource["metadata"]["generation"] == owner["metadata"]["generation"]


async def test_status_for_older_version_is_conflict(driver: ClusterDriver) -> None:
    owner = await driver.add_resource(KEY.name)
    version = owner["metadata"]["resourceVersion"]
    await driver.cluster.patch_status(KEY, {"phase": "Running"}, resource_version=version)
    with pytest.raises(VersionConflict):
        await driver.cluster.patch_status(KEY, {"phase": "Failed"}, resource_version=version)
    snapshot = await driver.cluster.observe(KEY)
    assert snapshot is not None
    assert snapshot.resource["status"]["phase"] == "Running"


async def test_status_of_deleted_resource_is_conflict(driver: ClusterDriver) -> None:
    with pytest.raises(VersionConflict):
        await driver.cluster.patch_status(KEY, {"phase": "Running"}, resource_version="1")


async def test_deletion_with_another_uid_deletes_nothing(driver: ClusterDriver) -> None:
    owner = await driver.add_resource(KEY.name)
    await driver.cluster.create(service(owner))
    await driver.cluster.delete("Service", "default", "train", uid="another")
    await driver.cluster.delete_resource(KEY, uid="another")
    snapshot = await driver.cluster.observe(KEY)
    assert snapshot is not None
    assert len(snapshot.services) == 1


async def test_changed_object_is_neither_patched_nor_deleted(driver: ClusterDriver) -> None:
    owner = await start_job(driver)
    before = await driver.cluster.observe(KEY)
    assert before is not None
    await driver.cluster.patch_job("default", JOB, {"spec": {"suspend": True}})
    old = before.jobs[0]["metadata"]
    with pytest.raises(VersionConflict):
        await driver.cluster.patch_job("default", JOB, {"spec": {"suspend": False}}, seen=before.jobs[0])
    with pytest.raises(VersionConflict):
        await driver.cluster.delete("Job", "default", JOB, uid=old["uid"], resource_version=old["resourceVersion"])
    await driver.cluster.patch_status(
        KEY, {"phase": "Suspended"}, resource_version=before.resource["metadata"]["resourceVersion"]
    )
    with pytest.raises(VersionConflict):
        await driver.cluster.delete_resource(
            KEY, uid=owner["metadata"]["uid"], resource_version=before.resource["metadata"]["resourceVersion"]
        )
    snapshot = await driver.until(KEY, lambda seen: has(seen.jobs[0], "Suspended"), "suspension")
    assert snapshot.jobs[0]["spec"]["suspend"]

    # An unchanged object is patched.
    def has_counted(seen: Snapshot) -> bool:
        status = seen.jobs[0]["status"]
        return not living(seen) and not status.get("active") and not status.get("terminating")

    settled = await driver.until(KEY, has_counted, "a Job that has taken in the end of its pods")
    await driver.cluster.patch_job("default", JOB, {"spec": {"suspend": False}}, seen=settled.jobs[0])
    await until_running(driver, 2)


async def test_deletion_and_patch_of_missing_object_succeed(driver: ClusterDriver) -> None:
    await driver.cluster.delete("Job", "default", "nothing", uid="x")
    await driver.cluster.delete_resource(KEY, uid="x")
    await driver.cluster.patch_job("default", "nothing", {"spec": {"suspend": True}})


async def test_deleting_job_deletes_its_pods_and_frees_its_name(driver: ClusterDriver) -> None:
    owner = await start_job(driver)
    snapshot = await driver.cluster.observe(KEY)
    assert snapshot is not None
    uid = snapshot.jobs[0]["metadata"]["uid"]
    await driver.cluster.delete("Job", "default", JOB, uid=uid)
    await driver.until(KEY, lambda seen: not seen.jobs and not seen.pods, "the end of the Job and its pods")
    await driver.cluster.create(driver.dress(job(owner)))


async def test_deletion_of_resource_deletes_owned_objects(driver: ClusterDriver) -> None:
    owner = await driver.add_resource(KEY.name)
    await driver.cluster.create(service(owner))
    await driver.cluster.create(config_map(owner))
    await driver.cluster.create(driver.dress(job(owner)))
    await until_running(driver, 2)
    await driver.cluster.delete_resource(KEY, uid=owner["metadata"]["uid"])
    assert await driver.cluster.observe(KEY) is None
    # The same name again: children that still exist belong to the former resource.
    await driver.add_resource(KEY.name)
    snapshot = await driver.until(
        KEY, lambda seen: not (seen.services or seen.config_maps or seen.jobs or seen.pods), "the end of all children"
    )
    assert snapshot.resource["metadata"]["uid"] != owner["metadata"]["uid"]


async def test_shared_object_is_observed_by_all_resources_and_survives_them(driver: ClusterDriver) -> None:
    owner = await driver.add_resource("first")
    meta = {"name": "shared", "namespace": KEY.namespace, "labels": {constants.LABEL_JOB_NAME: ""}}
    definition = await driver.cluster.definition()
    if definition is not None:
        meta["ownerReferences"] = [definition]
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "immutable": True, "data": {"a": "b"}}
    await driver.cluster.create(body)
    await driver.cluster.create(service(owner, name="first"))
    await driver.cluster.delete_resource(Key(KEY.namespace, "first"), uid=owner["metadata"]["uid"])
    await driver.add_resource(KEY.name)
    await driver.until(KEY, lambda seen: not seen.services, "the end of what the first one owns")
    seen = await driver.until(KEY, lambda seen: seen.config_maps, "what is shared")
    assert [item["metadata"]["name"] for item in seen.config_maps] == ["shared"]


async def test_unchanged_resource_is_suspended(driver: ClusterDriver) -> None:
    version = (await driver.add_resource(KEY.name))["metadata"]["resourceVersion"]
    await driver.cluster.patch_resource(KEY, {"spec": {"suspend": True}}, resource_version=version)
    snapshot = await driver.cluster.observe(KEY)
    assert snapshot is not None
    assert snapshot.resource["spec"]["suspend"]
    with pytest.raises(VersionConflict):
        await driver.cluster.patch_resource(KEY, {"spec": {"suspend": True}}, resource_version=version)


async def test_deleted_resource_is_not_suspended(driver: ClusterDriver) -> None:
    with pytest.raises(VersionConflict):
        await driver.cluster.patch_resource(KEY, {"spec": {"suspend": True}}, resource_version="1")


# --- reports ----------------------------------------------------------------------------------------------------------


async def test_report_of_running_pod_is_read(driver: ClusterDriver) -> None:
    await start_job(driver, 1)
    snapshot = await driver.cluster.observe(KEY)
    assert snapshot is not None
    with serve(b'{"version": 2}') as port:
        known = driver.announce_port(snapshot.pods[0], port)
        while (report := await driver.cluster.read_report(snapshot.pods[0], known)) is None:
            pass  # a late report is dropped; the observer requests it again
        assert report == b'{"version": 2}'
    assert await driver.cluster.read_report(snapshot.pods[0], known) is None


async def test_endless_report_is_abandoned(driver: ClusterDriver) -> None:
    await start_job(driver, 1)
    snapshot = await driver.cluster.observe(KEY)
    assert snapshot is not None
    with serve(b"#" * (2 << 20)) as port:
        known = driver.announce_port(snapshot.pods[0], port)
        assert await driver.cluster.read_report(snapshot.pods[0], known) is None
