"""The operator's cache, filled from several sources in any order."""

from typing import Any

import pytest

from ddp_operator.api.cluster import Key
from ddp_operator.api.constants import API_VERSION, KIND, LABEL_JOB_NAME
from ddp_operator.kube.cache import TOMBSTONE_SECONDS, TOMBSTONES, ObjectCache
from ddp_operator.kube.incoming import LARGE, OMITTED
from tests.support.decisions import present

KEY = Key("team", "digits")


def resource(version: int, *, uid: str = "cr-1", **more: Any) -> dict[str, Any]:
    meta = {"namespace": "team", "name": "digits", "uid": uid, "resourceVersion": str(version)}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, **more}


def child(kind: str, name: str, version: int | str, *, uid: str = "", job: str | None = "digits") -> dict[str, Any]:
    labels = {LABEL_JOB_NAME: job} if job else {}
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": job, "uid": "cr-1", "controller": True}
    if kind == "Pod":
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": f"{job}-1", "uid": "job-1", "controller": True}
    meta = {"namespace": "team", "name": name, "uid": uid or f"{kind}-{name}", "resourceVersion": str(version)}
    meta |= {"labels": labels, "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": kind, "metadata": meta, "spec": {"suspend": version}}


def test_snapshot_contains_resource_and_labelled_children() -> None:
    store = ObjectCache()
    for kind, name in (("Job", "digits-1"), ("Pod", "b"), ("Pod", "a"), ("Service", "digits"), ("ConfigMap", "c")):
        assert store.apply(kind, child(kind, name, 5)) == KEY
    assert store.snapshot(KEY) is None
    assert store.apply(KIND, resource(6, spec={"nodes": 2})) == KEY
    store.apply("Pod", child("Pod", "other", 7, job="other"))
    snapshot = store.snapshot(KEY)
    assert snapshot is not None
    assert snapshot.resource["spec"] == {"nodes": 2}
    assert [pod["metadata"]["name"] for pod in snapshot.pods] == ["a", "b"]
    assert len(snapshot.jobs) == len(snapshot.services) == len(snapshot.config_maps) == 1


@pytest.mark.parametrize(
    ("versions", "applied", "kept"),
    [
        ([9, 10, 12], [True, True, True], "12"),
        ([12, 9, 10], [True, False, False], "12"),
        ([10, 12, 9], [True, True, False], "12"),
        ([5, 5], [True, False], "5"),
        (["b", "a", "a"], [True, True, False], "a"),  # without an order: by arrival
    ],
)
def test_newest_version_is_kept(versions: list[Any], applied: list[bool], kept: str) -> None:
    store = ObjectCache()
    assert [store.apply("Job", child("Job", "digits-1", version)) == KEY for version in versions] == applied
    entry = store.entry("Job", "team", "digits-1")
    assert entry is not None
    assert entry.version == kept


def test_late_event_does_not_restore_deleted_object() -> None:
    store = ObjectCache()
    store.apply("Job", child("Job", "digits-1", 5))
    assert store.remove("Job", child("Job", "digits-1", 8)) == KEY
    assert store.apply("Job", child("Job", "digits-1", 7)) is None
    assert store.entry("Job", "team", "digits-1") is None


def test_object_deleted_by_operator_stays_deleted_after_late_events() -> None:
    store = ObjectCache()
    store.apply("Job", child("Job", "digits-1", 5))
    assert store.mark_deleted("Job", "team", "digits-1", "Job-digits-1") == KEY
    assert store.apply("Job", child("Job", "digits-1", 99)) is None


def test_same_name_with_another_uid_is_another_object() -> None:
    store = ObjectCache()
    store.apply("Job", child("Job", "digits-1", 5, uid="old"))
    store.mark_deleted("Job", "team", "digits-1", "old")
    assert store.apply("Job", child("Job", "digits-1", 9, uid="new")) == KEY
    assert store.remove("Job", child("Job", "digits-1", 8, uid="old")) is None
    entry = store.entry("Job", "team", "digits-1")
    assert entry is not None
    assert entry.uid == "new"


def test_deleted_resource_removes_unwatched_children() -> None:
    store = ObjectCache()
    for kind in ("Job", "Pod", "Service", "ConfigMap", "NetworkPolicy"):
        store.apply(kind, child(kind, "digits-1", 5))
        store.apply(kind, child(kind, "other-1", 5, job="other"))
    store.apply(KIND, resource(6))
    assert store.mark_deleted(KIND, "team", "digits", "another uid") is None
    assert len(store) == 11
    assert store.remove(KIND, resource(7)) == KEY
    assert sorted(kind for kind in ("Job", "Pod", "Service") if store.entry(kind, "team", "digits-1")) == ["Job", "Pod"]
    store.remove("Job", child("Job", "digits-1", 8))
    store.remove("Pod", child("Pod", "digits-1", 9))
    assert len(store) == 5, "those of the other job"
    assert store.apply("Service", child("Service", "digits-1", 10, uid="anew")) == KEY


def test_tombstones_are_bounded_in_number() -> None:
    store = ObjectCache(clock=lambda: 0.0)
    for number in range(3 * TOMBSTONES):
        store.mark_deleted("Pod", "team", f"p{number}", f"uid-{number}")
    assert len(store._tombstones) + len(store._former_tombstones) == 2 * TOMBSTONES


