"""The exact calls of KubeCluster, and its results for each response. Without a server: requests are recorded."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from ddp_operator.api.cluster import AlreadyExists, ClusterError, Key, Refused, ServerError, VersionConflict
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
GROUP = {
    "apiVersion": "scheduling.volcano.sh/v1beta1",
    "kind": "PodGroup",
    "metadata": {"namespace": "ns", "name": "g"},
}

NATIVE_GROUP = GROUP | {"apiVersion": "scheduling.k8s.io/v1beta1"}
SCHEDULING = "/apis/scheduling.k8s.io"


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


def broken(status: int) -> ClusterError:
    """The client's error after its last retry."""
    wrapped = ClusterError("gave up")
    wrapped.__cause__ = error(status, message="webhook away")
    return wrapped


async def run(work: Callable[[KubeCluster], Coroutine[Any, Any, Any]], *answers: Any) -> tuple[Any, RecordingClient]:
    """Run an action on a cluster with these responses. Return the result or the error, and the requests."""
    client = RecordingClient(list(answers))
    cluster = KubeCluster(client)  # type: ignore[arg-type]
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
        (error(404), GROUP, Refused, "the cluster does not serve PodGroups of scheduling.volcano.sh/v1beta1"),
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


async def test_native_pod_group_is_created_in_newest_served_version() -> None:
    created, client = await run(lambda cluster: cluster.create(NATIVE_GROUP), error(404), error(404), NATIVE_GROUP)
    assert created == NATIVE_GROUP
    versions = ["v1beta1", "v1alpha3", "v1alpha2"]
    assert [path for _, path, _ in client.calls] == [
        f"{SCHEDULING}/{version}/namespaces/ns/podgroups" for version in versions
    ]
    assert [options["body"]["apiVersion"].rpartition("/")[2] for _, _, options in client.calls] == versions


async def test_native_pod_group_in_no_served_version_is_refused() -> None:
    raised, _ = await run(lambda cluster: cluster.create(NATIVE_GROUP), *3 * [error(404)])
    assert isinstance(raised, Refused)
    assert "enable the feature gates GenericWorkload and GangScheduling" in str(raised)


async def test_job_of_native_gang_before_kubernetes_1_36_is_refused_with_remedy() -> None:
    message = 'strict decoding error: unknown field "spec.template.spec.schedulingGroup"'
    raised, _ = await run(lambda cluster: cluster.create(JOB), error(400, message=message))
    assert "does not serve PodGroups of scheduling.k8s.io; enable the feature gates" in str(raised)


async def test_pod_group_without_role_is_refused_with_chart_value() -> None:
    message = 'podgroups is forbidden: User "x" cannot create resource "podgroups"'
    raised, _ = await run(lambda cluster: cluster.create(GROUP), error(403, message=message))
    assert str(raised) == f"{message}; add the gang scheduler to rbac.gangSchedulers of the chart"


async def test_discard_deletes_pod_group_in_served_version() -> None:
    own = {"metadata": GROUP["metadata"] | OF_RESOURCE | {"uid": "u"}}
    manifest = NATIVE_GROUP | own
    _, client = await run(lambda cluster: cluster.discard(manifest), error(404), error(404), manifest)
    assert [(method, path.split("/")[3]) for method, path, _ in client.calls] == [
        ("GET", "v1beta1"),
        ("GET", "v1alpha3"),
        ("GET", "v1alpha2"),
        ("DELETE", "v1alpha2"),
    ]


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


async def test_patch_of_job_names_observed_version() -> None:
    patch = {"metadata": {"annotations": {"a": "b"}}, "spec": {"suspend": True}}
    _, client = await run(lambda cluster: cluster.patch_job("ns", "j-1", patch, seen=JOB))
    ((method, path, options),) = client.calls
    assert (method, path, options["params"]) == ("PATCH", f"{BATCH}/jobs/j-1", WRITE)
    assert options["content_type"] == "application/merge-patch+json"
    assert options["body"] == {
        "metadata": {"annotations": {"a": "b"}, "uid": "u", "resourceVersion": "7"}, "spec": {"suspend": True},
    }  # fmt: skip
    _, client = await run(lambda cluster: cluster.patch_job("ns", "j-1", patch))
    assert client.calls[0][2]["body"] == patch


@pytest.mark.parametrize(
    ("status", "expected"),
    [(404, type(None)), (409, VersionConflict), (422, Refused), (403, Refused), (429, ClusterError)],
)
async def test_response_to_job_patch_maps_to_exception(status: int, expected: type) -> None:
    raised, client = await run(lambda cluster: cluster.patch_job("ns", "j-1", {}, seen=JOB), error(status), error(404))
    assert type(raised) is expected
    assert len(client.calls) == (2 if status == 409 else 1), "after a lost race it is read again"


