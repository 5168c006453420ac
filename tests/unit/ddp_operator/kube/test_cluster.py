"""The exact calls of KubeCluster, and its results for each response. Without a server: requests are recorded."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from ddp_operator.api.cluster import Key
from ddp_operator.api.cluster_errors import AlreadyExists, ClusterError, Refused, ServerError, VersionConflict
from ddp_operator.api.posting import Posting
from ddp_operator.decide.hooks import Feature, Hooks
from ddp_operator.kube.cache import ObjectCache
from ddp_operator.kube.client import ResponseError
from ddp_operator.kube.cluster import METADATA_ONLY, ONE_METADATA_ONLY, KubeCluster

CORE = "/api/v1/namespaces/ns"
BATCH = "/apis/batch/v1/namespaces/ns"
OURS = "/apis/ddp-operator.dev/v1alpha1/namespaces/ns"
WRITE = {"fieldManager": "ddp-operator", "fieldValidation": "Strict"}
JOB = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"namespace": "ns", "name": "j-1", "uid": "u", "resourceVersion": "7"},
}
LABELS = {"ddp-operator.dev/job-name": "j"}
OF_RESOURCE = {
    "ownerReferences": [
        {
            "apiVersion": "ddp-operator.dev/v1alpha1",
            "kind": "DDPTrainingJob",
            "name": "j",
            "uid": "r",
            "controller": True,
        }
    ]
}
OF_JOB = {"ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "j-1", "uid": "u", "controller": True}]}
POD = {
    "metadata": {"namespace": "ns", "name": "p", "uid": "pu", "resourceVersion": "3"},
    "status": {"phase": "Running"},
}
CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "ns", "name": "c"}}


@dataclass
class RecordingClient:
    """An ApiClient that responds from a list: an object, or an error to raise; without one, {}."""

    answers: list[Any] = field(default_factory=list)
    calls: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    async def request(self, method: str, path: str, *, kind: str = "", **options: Any) -> Any:
        assert kind, "every call is counted by its kind"
        self.calls.append((method, path, {key: value for key, value in options.items() if value is not None}))
        answer = self.answers.pop(0) if self.answers else {}
        if isinstance(answer, Exception):
            raise answer
        return answer


def error(status: int, reason: str = "", message: str = "said") -> ResponseError:
    return ResponseError(status, {"reason": reason, "message": message})


def broken(status: int, message: str = "webhook away") -> ClusterError:
    """The client's error after its last retry."""
    wrapped = ClusterError("gave up")
    wrapped.__cause__ = error(status, message=message)
    return wrapped


async def run(
    work: Callable[[KubeCluster], Coroutine[Any, Any, Any]], *answers: Any, hooks: Hooks | None = None
) -> tuple[Any, RecordingClient]:
    """Run an action on a cluster with these responses. Return the result or the error, and the requests."""
    client = RecordingClient(list(answers))
    cluster = KubeCluster(client, hooks=hooks)  # type: ignore[arg-type]
    try:
        result: Any = await work(cluster)
    except (ClusterError, Refused, AlreadyExists) as raised:
        result = raised
    finally:
        await cluster.close()
    return result, client


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(("child", "place"), [(JOB, f"{BATCH}/jobs"), (CONFIG_MAP, f"{CORE}/configmaps")])
async def test_create_is_strict_and_requests_only_metadata(child: dict[str, Any], place: str, dry_run: bool) -> None:
    _, client = await run(lambda cluster: cluster.create(child, dry_run=dry_run))
    ((method, path, options),) = client.calls
    assert (method, path, options["body"]) == ("POST", place, child)
    assert options["params"] == (WRITE | {"dryRun": "All"} if dry_run else WRITE)
    brief = dry_run or child is CONFIG_MAP
    assert options["accept"] == (ONE_METADATA_ONLY if brief else "application/json")


@pytest.mark.parametrize(
    ("answer", "child", "expected", "message"),
    [
        (error(403), JOB, Refused, "said"),
        (error(400, message="admission webhook denied the request"), JOB, Refused, "denied"),
        (error(422), JOB, Refused, "said"),
        (error(413), JOB, Refused, "said"),
        (error(404), JOB, ClusterError, "said"),
        (error(409, "Conflict"), JOB, ClusterError, "said"),
        (error(429), JOB, ClusterError, "said"),
        (broken(500), JOB, ServerError, "Job j-1: webhook away"),
        (broken(429), JOB, ClusterError, "gave up"),
    ],
)
async def test_response_to_create_maps_to_exception(
    answer: Exception, child: dict[str, Any], expected: type[Exception], message: str
) -> None:
    raised, client = await run(lambda cluster: cluster.create(child), answer)
    assert type(raised) is expected
    assert message in str(raised)
    assert len(client.calls) == 1
    if isinstance(raised, Refused):
        denied = getattr(answer, "status", 0) == 403 or "denied" in str(answer)
        assert raised.reason == ("Forbidden" if denied else "Invalid")


