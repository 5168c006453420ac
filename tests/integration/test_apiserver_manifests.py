"""Hundreds of random and mutated manifests: a real API server accepts exactly those that ``parse_manifest`` accepts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ddp_operator.api.constants import KIND
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.job_file import parse_manifest
from ddp_operator.features import SCHEMA
from ddp_operator.kube.client import ResponseError
from ddp_operator.kube.resources import path
from ddp_operator.manifests.children import build_children
from tests.property.conftest import tell_what_was_tried  # noqa: F401 - a fixture
from tests.support.builders import job, resource, template, trainer
from tests.support.control_plane import ControlPlane
from tests.support.fabrics import FABRICS, complete
from tests.support.fuzzing import examples, tally
from tests.support.standin import ClusterActors
from tests.support.strategies import FULL, json, mutated

pytestmark = pytest.mark.apiserver
NAMES = st.text(st.sampled_from("ab-.9A_é "), max_size=55) | st.sampled_from(["a" * 50, "a" * 51, "digits-1"])


def taken(raw: Any) -> bool:
    try:
        parse_manifest(yaml.safe_dump(raw, allow_unicode=True), SCHEMA)
    except InvalidManifest:
        return False
    return True


@pytest.fixture(scope="module")
def server(plane: ControlPlane) -> Iterator[tuple[asyncio.Runner, ClusterActors]]:
    """A separate event loop, and the API server's default namespace."""
    with asyncio.Runner() as runner:
        actors = ClusterActors(plane.admin)
        yield runner, actors
        runner.run(actors.__aexit__(None, None, None))


def as_kubectl_sends(value: Any) -> Any:
    """Convert a value as kubectl converts YAML to JSON: a whole number has no decimal point."""
    if isinstance(value, dict):
        return {name: as_kubectl_sends(member) for name, member in value.items()}
    if isinstance(value, list):
        return [as_kubectl_sends(member) for member in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.parametrize("profile", FABRICS)
def test_api_server_accepts_job_on_each_fabric(server: tuple[asyncio.Runner, ClusterActors], profile: str) -> None:
    runner, actors = server
    limits = {"limits": {"nvidia.com/gpu": "8", "memory": "8Gi"}}
    pod = template(trainer(name="main", resources=limits), initContainers=[{"name": "fetch", "image": "fetch:1"}])
    made = build_children(job(nodes=2, **complete(profile, template=pod)), attempt=1, nodes=2)
    [child] = [child for child in made if child["kind"] == "Job"]
    # The API server validates the Job's template like a pod, except for checks in the admission of pods.
    pods = {"apiVersion": "v1", "kind": "Pod", **child["spec"]["template"]}
    pods["metadata"] = {**pods["metadata"], "name": "a-pod"}
    params = {"dryRun": "All", "fieldValidation": "Strict"}
    for item in (child, pods):
        stored = runner.run(actors.client.request("POST", path(item["kind"], "default"), params=params, body=item))
        assert stored["kind"] == item["kind"]


def test_api_server_keeps_null_that_drops_device(server: tuple[asyncio.Runner, ClusterActors]) -> None:
    runner, actors = server
    limits = {"nvidia.com/gpu": "8", "memory": "8Gi", "vpc.amazonaws.com/efa": None}
    raw = resource(profileRef={"name": "x"}, template=template(trainer(resources={"limits": limits})))
    made = actors.client.request("POST", path(KIND, "default"), params={"dryRun": "All"}, body=raw)
    spec = complete("efa", **runner.run(made)["spec"]) | {"nodes": 2}
    [child] = [item for item in build_children(job(**spec), attempt=1, nodes=2) if item["kind"] == "Job"]
    [container] = child["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"].keys() == {"nvidia.com/gpu", "memory", "hugepages-2Mi"}


async def refusal(actors: ClusterActors, raw: Any) -> str:
    """Return why the API server refuses a manifest, or None."""
    params = {"dryRun": "All", "fieldValidation": "Strict"}
    try:
        await actors.client.request("POST", path(KIND, "default"), params=params, body=raw)
    except ResponseError as error:
        if error.status not in (400, 422):
            raise
        return str(error) or "refused"
    return ""


MANIFESTS = (
    mutated(FULL, outside=("spec", "template"))
    | NAMES.map(lambda name: FULL | {"metadata": {"name": name}})
    | json.map(lambda spec: FULL | {"spec": spec})
)


@examples(300)
@given(raw=MANIFESTS)
def test_api_server_accepts_offline_valid_manifests(server: tuple[asyncio.Runner, ClusterActors], raw: Any) -> None:
    runner, actors = server
    if not isinstance(raw.get("metadata"), dict) or not isinstance(raw.get("status") or {}, dict):
        return  # the API server drops the status that a user writes
    namespace = raw["metadata"].get("namespace")
    if isinstance(namespace, str) and namespace not in ("", "default"):
        return  # kubectl would send it to that namespace, which does not exist
    message = runner.run(refusal(actors, as_kubectl_sends(raw)))
    assert taken(raw) == (not message), message or "the API server takes it"
    tally("manifest held against a real API server")