@pytest.mark.parametrize("version", [None, "7"])
async def test_deletion_names_uid_version_and_propagation(version: str | None) -> None:
    work = lambda cluster: cluster.delete("Job", "ns", "j-1", uid="u", resource_version=version)  # noqa: E731
    _, client = await run(work)
    preconditions = {"uid": "u"} | ({"resourceVersion": version} if version else {})
    body = {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "propagationPolicy": "Background",
        "preconditions": preconditions,
    }
    assert client.calls == [("DELETE", f"{BATCH}/jobs/j-1", {"body": body})]
    assert (await run(work, error(404)))[0] is None
    assert type((await run(work, error(409), JOB))[0]) is VersionConflict
    assert (await run(work, error(409), {"metadata": JOB["metadata"] | {"uid": "other"}}))[0] is None


async def test_lost_pod_is_declared_failed_at_its_version_then_removed() -> None:
    condition = {"type": "Ready", "status": "True"}
    pod = POD | {"status": {"conditions": [condition, {"type": "DisruptionTarget", "status": "False"}]}}
    _, client = await run(lambda cluster: cluster.fail_pod(pod, "NodeLost", "node n is lost"))
    (_, patched, options), (method, deleted, removal) = client.calls
    assert (patched, method, deleted) == (f"{CORE}/pods/p/status", "DELETE", f"{CORE}/pods/p")
    assert options["body"]["metadata"] == {"uid": "pu", "resourceVersion": "3"}
    status = options["body"]["status"]
    assert (status["phase"], status["reason"], status["message"]) == ("Failed", "NodeLost", "node n is lost")
    kept, target = status["conditions"]
    assert kept == condition
    assert {key: target[key] for key in ("type", "status", "reason", "message")} == {
        "type": "DisruptionTarget", "status": "True", "reason": "NodeLost", "message": "node n is lost",
    }  # fmt: skip
    assert removal["body"]["gracePeriodSeconds"] == 0
    assert removal["body"]["preconditions"] == {"uid": "pu"}
    _, client = await run(lambda cluster: cluster.fail_pod(pod, "NodeLost", ""), error(404))
    assert len(client.calls) == 1, "a pod that is gone is not removed"
    assert type((await run(lambda cluster: cluster.fail_pod(pod, "NodeLost", ""), error(409)))[0]) is VersionConflict


async def test_status_is_put_whole_at_its_version() -> None:
    work = lambda cluster: cluster.patch_status(Key("ns", "j"), {"phase": "Running"}, resource_version="9")  # noqa: E731
    _, client = await run(work)
    ((method, path, options),) = client.calls
    assert (method, path, options["params"]) == ("PUT", f"{OURS}/ddptrainingjobs/j/status", WRITE)
    assert options["body"] == {
        "apiVersion": "ddp-operator.dev/v1alpha1", "kind": "DDPTrainingJob", "status": {"phase": "Running"},
        "metadata": {"name": "j", "namespace": "ns", "resourceVersion": "9"},
    }  # fmt: skip
    assert type((await run(work, error(404)))[0]) is VersionConflict


async def test_fetch_reads_resource_and_labelled_children() -> None:
    resource = {"metadata": {"namespace": "ns", "name": "j", "uid": "r"}}
    foreign = {"metadata": {"name": "c", "labels": LABELS}}
    pods = {"items": [*({"metadata": {"name": name, "labels": LABELS} | OF_JOB} for name in "ba"), foreign]}
    answers = {"pods": pods}
    client = RecordingClient()

    async def request(method: str, path: str, *, kind: str = "", **options: Any) -> Any:
        client.calls.append((method, path, options))
        return resource if path.endswith("/j") else answers.get(path.rsplit("/", 1)[-1], {})

    client.request = request  # type: ignore[method-assign]
    cluster = KubeCluster(client)  # type: ignore[arg-type]
    snapshot = await cluster.observe(Key("ns", "j"))
    await cluster.close()
    assert snapshot is not None
    assert [pod["metadata"]["name"] for pod in snapshot.pods] == ["a", "b"]
    assert client.calls[0][1] == f"{OURS}/ddptrainingjobs/j"
    asked = {path.rsplit("/", 1)[-1]: options for _, path, options in client.calls[1:]}
    assert set(asked) == {"services", "configmaps", "jobs", "pods", "networkpolicies"}
    selectors = {kind: options["params"]["labelSelector"] for kind, options in asked.items()}
    assert selectors.pop("configmaps") == "ddp-operator.dev/job-name in (j,)", "and what belongs to no single job"
    assert set(selectors.values()) == {"ddp-operator.dev/job-name=j"}
    brief = {kind for kind, options in asked.items() if options["accept"] == METADATA_ONLY}
    assert brief == {"services", "configmaps", "networkpolicies"}
    assert {asked[kind]["accept"] for kind in ("jobs", "pods")} == {"application/json"}
    assert (await run(lambda cluster: cluster.fetch(Key("ns", "j")), error(404)))[0] is None