@pytest.mark.parametrize("lost", [False, True])
async def test_disrupted_pod_is_failed_and_removed_at_once_only_if_lost(lost: bool) -> None:
    _, client = await run(lambda cluster: cluster.disrupt_pod(POD, "Drained", "by whom", lost=lost))
    (_, _, patch), (method, _, delete) = client.calls
    (condition,) = patch["body"]["status"].pop("conditions")
    assert (condition["type"], condition["reason"], condition["message"]) == ("DisruptionTarget", "Drained", "by whom")
    failed = {"phase": "Failed", "reason": "Drained", "message": "by whom"}
    assert patch["body"]["status"] == (failed if lost else {})
    assert (method, delete["body"].get("gracePeriodSeconds")) == ("DELETE", 0 if lost else None)


async def test_object_of_feature_with_fault_is_deleted_and_refused() -> None:
    def fail(*_: Any) -> str:
        raise ZeroDivisionError("a bug")

    group = {**CONFIG_MAP, "kind": "PodGroup", "apiVersion": "scheduling.x-k8s.io/v1alpha1"}
    stored = {**group, "metadata": {"namespace": "ns", "name": "c", "uid": "u"}}
    posting = Posting("PodGroup", lambda _: "none", explain_loss=fail)
    hooks = Hooks((Feature("odd", maturity="experimental", page="x.md", posting=posting),))
    raised, client = await run(lambda cluster: cluster.create(group), stored, {"kind": "Status"}, hooks=hooks)
    assert isinstance(raised, Refused)
    assert "the feature odd does not work" in raised.message
    assert [method for method, _, _ in client.calls] == ["POST", "DELETE"]


async def test_taken_name_is_read_with_its_resource() -> None:
    there = {"kind": "Job", "metadata": JOB["metadata"] | {"labels": LABELS} | OF_RESOURCE}
    raised, client = await run(lambda cluster: cluster.create(JOB), error(409, "AlreadyExists"), there, POD)
    assert isinstance(raised, AlreadyExists)
    assert raised.existing == there
    assert [(method, path) for method, path, _ in client.calls] == [
        ("POST", f"{BATCH}/jobs"), ("GET", f"{BATCH}/jobs/j-1"), ("GET", f"{OURS}/ddptrainingjobs/j"),
    ]  # fmt: skip
    raised, _ = await run(lambda cluster: cluster.create(JOB), error(409, "AlreadyExists"), error(404))
    assert type(raised) is ClusterError
    assert "was deleted meanwhile" in str(raised)


@pytest.mark.parametrize(
    ("status", "expected"),
    [(404, type(None)), (409, VersionConflict), (422, Refused), (403, Refused), (429, ClusterError)],
)
async def test_response_to_job_patch_maps_to_exception(status: int, expected: type) -> None:
    raised, client = await run(lambda cluster: cluster.patch_job("ns", "j-1", {}, seen=JOB), error(status), error(404))
    assert type(raised) is expected
    assert len(client.calls) == (2 if status == 409 else 1), "after a lost race it is read again"


KUEUE = ("v1beta2", "v1beta1")


@pytest.mark.parametrize(
    ("kind", "work", "versions"),
    [
        ("workloads", lambda cluster: cluster.workloads_of(JOB), KUEUE),
        ("localqueues", lambda cluster: cluster.kueue_object("LocalQueue", "ns", "q"), KUEUE),
    ],
)
async def test_object_of_other_project_is_read_in_served_version(
    kind: str, work: Callable[[KubeCluster], Any], versions: tuple[str, ...]
) -> None:
    missing = [error(404)] * (len(versions) - 1)
    result, client = await run(work, *missing, {"items": [{"a": 1}]})
    assert result == (({"a": 1},) if kind == "workloads" else {"items": [{"a": 1}]})
    assert [(path.split("/")[3], path.split("/")[6]) for _, path, _ in client.calls] == [
        (name, kind) for name in versions
    ]
    absent, _ = await run(work, *missing, error(404))
    assert isinstance(absent, Refused) if kind == "workloads" else absent is None
    forbidden, _ = await run(work, error(403))
    assert isinstance(forbidden, Refused)
    assert forbidden.reason == "Forbidden"


OWNED = {"ownerReferences": [{"uid": "resource", "controller": True}]}