@pytest.mark.parametrize(("periods", "is_ignored"), [(1.0, True), (2.0, False)])
def test_tombstones_outlast_late_events_and_expire(periods: float, is_ignored: bool) -> None:
    now = 0.0
    store = ObjectCache(clock=lambda: now)
    store.mark_deleted("Pod", "team", "first", "uid-first")
    now = deleted_at = 0.9 * TOMBSTONE_SECONDS
    store.remove("Job", child("Job", "digits-1", 8))
    while now < deleted_at + periods * TOMBSTONE_SECONDS:
        now += 0.1 * TOMBSTONE_SECONDS
        store.mark_deleted("Pod", "team", "later", f"uid-{now}")
    assert (store.apply("Job", child("Job", "digits-1", 7)) is None) is is_ignored


def test_metadata_of_resource_is_bounded() -> None:
    store = ObjectCache()
    obj = resource(5)
    queue = {"kueue.x-k8s.io/queue-name": "q"}
    obj["metadata"] |= {
        "managedFields": [{}] * 9,
        "annotations": {"mine": "x" * 999, "kueue.x-k8s.io/podset-topology": "rack"},
        "labels": {str(number): "x" for number in range(999)} | queue,
        "finalizers": ["a/b"] * 999,
        "ownerReferences": [{"uid": str(number), "controller": False} for number in range(999)],
    }
    store.apply(KIND, obj)
    snapshot = store.snapshot(KEY)
    assert snapshot is not None
    assert "managedFields" not in snapshot.resource["metadata"]
    assert snapshot.resource["metadata"]["annotations"] == {"kueue.x-k8s.io/podset-topology": "rack"}
    assert snapshot.resource["metadata"]["labels"].items() >= {"0": "x", **queue}.items()
    assert len(str(snapshot.resource["metadata"])) < 10_000
    assert "managedFields" in obj["metadata"]


def test_large_resource_is_kept_without_its_large_members() -> None:
    store = ObjectCache()
    small = resource(5)
    store.apply(KIND, {**small, "metadata": {**small["metadata"], "name": "small", "uid": "small"}})
    large = resource(10)
    large["spec"] = {"args": "x" * 2 * LARGE, "checkpoint": {"claimName": "c"}}
    large["status"] = {"phase": "Running", "profile": {"job": {"args": "x" * 2 * LARGE}}}
    store.apply(KIND, large)
    snapshot = store.snapshot(KEY)
    assert snapshot is not None
    assert snapshot.resource["spec"] == {"checkpoint": {"claimName": "c"}, OMITTED: True}
    assert snapshot.resource["status"] == {"phase": "Running"}
    assert (store.is_large(KEY), store.is_large(Key(KEY.namespace, "small"))) == (True, False)
    assert [claimant["metadata"]["uid"] for claimant in store.resources_on_claim(KEY.namespace, "c")] == ["cr-1"]
    assert sum(map(len, store.bodies(KIND))) < LARGE


@pytest.mark.parametrize("size", [1, 2 * LARGE], ids=["small", "large"])
def test_annotation_of_others_changes_nothing(size: int) -> None:
    store = ObjectCache()
    resources = [resource(version) for version in range(5, 9)]
    for number, item in enumerate(resources):
        item["metadata"] |= {"generation": 1 + (number == 3)}
        item["spec"] = {"args": "x" * size, "nodes": 1 + (number == 3)}
        item["metadata"]["annotations"] = {"example.com/touched": str(number)}
    resources[2]["metadata"]["annotations"] = {"ddp-operator.dev/mine": "x"}
    assert [store.apply(KIND, item) for item in resources] == [KEY, None, KEY, KEY]
    assert present(store.entry(KIND, KEY.namespace, KEY.name)).version == "8"


def test_is_current_compares_with_version_of_list() -> None:
    store = ObjectCache()
    store.apply("Pod", child("Pod", "a", 5))
    assert store.is_current("Pod", child("Pod", "a", 5)["metadata"])
    assert store.is_current("Pod", child("Pod", "a", 4)["metadata"])
    assert not store.is_current("Pod", child("Pod", "a", 6)["metadata"])
    assert not store.is_current("Pod", child("Pod", "b", 1)["metadata"])
    store.mark_deleted("Pod", "team", "b", "Pod-b")
    assert store.is_current("Pod", child("Pod", "b", 1)["metadata"])


def test_object_of_odd_shape_is_ignored_until_its_next_version() -> None:
    store = ObjectCache()
    odd = child("Job", "digits-1", 5)
    odd["metadata"]["annotations"] = "text"
    with pytest.raises(AttributeError):
        store.apply("Job", odd)
    assert store.is_current("Job", odd["metadata"]), "nothing waits for it"
    assert store.entry("Job", "team", "digits-1") is None
    assert store.apply("Job", child("Job", "digits-1", 6)) == KEY
    with pytest.raises(AttributeError):
        store.apply("Job", odd | {"metadata": odd["metadata"] | {"resourceVersion": "7"}})
    entry = store.entry("Job", "team", "digits-1")
    assert entry is not None
    assert entry.version == "6", "the last readable version is kept"
