"""Fields of the release before, those of features included: taken over where written or stored."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import pytest

from ddp_operator.api.completion import complete_job
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.former import FormerField, find_former, take_over_former
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.status import Profile
from ddp_operator.api.written import parse_written
from ddp_operator.features import SCHEMA, build_definitions
from docs.pages.schemas import to_json_schema
from tests.support.builders import resource, template

INPUT = {"url": "https://host/file", "mountPath": "/data"}
REPLACED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("shm", {"shm": {"sizeLimit": "8Gi"}}, {"sharedMemory": "8Gi"}),
    ("shm", {"shm": {}}, {}),
    (
        "network",
        {"network": {"profile": "auto", "require": True, "transports": ["IB"]}, "preflight": {"mode": "Fail"}},
        {"preflight": {"mode": "Fail", "require": True, "transports": ["IB"]}},
    ),
    (
        "code.configMapName",
        {"code": {"digest": "1" * 64, "configMapName": "a", "mountPath": "/src"}},
        {"code": {"digest": "1" * 64, "source": "configmap/a", "mountPath": "/src"}},
    ),
    *(
        (
            path,
            {"code": {"digest": "1" * 64, "claimName": "a", "path": "b/c", "commit": "2" * 40, "dirty": True}},
            {"code": {"digest": "1" * 64, "source": "claim/a/b/c", "revision": f"{'2' * 12}-dirty {'1' * 12}"}},
        )
        for path in ("code.claimName", "code.path", "code.commit", "code.dirty")
    ),
    (
        "code.image",
        {"code": {"digest": "1" * 64, "image": f"a/b@sha256:{'0' * 64}", "commit": "2" * 40}},
        {"code": {"digest": "1" * 64, "source": f"image/a/b@sha256:{'0' * 64}", "revision": "2" * 12}},
    ),
    *(
        (
            f"scheduling.{name}",
            {"scheduling": {name: "a", "placement": "Pack"}},
            {"scheduling": {"placement": "Pack"}, "template": template(**{name: "a"})},
        )
        for name in ("schedulerName", "priorityClassName")
    ),
    (
        "inputs[].nodeCache",
        {"inputs": [{**INPUT, "claimName": "c"}, {**INPUT, "nodeCache": {"path": "/cache"}}]},
        {"inputs": [{**INPUT, "claimName": "c"}, {**INPUT, "nodePath": "/cache"}]},
    ),
    ("tracking.tensorboard", {"tracking": {"tensorboard": {"path": "/tb"}}}, {"tracking": {"tensorboardPath": "/tb"}}),
    *(
        ("checkpoint.memory", {"checkpoint": {"path": "/c", "memory": memory}}, {"checkpoint": {"path": "/c", **new}})
        for memory, new in (({"enabled": False}, {"memoryInterval": 0}), ({"interval": 5}, {"memoryInterval": 5}))
    ),
    (
        "checkpoint.memory",
        {"checkpoint": {"path": "/c", "memory": {"enabled": True, "interval": 5}}},
        {"checkpoint": {"path": "/c", "memoryInterval": 5}, "sharedMemory": "50%"},
    ),
    (
        "checkpoint.memory",
        {"checkpoint": {"path": "/c", "memory": {"enabled": True}}, "shm": {"sizeLimit": "8Gi"}},
        {"checkpoint": {"path": "/c"}, "sharedMemory": "8Gi"},
    ),
]
"""The path of a field, a spec of the release before, and the same in this version."""


@pytest.mark.parametrize(("path", "old", "new"), REPLACED)
def test_stored_field_is_taken_over(path: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    assert parse_resource(resource(**old), SCHEMA).spec == parse_resource(resource(**new), SCHEMA).spec


@pytest.mark.parametrize(("path", "old", "new"), REPLACED)
def test_written_field_is_taken_over_and_named(path: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    assert parse_written(resource(**old), SCHEMA).spec == parse_written(resource(**new), SCHEMA).spec
    deprecated = find_former(resource(**old)["spec"], SCHEMA.former)
    assert path in [re.sub(r"\[\d+\]", "[]", field.path.removeprefix("spec.")) for field in deprecated]
    assert not find_former(resource(**new)["spec"], SCHEMA.former)


OF_RELEASE_BEFORE = {
    "shm": {"shm": {"sizeLimit": "8Gi"}, "preflight": {}, "watchdog": {}},
    "network": {"shm": {}, "network": {"require": True}, "preflight": {"mode": "Fail"}, "watchdog": {}},
    "code": {"shm": {}, "preflight": {}, "watchdog": {}, "code": {"digest": "1" * 64, "configMapName": "a"}},
    "inputs": {
        "shm": {},
        "preflight": {},
        "watchdog": {},
        "inputs": [{**INPUT, "nodeCache": {"path": "/cache"}}],
    },
    "memory": {
        "shm": {},
        "preflight": {},
        "watchdog": {},
        "checkpoint": {"path": "/c", "memory": {"enabled": True}},
    },
    "none": {"shm": {}, "preflight": {}, "watchdog": {}},
}
"""Former members, and those with a default, by which that release has computed the digest of a job."""


@pytest.mark.parametrize("name", OF_RELEASE_BEFORE)
@pytest.mark.parametrize("of_profile", [False, True])
def test_waiting_job_has_the_digest_of_the_release_before(name: str, of_profile: bool) -> None:
    """Its Job stays, and its place in a queue."""
    members = OF_RELEASE_BEFORE[name]
    written = {key: value for key, value in members.items() if value}
    raw = resource(profileRef={"name": "p"}, **({} if of_profile else written))
    profile = Profile(kind="ClusterDDPTrainingProfile", name="p", digest="d", job=written if of_profile else {})
    job = complete_job(raw, profile, SCHEMA)
    fixed = {"procPerNode": raw["spec"]["procPerNode"]} if "procPerNode" in raw["spec"] else {}
    digested = json.dumps({**members, **fixed, "template": raw["spec"]["template"]}, sort_keys=True)
    assert job.spec_digest == hashlib.sha256(digested.encode()).hexdigest()[:16]


@pytest.mark.parametrize("field", SCHEMA.former, ids=lambda field: field.path)
@pytest.mark.parametrize("value", [None, 5, "x", [], {}, {"path": 5}], ids=str)
def test_odd_value_of_a_file_is_no_fault(field: FormerField, value: object) -> None:
    spec: Any = value
    for name in reversed(field.path.split(".")):
        spec = {name.removesuffix("[]"): [spec, value] if name.endswith("[]") else spec}
    assert isinstance(take_over_former(spec, SCHEMA.former), dict)


def test_every_former_field_has_an_example() -> None:
    assert {field.path for field in SCHEMA.former} == {path for path, _, _ in REPLACED}


def test_profile_of_a_network_is_refused_also_where_it_is_stored() -> None:
    with pytest.raises(InvalidManifest, match=r"spec\.network\.profile: .* apply deploy/profiles/fabric-<name>"):
        parse_resource(resource(network={"profile": "ib"}), SCHEMA)


@pytest.mark.parametrize("of_job", [True, False])
def test_profile_and_job_may_have_different_forms(of_job: bool) -> None:
    old: dict[str, Any] = {"shm": {"sizeLimit": "8Gi"}}
    new: dict[str, Any] = {"sharedMemory": "9Gi"}
    own, base = (old, new) if of_job else (new, old)
    profile = Profile(kind="ClusterDDPTrainingProfile", name="p", digest="d", job=base)
    job = complete_job(resource(profileRef={"name": "p"}, **own), profile, SCHEMA)
    assert job.spec.shared_memory == ("8Gi" if of_job else "9Gi")


def test_schemas_for_editors_have_former_fields() -> None:
    for definition in build_definitions().values():
        schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        assert ("Deprecated until" in str(to_json_schema(schema))) == (
            "Training" in definition["spec"]["names"]["kind"]
        )