def pod_of_job(name: str, **labels: str) -> dict[str, Any]:
    owner = [{"uid": "u", "controller": True}]
    return {
        "metadata": {"namespace": "ns", "name": name, "uid": f"uid-{name}", "ownerReferences": owner, "labels": labels}
    }


async def test_lost_labels_are_restored_on_job_and_own_pods() -> None:
    job = {"metadata": JOB["metadata"] | OWNED}
    stranger = {"metadata": {"namespace": "ns", "name": "s", "uid": "s", "labels": {}}}
    pods = {"items": [pod_of_job("a"), pod_of_job("b", **LABELS, more="kept"), stranger]}
    work = lambda cluster: cluster.restore_labels("resource", "ns", "j-1", LABELS)  # noqa: E731
    restored, client = await run(work, job, pods, job, pods["items"][0])
    assert restored is True
    assert [(method, path) for method, path, _ in client.calls] == [
        ("GET", f"{BATCH}/jobs/j-1"), ("GET", f"{CORE}/pods"),
        ("PATCH", f"{BATCH}/jobs/j-1"), ("PATCH", f"{CORE}/pods/a/status"),
    ]  # fmt: skip
    selector = {"labelSelector": "batch.kubernetes.io/controller-uid=u", "limit": "250"}
    assert (client.calls[1][2]["params"], client.calls[1][2]["accept"]) == (selector, METADATA_ONLY)
    assert [options["body"] for _, _, options in client.calls[2:]] == [
        {"metadata": {"uid": "u", "labels": LABELS}}, {"metadata": {"uid": "uid-a", "labels": LABELS}},
    ]  # fmt: skip
    whole = {"metadata": job["metadata"] | {"labels": LABELS}}
    assert (await run(work, whole, {"items": [pod_of_job("b", **LABELS)]}))[0] is False
    foreign, client = await run(work, {"metadata": JOB["metadata"]})
    assert (foreign, len(client.calls)) == (False, 1), "a Job of somebody else's is left alone"
    assert (await run(work, error(404)))[0] is False
    for answers in ([error(403)], [job, error(403)], [job, pods, error(403)]):
        assert isinstance((await run(work, *answers))[0], Refused)
    assert (await run(work, job, pods, error(404)))[0] is False


@pytest.mark.parametrize(
    ("metadata", "kept"),
    [
        ({"deletionTimestamp": "2026-11-20T12:00:00Z", "finalizers": ["f"]}, True),
        ({"deletionTimestamp": "2026-11-20T12:00:00Z", "deletionGracePeriodSeconds": 30}, True),
        ({"deletionTimestamp": "2026-11-20T12:00:00Z", "deletionGracePeriodSeconds": 0}, False),
        ({"finalizers": ["f"]}, False),
        (None, False),
    ],
)
async def test_deleted_object_stays_in_store_while_terminating(metadata: Any, kept: bool) -> None:
    answer = {"kind": "Status"} if metadata is None else POD | {"metadata": POD["metadata"] | OF_JOB | metadata}
    cache = ObjectCache()
    cache.apply("Pod", POD | {"metadata": POD["metadata"] | {"labels": LABELS} | OF_JOB})
    changed: list[Key] = []
    cluster = KubeCluster(RecordingClient([answer]), cache, on_change=changed.append)  # type: ignore[arg-type]
    await cluster.delete("Pod", "ns", "p", uid="pu")
    await cluster.close()
    assert (cache.entry("Pod", "ns", "p") is not None) is kept
    assert changed == ([] if kept else [Key("ns", "j")])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (error(400), Refused),
        (error(413), Refused),
        (error(422), Refused),
        (error(403), ClusterError),
        (error(404), VersionConflict),
        (error(409), VersionConflict),
        (broken(500), ClusterError),
        (broken(500, "etcdserver: request is too large"), Refused),
    ],
)
async def test_response_to_status_write_maps_to_exception(answer: Exception, expected: type[Exception]) -> None:
    raised, _ = await run(lambda cluster: cluster.patch_status(Key("ns", "j"), {}, resource_version="1"), answer)
    assert type(raised) is expected


async def test_status_is_written_without_reading_the_spec_again() -> None:
    answer = {"kind": "PartialObjectMetadata", "metadata": {"name": "j", "namespace": "ns", "resourceVersion": "2"}}
    client = RecordingClient([answer])
    cluster = KubeCluster(client, ObjectCache())  # type: ignore[arg-type]
    await cluster.patch_status(Key("ns", "j"), {"phase": "Running"}, resource_version="1")
    await cluster.close()
    [(_, _, options)] = client.calls
    assert options["accept"].startswith("application/json;as=PartialObjectMetadata;")
