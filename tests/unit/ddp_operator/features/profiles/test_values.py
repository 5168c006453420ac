"""A job's complete spec from its own and its profile's."""

import copy
from typing import Any

import pytest
import yaml

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.job_file import find_among, parse_manifest
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.size import MAX_BYTES, OversizeSpec
from ddp_operator.api.status import Profile
from ddp_operator.features import SCHEMA
from ddp_operator.features.profiles.values import merge_profile, read_profile
from tests.support.builders import profile, resource, template, trainer


def dump(*objects: Any) -> str:
    return yaml.safe_dump_all(objects)


def taken(job: dict[str, Any]) -> Profile:
    return read_profile(profile(job))


class TestMergedProfile:
    def test_own_default_values_override_profile(self) -> None:
        source = taken({"recovery": {"maxRestarts": 9, "countDisruptions": True}, "securityProfile": "Restricted"})
        spec = merge_profile({"recovery": {"maxRestarts": 3, "countDisruptions": False}}, source)
        assert spec == {"recovery": {"maxRestarts": 3, "countDisruptions": False}, "securityProfile": "Restricted"}

    @pytest.mark.parametrize(
        ("theirs", "ours", "expected"),
        [
            (["trainer"], ["main"], ["main"]),
            (["main"], ["trainer"], ["trainer"]),
            (["trainer", "side"], ["main"], ["main", "side"]),
            (["trainer", "side"], ["side"], ["trainer", "side"]),
            (["main"], ["side", "trainer"], ["side", "trainer"]),
        ],
    )
    def test_training_containers_match_by_role_not_name(
        self, theirs: list[str], ours: list[str], expected: list[str]
    ) -> None:
        base = {"template": template(*({"name": name, "image": name} for name in theirs))}
        own = {"template": template(*({"name": name, "command": [name]} for name in ours))}
        before = copy.deepcopy((base, own))
        spec = merge_profile(own, taken(base))
        assert [container["name"] for container in spec["template"]["spec"]["containers"]] == expected
        assert (base, own) == before


BASE = {
    "recovery": {"maxRestarts": 9},
    "template": template(
        trainer(name="t", env=[{"name": "A", "value": "1"}], resources={"limits": {"nvidia.com/gpu": "8"}}),
        nodeSelector={"a.b/c": "d"},
        volumes=[{"name": "v", "emptyDir": {}}],
    ),
}


@pytest.mark.parametrize("spec", [{"job": [1]}, {"locked": ["recovery"]}, {"job": "x"}])
def test_profile_of_another_form_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidManifest, match="docs/profiles"):
        read_profile({"kind": "DDPTrainingProfile", "metadata": {"name": "x"}, "spec": spec})


COMPANIONS = [
    ("checkpoint.keep", {"checkpoint": {"path": "/c", "keep": 5}}, {"checkpoint": {"path": "/c", "url": "s3://b/p"}}),
    ("scheduling.topologyKey", {"scheduling": {"topologyKey": "zone"}}, {"scheduling": {"placement": "Pack"}}),
]  # fmt: skip


class TestManifest:
    def test_is_completed_from_its_own_file(self) -> None:
        raw = resource(profileRef={"name": "gpu"}, template=template({"name": "trainer", "command": ["x"]}))
        manifest = parse_manifest(dump(raw, profile(BASE)), SCHEMA)
        assert manifest.job.spec.recovery.max_restarts == 9
        assert manifest.written["spec"] == raw["spec"]
        assert manifest.completed["recovery"] == {"maxRestarts": 9}
        assert manifest.resource["spec"]["recovery"]["resetAfterSteps"] == 1000

    @pytest.mark.parametrize(("field", "needy", "needed"), COMPANIONS)
    def test_requirement_may_be_met_by_profile_and_by_job(
        self, field: str, needy: dict[str, Any], needed: dict[str, Any]
    ) -> None:
        raw = resource(profileRef={"name": "gpu"}, **needy)
        parse_manifest(dump(raw, profile(needed)), SCHEMA)
        parse_manifest(dump(resource(profileRef={"name": "gpu"}, **needed), profile(needy)), SCHEMA)
        with pytest.raises(InvalidManifest, match=f"^spec.{field}: "):
            parse_manifest(dump(raw, profile({})), SCHEMA)
        with pytest.raises(InvalidManifest, match=f"^spec.{field}: "):
            parse_manifest(dump(resource(**needy)), SCHEMA)

    @pytest.mark.parametrize(
        ("own", "base", "words"),
        [
            ({}, None, "ClusterDDPTrainingProfile gpu does not exist"),
            ({"nodes": 2}, {"elastic": {"minNodes": 3, "maxNodes": 4}}, "spec.nodes: .*elastic.minNodes"),
            (
                {"scheduling": {"topologyKey": "zone"}},
                {"scheduling": {"placement": "Any"}},
                "topologyKey: .*needs scheduling.placement",
            ),
            ({"checkpoint": {"claimName": "c"}}, {}, "spec.checkpoint.path: Required value"),
            ({"profileRef": {"name": "-"}}, BASE, "- does not exist"),
            ({"profileRef": {"kind": "Other", "name": "gpu"}}, BASE, "Other gpu does not exist"),
        ],
    )
    def test_is_refused_by_its_field(self, own: dict[str, Any], base: Any, words: str) -> None:
        raw = resource(**{"profileRef": {"name": "gpu"}, **own})
        find = find_among([profile(base)] if base is not None else [])
        with pytest.raises(InvalidManifest, match=words):
            parse_manifest(dump(raw), SCHEMA, profiles=find)


def test_spec_that_profile_makes_oversize_is_refused() -> None:
    half = ["x" * (MAX_BYTES * 2 // 3)]
    base = read_profile(profile({"template": template(trainer(command=half))}))
    spec = merge_profile({"template": template(trainer(args=half, command=None))}, base)
    with pytest.raises(OversizeSpec):
        parse_resource(resource(**spec), SCHEMA)


def test_oversize_profile_is_refused() -> None:
    with pytest.raises(OversizeSpec, match=r"^spec"):
        read_profile(profile({"template": template(trainer(args=["x" * MAX_BYTES]))}))
