"""A job's complete spec from its own and its profile's, and the locked fields."""

import copy
from typing import Any

import jsonschema
import pytest
import yaml
from cel_expr_python import cel

from ddp_operator.api.crd import NOT_OF_PROFILES, build_profile_schema
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.parse import find_among, parse_manifest
from ddp_operator.api.profile import complete_spec, describe_values, read_profile
from ddp_operator.api.status import Profile
from tests.support.builders import profile, resource, template, trainer


def dump(*objects: Any) -> str:
    return yaml.safe_dump_all(objects)


def taken(job: dict[str, Any], *locked: str) -> Profile:
    return read_profile(profile(job, *locked))


def trainer_of(spec: dict[str, Any]) -> dict[str, Any]:
    return next(
        container for container in spec["template"]["spec"]["containers"] if container["name"] in ("trainer", "main")
    )


class TestMergedProfile:
    def test_own_default_values_override_profile(self) -> None:
        source = taken({"recovery": {"maxRestarts": 9, "countDisruptions": True}, "securityProfile": "Restricted"})
        spec, errors = complete_spec({"recovery": {"maxRestarts": 3, "countDisruptions": False}}, source)
        assert errors == []
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
        spec, _ = complete_spec(own, taken(base))
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
OWN_TRAINER = {"name": "main", "command": ["x"]}


class TestLocks:
    @pytest.mark.parametrize(
        ("lock", "own"),
        [
            ("recovery.maxRestarts", {"recovery": {"maxRestarts": 3}}),
            ("recovery", {"recovery": {"resetAfterSteps": 3}}),
            ("networkPolicy.enabled", {"networkPolicy": {"enabled": False}}),
            ("template.spec.hostNetwork", {"template": template(OWN_TRAINER, hostNetwork=False)}),
            ("template.spec.nodeSelector", {"template": template(OWN_TRAINER, nodeSelector={"e": "f"})}),
            ("template.spec.nodeSelector", {"template": template(OWN_TRAINER, nodeSelector=None)}),
            ("template.spec.nodeSelector[a.b/c]", {"template": template(OWN_TRAINER, nodeSelector={"a.b/c": "x"})}),
            (
                "template.spec.nodeSelector[a.b/c]",
                {"template": template(OWN_TRAINER, nodeSelector={"$patch": "replace", "e": "f"})},
            ),
            (
                "template.spec.containers[trainer].env[A]",
                {"template": template(OWN_TRAINER | {"env": [{"name": "A", "value": "2"}]})},
            ),
            (
                "template.spec.containers[trainer].env[A]",
                {"template": template(OWN_TRAINER | {"env": [{"name": "A", "$patch": "delete"}]})},
            ),
            (
                "template.spec.containers[trainer].env[A].value",
                {"template": template(OWN_TRAINER | {"env": [{"$patch": "replace"}, {"name": "B", "value": "2"}]})},
            ),
            (
                "template.spec.containers[trainer].resources.limits[nvidia.com/gpu]",
                {"template": template(OWN_TRAINER | {"resources": {"limits": {"nvidia.com/gpu": "4"}}})},
            ),
            ("template.spec.volumes", {"template": template(OWN_TRAINER, volumes=[{"name": "w", "emptyDir": {}}])}),
            (
                "template.spec.containers[trainer].securityContext",
                {"template": template(OWN_TRAINER | {"securityContext": {}})},
            ),
        ],
    )
    def test_overridden_lock_is_named_and_ignored(self, lock: str, own: dict[str, Any]) -> None:
        free, errors = complete_spec(own, taken(BASE))
        assert errors == []
        spec, [error] = complete_spec(own, taken(BASE, lock))
        assert str(error).startswith(f"spec.{lock}: ")
        assert "ClusterDDPTrainingProfile" in error.message
        assert spec != free
        _, again = complete_spec(spec, taken(BASE, lock))
        assert again == []

    def test_omitted_or_equal_value_passes_lock(self) -> None:
        locks = ("recovery.maxRestarts", "networkPolicy", "template.spec.containers[trainer].env", "watchdog.action")
        own = {
            "nodes": 2,
            "recovery": {"maxRestarts": 9, "resetAfterSteps": 5},
            "template": template(OWN_TRAINER | {"env": [{"name": "A", "value": "1"}], "args": ["y"]}),
        }
        spec, errors = complete_spec(own, taken(BASE, *locks))
        assert errors == []
        assert trainer_of(spec)["args"] == ["y"]

    def test_each_value_that_is_described_can_be_locked(self) -> None:
        paths = dict(describe_values(BASE))
        assert paths["template.spec.containers[t].resources.limits[nvidia.com/gpu]"] == "8"
        [rule] = build_profile_schema()["properties"]["spec"]["properties"]["locked"]["x-kubernetes-validations"]
        program = cel.NewEnv(variables={"self": cel.Type.DYN}).compile(rule["rule"])
        assert program.eval(data={"self": list(paths)}).value() is True
        for mistake in ("recovry", "nodes", "spec.recovery", "template.status", "template.spec[", "recovery."):
            assert program.eval(data={"self": ["recovery", mistake]}).value() is False
        for path, value in paths.items():
            _, errors = complete_spec({}, taken(BASE, path))
            assert (errors, value is not None) == ([], True)
            changed = {"recovery": {"maxRestarts": 1}, "template": {"$patch": "replace", "spec": {}}}
            assert complete_spec(changed, taken(BASE, path))[1] != []