async def test_workloads_are_read_in_both_versions_from_cache() -> None:
    _, client = await run(lambda cluster: cluster.workloads_of(JOB), error(404), {"items": [{"a": 1}]})
    assert [path.split("/")[3] for _, path, _ in client.calls] == ["v1beta1", "v1beta2"]
    for _, _, options in client.calls:
        assert options["params"] == {"labelSelector": "kueue.x-k8s.io/job-uid=u", "resourceVersion": "0"}
    raised, _ = await run(lambda cluster: cluster.workloads_of(JOB), error(404), error(404))
    assert isinstance(raised, Refused)
    assert raised.reason == "Invalid"
    raised, _ = await run(lambda cluster: cluster.workloads_of(JOB), error(403))
    assert isinstance(raised, Refused)
    assert raised.reason == "Forbidden"


async def test_local_queue_is_read_in_version_that_is_served() -> None:
    result, client = await run(lambda cluster: cluster.local_queue("ns", "q"), error(404), {"spec": {"a": 1}})
    assert result == {"spec": {"a": 1}}
    assert [path for _, path, _ in client.calls] == [
        f"/apis/kueue.x-k8s.io/{version}/namespaces/ns/localqueues/q" for version in ("v1beta1", "v1beta2")
    ]
    assert (await run(lambda cluster: cluster.local_queue("ns", "q"), error(404), error(404)))[0] is None
    assert isinstance((await run(lambda cluster: cluster.local_queue("ns", "q"), error(403)))[0], Refused)


@pytest.mark.parametrize("kind", ["ResourceClaim", "ResourceClaimTemplate"])
async def test_resource_claim_is_read_in_version_that_is_served(kind: str) -> None:
    def ask(*answers: Any) -> Any:
        return run(lambda cluster: cluster.resource_claim(kind, "ns", "h100"), *answers)

    result, client = await ask(error(404), error(404), {"spec": {"a": 1}})
    assert result == {"spec": {"a": 1}}
    assert [path for _, path, _ in client.calls] == [
        f"/apis/resource.k8s.io/{version}/namespaces/ns/{kind.lower()}s/h100"
        for version in ("v1", "v1beta2", "v1beta1")
    ]
    assert (await ask(error(404), error(404), error(404)))[0] is None
    assert isinstance((await ask(error(403)))[0], Refused)


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


async def test_forbidden_node_and_events_are_refused() -> None:
    result, client = await run(lambda cluster: cluster.node("n"), {"metadata": {"name": "n"}})
    assert (result, client.calls[0][:2]) == ({"metadata": {"name": "n"}}, ("GET", "/api/v1/nodes/n"))
    assert (await run(lambda cluster: cluster.node("n"), error(404)))[0] is None
    assert isinstance((await run(lambda cluster: cluster.node("n"), error(403)))[0], Refused)
    _, client = await run(lambda cluster: cluster.events_of(JOB), {"items": []})
    assert client.calls[0][1].endswith("/namespaces/ns/events")
    assert client.calls[0][2]["params"]["fieldSelector"].startswith("involvedObject.kind=Job,")
    assert isinstance((await run(lambda cluster: cluster.events_of(JOB), error(403)))[0], Refused)


async def test_deleted_lost_pod_is_reported_to_watchers() -> None:
    changed: list[Key] = []
    cache = ObjectCache()
    cache.apply("Pod", POD | {"metadata": POD["metadata"] | {"labels": LABELS} | OF_JOB})
    cluster = KubeCluster(RecordingClient([error(404)]), cache, on_change=changed.append)  # type: ignore[arg-type]
    await cluster.fail_pod(POD, "NodeLost", "")
    await cluster.close()
    assert changed == [Key("ns", "j")]


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


async def test_fetched_children_have_kind() -> None:
    resource = {"metadata": {"namespace": "ns", "name": "j", "uid": "r"}}
    meta = {"name": "x", "namespace": "ns", "uid": "x", "labels": LABELS}
    owners = [OF_RESOURCE, OF_JOB, OF_RESOURCE, OF_RESOURCE, OF_RESOURCE]
    lists = [{"items": [{"metadata": meta | owner}]} for owner in owners]
    snapshot, _ = await run(lambda cluster: cluster.fetch(Key("ns", "j")), resource, *lists)
    results = {(item["kind"], item["apiVersion"]) for item in (*snapshot.jobs, *snapshot.pods, *snapshot.services)}
    assert results == {("Job", "batch/v1"), ("Pod", "v1"), ("Service", "v1")}


async def test_list_without_members_is_empty() -> None:
    assert (await run(lambda cluster: cluster.workloads_of(JOB), {"items": None}))[0] == ()


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
    ],
)
async def test_response_to_status_write_maps_to_exception(answer: Exception, expected: type[Exception]) -> None:
    raised, _ = await run(lambda cluster: cluster.patch_status(Key("ns", "j"), {}, resource_version="1"), answer)
    assert type(raised) is expected


async def test_status_that_etcd_refuses_as_too_large_is_refused() -> None:
    answer = ClusterError("gave up")
    answer.__cause__ = error(500, message="etcdserver: request is too large")
    raised, _ = await run(lambda cluster: cluster.patch_status(Key("ns", "j"), {}, resource_version="1"), answer)
    assert isinstance(raised, Refused)
