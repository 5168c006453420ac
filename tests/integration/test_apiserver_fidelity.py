"""The stand-in against a real API server: one suite runs on both."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from ddp_operator.api.constants import KIND, LABEL_JOB_NAME
from ddp_operator.kube.client import ResponseError
from ddp_operator.kube.cluster import METADATA_ONLY, STRATEGIC
from ddp_operator.kube.resources import path
from tests.support.builders import job_manifest
from tests.support.standin import ClusterActors, StandIn

Object = dict[str, Any]


@pytest_asyncio.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.apiserver)])
async def actors(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ClusterActors]:
    """A namespace on each of the two servers."""
    if request.param == "stand-in":
        with StandIn() as server:
            async with ClusterActors(server.write_kubeconfig(tmp_path)) as cluster_actors:
                yield cluster_actors
        return
    plane = request.getfixturevalue("plane")
    name = f"f-{abs(hash(request.node.nodeid)) % 10**8}"
    plane.kubectl("create", "namespace", name)
    async with ClusterActors(plane.admin, name) as cluster_actors:
        yield cluster_actors
    plane.kubectl("delete", "namespace", name, "--wait=false")


def config_map(name: str = "c", **metadata: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, **metadata},
        "data": {"a": "1", "b": "2"},
    }


def job(name: str = "j", **metadata: Any) -> Object:
    pod = {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "train:1"}]}
    spec = {"completions": 1, "parallelism": 1, "completionMode": "Indexed", "suspend": True, "template": {"spec": pod}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, **metadata}, "spec": spec}


async def put_status(actors: ClusterActors, status: Mapping[str, Any], version: str) -> Object:
    body = {
        "apiVersion": "ddp-operator.dev/v1alpha1",
        "kind": KIND,
        "metadata": {"name": "digits", "namespace": actors.namespace, "resourceVersion": version},
        "status": status,
    }
    answer: Object = await actors.client.request("PUT", path(KIND, actors.namespace, "digits", "status"), body=body)
    return answer


async def refusal(actors: ClusterActors, method: str, where: str, **options: Any) -> ResponseError:
    with pytest.raises(ResponseError) as caught:
        await actors.client.request(method, where, **options)
    return caught.value


async def test_status_is_replaced_by_put_and_rest_ignored(actors: ClusterActors) -> None:
    created = await actors.create(job_manifest())
    first = await put_status(actors, {"phase": "Pending", "attempt": 1}, created["metadata"]["resourceVersion"])
    second = await put_status(actors, {"phase": "Running"}, first["metadata"]["resourceVersion"])
    assert second["status"] == {"phase": "Running"}
    assert second["spec"] == created["spec"]
    assert second["metadata"]["generation"] == created["metadata"]["generation"]
    assert int(second["metadata"]["resourceVersion"]) > int(created["metadata"]["resourceVersion"])


async def test_unchanged_status_creates_no_version(actors: ClusterActors) -> None:
    created = await actors.create(job_manifest())
    first = await put_status(actors, {"phase": "Pending"}, created["metadata"]["resourceVersion"])
    again = await put_status(actors, {"phase": "Pending"}, first["metadata"]["resourceVersion"])
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


async def test_status_at_old_version_is_conflict(actors: ClusterActors) -> None:
    created = await actors.create(job_manifest())
    await actors.patch(KIND, "digits", {"spec": {"suspend": True}})
    with pytest.raises(ResponseError) as caught:
        await put_status(actors, {"phase": "Pending"}, created["metadata"]["resourceVersion"])
    assert (caught.value.status, caught.value.reason) == (409, "Conflict")


async def test_status_in_create_request_is_dropped(actors: ClusterActors) -> None:
    created = await actors.create(job_manifest() | {"status": {"phase": "Running"}})
    assert "status" not in created


async def test_changed_spec_increments_generation(actors: ClusterActors) -> None:
    created = await actors.create(job_manifest())
    changed = await actors.patch(KIND, "digits", {"spec": {"suspend": True}})
    assert changed["metadata"]["generation"] == created["metadata"]["generation"] + 1
    labelled = await actors.patch(KIND, "digits", {"metadata": {"labels": {"a": "b"}}})
    assert labelled["metadata"]["generation"] == changed["metadata"]["generation"]


async def test_defaults_are_filled_in(actors: ClusterActors) -> None:
    created = await actors.create(job_manifest())
    assert created["spec"]["suspend"] is False
    assert "procPerNode" not in created["spec"]  # the operator's


async def test_schema_and_rules_refuse(actors: ClusterActors) -> None:
    for change, words in (({"nodes": 0}, "spec.nodes"), ({"nodes": "two"}, "spec.nodes")):
        error = await refusal(actors, "POST", path(KIND, actors.namespace), body=job_manifest(**change))
        assert error.status == 422
        assert words in error.message


@pytest.mark.parametrize("dry_run", [{}, {"dryRun": "All"}])
async def test_taken_name_has_its_own_reason(actors: ClusterActors, dry_run: dict[str, str]) -> None:
    await actors.create(config_map())
    error = await refusal(actors, "POST", path("ConfigMap", actors.namespace), body=config_map(), params=dry_run)
    assert (error.status, error.reason) == (409, "AlreadyExists")


async def test_dry_run_stores_nothing(actors: ClusterActors) -> None:
    await actors.client.request("POST", path("Job", actors.namespace), body=job(), params={"dryRun": "All"})
    assert await actors.get("Job", "j") is None


async def test_strict_validation_refuses_unknown_fields(actors: ClusterActors) -> None:
    broken = job()
    broken["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    strict = {"fieldValidation": "Strict"}
    error = await refusal(actors, "POST", path("Job", actors.namespace), body=broken, params=strict)
    assert error.status == 400
    assert 'unknown field "spec.template.spec.containers[0].imagee"' in error.message


async def test_job_without_image_is_invalid(actors: ClusterActors) -> None:
    broken = job()
    del broken["spec"]["template"]["spec"]["containers"][0]["image"]
    error = await refusal(actors, "POST", path("Job", actors.namespace), body=broken)
    assert error.status == 422
    assert "spec.template.spec.containers[0].image: Required value" in error.message


async def test_template_of_job_is_immutable(actors: ClusterActors) -> None:
    await actors.create(job())
    change = {"spec": {"template": {"spec": {"restartPolicy": "OnFailure"}}}}
    merge = "application/merge-patch+json"
    error = await refusal(actors, "PATCH", path("Job", actors.namespace, "j"), body=change, content_type=merge)
    assert error.status == 422
    assert "field is immutable" in error.message


async def test_namespace_must_exist(actors: ClusterActors) -> None:
    error = await refusal(actors, "POST", path("ConfigMap", "no-such-namespace"), body=config_map())
    assert error.status == 404


async def test_merge_patch_with_null_removes_field(actors: ClusterActors) -> None:
    await actors.create(config_map())
    patched = await actors.patch("ConfigMap", "c", {"data": {"a": None}})
    assert patched["data"] == {"b": "2"}


async def test_deletion_checks_uid(actors: ClusterActors) -> None:
    created = await actors.create(job())
    body: Object = {"preconditions": {"uid": "another"}, "propagationPolicy": "Background"}
    error = await refusal(actors, "DELETE", path("Job", actors.namespace, "j"), body=body)
    assert error.status == 409
    body["preconditions"]["uid"] = created["metadata"]["uid"]
    answer = await actors.client.request("DELETE", path("Job", actors.namespace, "j"), body=body)
    assert (answer["kind"], answer["details"]["uid"]) == ("Status", created["metadata"]["uid"])
    assert await actors.get("Job", "j") is None


async def test_finalizer_delays_deletion(actors: ClusterActors) -> None:
    await actors.create(config_map(finalizers=["example.org/hold"]))
    answer = await actors.client.request("DELETE", path("ConfigMap", actors.namespace, "c"), body={})
    assert answer["metadata"]["deletionTimestamp"]
    await actors.patch("ConfigMap", "c", {"metadata": {"finalizers": None}})
    assert await actors.get("ConfigMap", "c") is None


async def test_orphans_of_owner_are_collected(actors: ClusterActors) -> None:
    owner = await actors.create(config_map("owner"))
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    await actors.create(config_map("child", ownerReferences=[reference]))
    await actors.create(config_map("other"))
    await actors.delete("ConfigMap", "owner")
    await actors.gone("ConfigMap", "child")
    assert await actors.get("ConfigMap", "other") is not None


async def test_strategic_merge_adds_and_removes_owners_by_uid_at_any_version(actors: ClusterActors) -> None:
    owners = [await actors.create(config_map(name)) for name in ("a", "b")]
    references = [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
        for owner in owners
    ]
    made = await actors.create(config_map("child", ownerReferences=references[:1]))

    async def patch(*given: Object, uid: str = made["metadata"]["uid"]) -> Any:
        body = {"metadata": {"uid": uid, "ownerReferences": list(given)}}
        return await actors.client.request(
            "PATCH", path("ConfigMap", actors.namespace, "child"), body=body, content_type=STRATEGIC
        )

    results = [
        await patch(references[1]),
        await patch(references[1]),
        await patch({**references[0], "controller": True}),
    ]
    assert len({item["metadata"]["resourceVersion"] for item in results[:2]}) == 1, "what is there already is no change"
    assert sorted(owner_reference["name"] for owner_reference in results[1]["metadata"]["ownerReferences"]) == [
        "a",
        "b",
    ]
    (changed,) = [
        owner_reference
        for owner_reference in results[2]["metadata"]["ownerReferences"]
        if owner_reference["name"] == "a"
    ]
    assert changed == references[0] | {"controller": True}
    await actors.delete("ConfigMap", "a")
    remaining = await patch({"$patch": "delete", "uid": references[0]["uid"]})
    assert remaining["metadata"]["ownerReferences"] == references[1:]
    assert remaining["data"] == made["data"]
    with pytest.raises(ResponseError) as caught:
        await patch(references[1], uid="another")
    assert (caught.value.status, "metadata.uid" in caught.value.message) == (422, True)
    await actors.delete("ConfigMap", "b")
    await actors.gone("ConfigMap", "child")


async def test_names_can_be_generated(actors: ClusterActors) -> None:
    first, second = [await actors.create(config_map("", generateName="x-")) for _ in range(2)]
    assert first["metadata"]["name"].startswith("x-")
    assert first["metadata"]["name"] != second["metadata"]["name"]


async def test_lists_can_be_filtered_paged_and_reduced_to_metadata(actors: ClusterActors) -> None:
    for number in range(3):
        await actors.create(config_map(f"c{number}", labels={LABEL_JOB_NAME: "x", "number": str(number)}))
    names = [item["metadata"]["name"] for item in await actors.list("ConfigMap", f"{LABEL_JOB_NAME}=x,number!=1")]
    assert names == ["c0", "c2"]
    names = [item["metadata"]["name"] for item in await actors.list("ConfigMap", "number in (0, 1)")]
    assert names == ["c0", "c1"]
    params = {"labelSelector": LABEL_JOB_NAME, "limit": "2"}
    where = path("ConfigMap", actors.namespace)
    page = await actors.client.request("GET", where, params=params, accept=METADATA_ONLY)
    assert [set(item) - {"kind", "apiVersion"} for item in page["items"]] == [{"metadata"}] * 2
    params["continue"] = page["metadata"]["continue"]
    rest = await actors.client.request("GET", where, params=params, accept=METADATA_ONLY)
    assert [item["metadata"]["name"] for item in rest["items"]] == ["c2"]
    assert not rest["metadata"].get("continue")


async def test_object_leaving_filtered_watch_is_reported_as_deleted(actors: ClusterActors) -> None:
    created = await actors.create(config_map(labels={"team": "a"}))
    relabelled = await actors.patch("ConfigMap", "c", {"metadata": {"labels": {"team": "b"}}})
    back = await actors.patch("ConfigMap", "c", {"metadata": {"labels": {"team": "a"}}})
    await actors.delete("ConfigMap", "c")
    version = str(int(created["metadata"]["resourceVersion"]) - 1)
    info = await actors.client.connect()
    params = {"watch": "true", "labelSelector": "team=a", "resourceVersion": version, "timeoutSeconds": "1"}
    ssl = info.as_ssl_context() if info.server.startswith("https") else False
    async with (
        aiohttp.ClientSession() as session,
        session.get(info.server + path("ConfigMap", actors.namespace), params=params, ssl=ssl) as response,
    ):
        events = [json.loads(line) async for line in response.content]
    seen = [(event["type"], event["object"]["metadata"]["resourceVersion"]) for event in events]
    assert seen[:3] == [
        ("ADDED", created["metadata"]["resourceVersion"]),
        ("DELETED", relabelled["metadata"]["resourceVersion"]),
        ("ADDED", back["metadata"]["resourceVersion"]),
    ]
    assert seen[3][0] == "DELETED"
    assert int(seen[3][1]) > int(back["metadata"]["resourceVersion"])


async def test_scale_subresource_is_another_view(actors: ClusterActors) -> None:
    await actors.create(job_manifest())
    scale = await actors.client.request("GET", path(KIND, actors.namespace, "digits", "scale"))
    assert (scale["kind"], scale["spec"]["replicas"]) == ("Scale", 2)
    await actors.patch(KIND, "digits", {"spec": {"replicas": 5}}, "scale")
    resource = await actors.get(KIND, "digits")
    assert resource is not None
    assert resource["spec"]["nodes"] == 5


async def test_job_creates_tracked_and_owned_pods(actors: ClusterActors) -> None:
    created = await actors.create(job())
    await actors.patch("Job", "j", {"spec": {"suspend": False}})
    pod = await actors.pod("j", 0)
    (owner,) = pod["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("Job", created["metadata"]["uid"], True)
    assert pod["metadata"]["finalizers"] == ["batch.kubernetes.io/job-tracking"]
    assert pod["spec"]["hostname"] == "j-0"
    await actors.run_pod("j", 0)
    await actors.finish_pod("j", 0)

    async def complete() -> bool:
        done = await actors.get("Job", "j")
        assert done is not None
        return any(entry["type"] == "Complete" for entry in done.get("status", {}).get("conditions", []))

    await actors.until(complete, "the Job's end")