@pytest.mark.parametrize("spec", [{"job": [1]}, {"locked": {"a": 1}}, {"job": "x"}])
def test_profile_of_another_form_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidManifest, match="docs/profiles"):
        read_profile({"kind": "DDPTrainingProfile", "metadata": {"name": "x"}, "spec": spec})


COMPANIONS = [
    ("checkpoint.keep", {"checkpoint": {"path": "/c", "keep": 5}}, {"checkpoint": {"path": "/c", "url": "s3://b/p"}}),
    ("scheduling.queue", {"scheduling": {"queue": "q"}}, {"scheduling": {"gang": "Volcano"}}),
    ("scheduling.topologyKey", {"scheduling": {"topologyKey": "zone"}}, {"scheduling": {"placement": "Pack"}}),
    ("networkPolicy.egressCidrs", {"networkPolicy": {"egressCidrs": ["10.0.0.0/8"]}},
     {"networkPolicy": {"enabled": True}}),
    ("tracking", {"tracking": {"runId": "r"}}, {"tracking": {"mlflow": {"trackingUri": "http://m"}}}),
    ("recovery.nodeHealth", {"recovery": {"nodeHealth": {"action": "Report"}}},
     {"recovery": {"nodeHealth": {"taints": ["x"]}}}),
    ("network.minPairMegabytesPerSecond", {"network": {"minPairMegabytesPerSecond": 9}},
     {"preflight": {"checks": ["pairs"]}}),
    ("preflight.minMegabytesPerSecond", {"preflight": {"minMegabytesPerSecond": 9}},
     {"preflight": {"checks": ["allreduce"]}}),
]  # fmt: skip


class TestManifest:
    def test_is_completed_from_its_own_file(self) -> None:
        raw = resource(profileRef={"name": "gpu"}, template=template({"name": "trainer", "command": ["x"]}))
        manifest = parse_manifest(dump(raw, profile(BASE)))
        assert manifest.job.spec.recovery.max_restarts == 9
        assert manifest.written["spec"] == raw["spec"]
        assert manifest.completed["recovery"] == {"maxRestarts": 9}
        assert manifest.resource["spec"]["recovery"]["resetAfterSteps"] == 1000

    @pytest.mark.parametrize(("field", "needy", "needed"), COMPANIONS)
    def test_requirement_may_be_met_by_profile_and_by_job(
        self, field: str, needy: dict[str, Any], needed: dict[str, Any]
    ) -> None:
        raw = resource(profileRef={"name": "gpu"}, **needy)
        parse_manifest(dump(raw, profile(needed)))
        parse_manifest(dump(resource(profileRef={"name": "gpu"}, **needed), profile(needy)))
        with pytest.raises(InvalidManifest, match=f"^spec.{field}: "):
            parse_manifest(dump(raw, profile({})))
        with pytest.raises(InvalidManifest, match=f"^spec.{field}: "):
            parse_manifest(dump(resource(**needy)))

    @pytest.mark.parametrize(
        ("own", "base", "words"),
        [
            ({}, None, "ClusterDDPTrainingProfile gpu does not exist"),
            ({"recovery": {"maxRestarts": 1}}, BASE, "spec.recovery.maxRestarts: Invalid value: 1: locked at 9"),
            ({"nodes": 2}, {"elastic": {"minNodes": 3, "maxNodes": 4}}, "spec.nodes: .*elastic.minNodes"),
            (
                {"scheduling": {"topologyKey": "zone"}},
                {"scheduling": {"gang": "None"}},
                "topologyKey: .*needs scheduling.placement",
            ),
            ({"checkpoint": {"claimName": "c"}}, {}, "spec.checkpoint.path: Required value"),
            ({"profileRef": {"name": "-"}}, BASE, "- does not exist"),
            ({"profileRef": {"kind": "Other", "name": "gpu"}}, BASE, "Other gpu does not exist"),
        ],
    )
    def test_is_refused_by_its_field(self, own: dict[str, Any], base: Any, words: str) -> None:
        raw = resource(**{"profileRef": {"name": "gpu"}, **own})
        find = find_among([profile(base, "recovery.maxRestarts")] if base is not None else [])
        with pytest.raises(InvalidManifest, match=words):
            parse_manifest(dump(raw), profiles=find)


def test_profile_schema_equals_job_schema_without_required() -> None:
    schema = build_profile_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    job = schema["properties"]["spec"]["properties"]["job"]
    assert not set(NOT_OF_PROFILES) & set(job["properties"])
    assert "required" not in job
    assert "required" not in job["properties"]["checkpoint"]
    assert job["properties"]["recovery"]["properties"]["maxRestarts"]["x-kubernetes-validations"]
    assert "default" not in str(job["properties"]["recovery"])
