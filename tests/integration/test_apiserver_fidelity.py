"""The stand-in against a real API server: one suite on what the operator relies on, run on both."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from ddp_operator.constants import KIND, LABEL_JOB_NAME
from ddp_operator.kube import ApiError
from ddp_operator.kube.cluster import METADATA_ONLY
from ddp_operator.kube.resources import path
from tests.standin import StandIn, World

from .conftest import job_manifest

Object = dict[str, Any]


@pytest_asyncio.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.apiserver)])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """A namespace of each of the two."""
    if request.param == "stand-in":
        with StandIn() as server:
            async with World(server.write_kubeconfig(tmp_path)) as found:
                yield found
        return
    plane = request.getfixturevalue("plane")
    name = f"f-{abs(hash(request.node.nodeid)) % 10**8}"
    plane.kubectl("create", "namespace", name)
    async with World(plane.admin, name) as found:
        yield found
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


async def put_status(world: World, status: Mapping[str, Any], version: str) -> Object:
    body = {
        "apiVersion": "ddp-operator.dev/v1alpha1",
        "kind": KIND,
        "metadata": {"name": "digits", "namespace": world.namespace, "resourceVersion": version},
        "status": status,
    }
    answer: Object = await world.client.request("PUT", path(KIND, world.namespace, "digits", "status"), body=body)
    return answer


async def refusal(world: World, method: str, where: str, **options: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await world.client.request(method, where, **options)
    return caught.value


async def test_a_status_is_replaced_by_put_and_the_rest_ignored(world: World) -> None:
    created = await world.create(job_manifest())
    first = await put_status(world, {"phase": "Pending", "attempt": 1}, created["metadata"]["resourceVersion"])
    second = await put_status(world, {"phase": "Running"}, first["metadata"]["resourceVersion"])
    assert second["status"] == {"phase": "Running"}
    assert second["spec"] == created["spec"]
    assert second["metadata"]["generation"] == created["metadata"]["generation"]
    assert int(second["metadata"]["resourceVersion"]) > int(created["metadata"]["resourceVersion"])


async def test_a_status_that_changes_nothing_makes_no_version(world: World) -> None:
    created = await world.create(job_manifest())
    first = await put_status(world, {"phase": "Pending"}, created["metadata"]["resourceVersion"])
    again = await put_status(world, {"phase": "Pending"}, first["metadata"]["resourceVersion"])
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


async def test_a_status_at_an_old_version_is_a_conflict(world: World) -> None:
    created = await world.create(job_manifest())
    await world.patch(KIND, "digits", {"spec": {"suspend": True}})
    with pytest.raises(ApiError) as caught:
        await put_status(world, {"phase": "Pending"}, created["metadata"]["resourceVersion"])
    assert (caught.value.status, caught.value.reason) == (409, "Conflict")


async def test_a_status_given_at_creation_is_dropped(world: World) -> None:
    created = await world.create(job_manifest() | {"status": {"phase": "Running"}})
    assert "status" not in created


async def test_a_change_of_the_spec_makes_a_generation(world: World) -> None:
    created = await world.create(job_manifest())
    changed = await world.patch(KIND, "digits", {"spec": {"suspend": True}})
    assert changed["metadata"]["generation"] == created["metadata"]["generation"] + 1
    labelled = await world.patch(KIND, "digits", {"metadata": {"labels": {"a": "b"}}})
    assert labelled["metadata"]["generation"] == changed["metadata"]["generation"]


async def test_defaults_are_filled_in(world: World) -> None:
    created = await world.create(job_manifest())
    assert created["spec"]["procPerNode"] == "auto"
    assert created["spec"]["suspend"] is False


async def test_the_schema_and_the_rules_refuse(world: World) -> None:
    for change, words in (({"nodes": 0}, "spec.nodes"), ({"nodes": "two"}, "spec.nodes")):
        error = await refusal(world, "POST", path(KIND, world.namespace), body=job_manifest(**change))
        assert error.status == 422
        assert words in error.message


@pytest.mark.parametrize("dry_run", [{}, {"dryRun": "All"}])
async def test_a_taken_name_has_its_own_reason(world: World, dry_run: dict[str, str]) -> None:
    await world.create(config_map())
    error = await refusal(world, "POST", path("ConfigMap", world.namespace), body=config_map(), params=dry_run)
    assert (error.status, error.reason) == (409, "AlreadyExists")


async def test_a_dry_run_stores_nothing(world: World) -> None:
    await world.client.request("POST", path("Job", world.namespace), body=job(), params={"dryRun": "All"})
    assert await world.get("Job", "j") is None


async def test_unknown_fields_are_refused_when_asked_so(world: World) -> None:
    broken = job()
    broken["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    strict = {"fieldValidation": "Strict"}
    error = await refusal(world, "POST", path("Job", world.namespace), body=broken, params=strict)
    assert error.status == 400
    assert 'unknown field "spec.template.spec.containers[0].imagee"' in error.message


async def test_a_job_without_an_image_is_invalid(world: World) -> None:
    broken = job()
    del broken["spec"]["template"]["spec"]["containers"][0]["image"]
    error = await refusal(world, "POST", path("Job", world.namespace), body=broken)
    assert error.status == 422
    assert "spec.template.spec.containers[0].image: Required value" in error.message


async def test_the_template_of_a_job_is_immutable(world: World) -> None:
    await world.create(job())
    change = {"spec": {"template": {"spec": {"restartPolicy": "OnFailure"}}}}
    merge = "application/merge-patch+json"
    error = await refusal(world, "PATCH", path("Job", world.namespace, "j"), body=change, content_type=merge)
    assert error.status == 422
    assert "field is immutable" in error.message


async def test_a_namespace_must_exist(world: World) -> None:
    error = await refusal(world, "POST", path("ConfigMap", "no-such-namespace"), body=config_map())
    assert error.status == 404


async def test_a_merge_patch_takes_away_by_null(world: World) -> None:
    await world.create(config_map())
    patched = await world.patch("ConfigMap", "c", {"data": {"a": None}})
    assert patched["data"] == {"b": "2"}


async def test_a_deletion_asks_for_the_uid(world: World) -> None:
    created = await world.create(job())
    body: Object = {"preconditions": {"uid": "another"}, "propagationPolicy": "Background"}
    error = await refusal(world, "DELETE", path("Job", world.namespace, "j"), body=body)
    assert error.status == 409
    body["preconditions"]["uid"] = created["metadata"]["uid"]
    answer = await world.client.request("DELETE", path("Job", world.namespace, "j"), body=body)
    assert (answer["kind"], answer["details"]["uid"]) == ("Status", created["metadata"]["uid"])
    assert await world.get("Job", "j") is None


async def test_a_finalizer_holds_a_deleted_object(world: World) -> None:
    await world.create(config_map(finalizers=["example.org/hold"]))
    answer = await world.client.request("DELETE", path("ConfigMap", world.namespace, "c"), body={})
    assert answer["metadata"]["deletionTimestamp"]
    await world.patch("ConfigMap", "c", {"metadata": {"finalizers": None}})
    assert await world.get("ConfigMap", "c") is None


async def test_what_an_owner_leaves_behind_is_collected(world: World) -> None:
    owner = await world.create(config_map("owner"))
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    await world.create(config_map("child", ownerReferences=[reference]))
    await world.create(config_map("other"))
    await world.delete("ConfigMap", "owner")
    await world.gone("ConfigMap", "child")
    assert await world.get("ConfigMap", "other") is not None


async def test_names_can_be_generated(world: World) -> None:
    first, second = [await world.create(config_map("", generateName="x-")) for _ in range(2)]
    assert first["metadata"]["name"].startswith("x-")
    assert first["metadata"]["name"] != second["metadata"]["name"]


async def test_lists_can_be_filtered_paged_and_reduced_to_metadata(world: World) -> None:
    for number in range(3):
        await world.create(config_map(f"c{number}", labels={LABEL_JOB_NAME: "x", "number": str(number)}))
    names = [item["metadata"]["name"] for item in await world.list("ConfigMap", f"{LABEL_JOB_NAME}=x,number!=1")]
    assert names == ["c0", "c2"]
    names = [item["metadata"]["name"] for item in await world.list("ConfigMap", "number in (0, 1)")]
    assert names == ["c0", "c1"]
    params = {"labelSelector": LABEL_JOB_NAME, "limit": "2"}
    where = path("ConfigMap", world.namespace)
    page = await world.client.request("GET", where, params=params, accept=METADATA_ONLY)
    assert [set(item) - {"kind", "apiVersion"} for item in page["items"]] == [{"metadata"}] * 2
    params["continue"] = page["metadata"]["continue"]
    rest = await world.client.request("GET", where, params=params, accept=METADATA_ONLY)
    assert [item["metadata"]["name"] for item in rest["items"]] == ["c2"]
    assert not rest["metadata"].get("continue")


async def test_leaving_a_filtered_watch_looks_like_a_deletion(world: World) -> None:
    created = await world.create(config_map(labels={"team": "a"}))
    relabelled = await world.patch("ConfigMap", "c", {"metadata": {"labels": {"team": "b"}}})
    back = await world.patch("ConfigMap", "c", {"metadata": {"labels": {"team": "a"}}})
    await world.delete("ConfigMap", "c")
    version = str(int(created["metadata"]["resourceVersion"]) - 1)
    info = await world.client.connect()
    params = {"watch": "true", "labelSelector": "team=a", "resourceVersion": version, "timeoutSeconds": "1"}
    ssl = info.as_ssl_context() if info.server.startswith("https") else False
    async with (
        aiohttp.ClientSession() as session,
        session.get(info.server + path("ConfigMap", world.namespace), params=params, ssl=ssl) as response,
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


async def test_the_scale_subresource_is_another_view(world: World) -> None:
    await world.create(job_manifest())
    scale = await world.client.request("GET", path(KIND, world.namespace, "digits", "scale"))
    assert (scale["kind"], scale["spec"]["replicas"]) == ("Scale", 2)
    await world.patch(KIND, "digits", {"spec": {"replicas": 5}}, "scale")
    resource = await world.get(KIND, "digits")
    assert resource is not None
    assert resource["spec"]["nodes"] == 5


async def test_a_job_makes_pods_that_are_tracked_and_owned(world: World) -> None:
    created = await world.create(job())
    await world.patch("Job", "j", {"spec": {"suspend": False}})
    found = await world.pod("j", 0)
    (owner,) = found["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("Job", created["metadata"]["uid"], True)
    assert found["metadata"]["finalizers"] == ["batch.kubernetes.io/job-tracking"]
    assert found["spec"]["hostname"] == "j-0"
    await world.run_pod("j", 0)
    await world.finish_pod("j", 0)

    async def complete() -> bool:
        done = await world.get("Job", "j")
        assert done is not None
        return any(entry["type"] == "Complete" for entry in done.get("status", {}).get("conditions", []))

    await world.until(complete, "the Job's end")
