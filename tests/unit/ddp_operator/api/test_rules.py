"""Each CEL rule refuses its subject with a remedy, and accepts the default and its bounds."""

from typing import Any

import msgspec
import pytest

from ddp_operator.api.cel import check_rules
from ddp_operator.api.cel_rule import CelRule
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.rules import list_rules
from ddp_operator.api.schema import KERNEL
from ddp_operator.manifests.children import build_service
from tests.support.builders import template, trainer
from tests.support.fields import change, list_refused, store

YEAR = 366 * 24 * 3600


def stored(name: str = "train", **spec: Any) -> dict[str, Any]:
    """Return a resource in the form in which the API server evaluates a rule."""
    return store(KERNEL, name, **spec)


def refused(item: dict[str, Any], old: dict[str, Any] | None = None) -> list[str]:
    return list_refused(item, KERNEL, old)


STORE = {"path": "/ckpt", "url": "s3://bucket/prefix"}
BAD: dict[str, tuple[Any, ...]] = {
    "metadata.name": ("a" * 51, "A", "1a", "a.b", "a_b", "a-", "-a", "a b", "ä"),
    "spec.nodes": (0, -1, 5001, 2**63, 2**70),
    "spec.spares": (-1, 17),
    "spec.elastic": (
        {"minNodes": 2, "maxNodes": 1},
        {"minNodes": 0, "maxNodes": 1},
        {"minNodes": 1, "maxNodes": 5001},
    ),
    "spec.procPerNode": (0, -1, "all", "", "2", 1025, 2**70),
    "spec.rendezvous.port": (0, 1023, 65536),
    "spec.metrics.port": (80, 70000, 29400),
    "spec.metrics.logPatterns": (["(?P<step>.)"] * 9, ["x" * 513]),
    "spec.metrics.epochs": (0, -1),
    "spec.rendezvous.joinTimeoutSeconds": (9, 0, YEAR + 1),
    "spec.recovery.inPlaceRestarts": (-1, 10_001),
    "spec.recovery.maxRestarts": (-1, 10_001),
    "spec.recovery.resetAfterSteps": (0, -1, 2**31),
    "spec.recovery.forceDeleteAfterSeconds": (-1, YEAR + 1),
    "spec.recovery.nonRetryableExitCodes": ([0], [1, 256], [-1], [2**70]),
    "spec.checkpoint.path": ("ckpt", "", "./c"),
    "spec.checkpoint.graceSeconds": (-1, YEAR + 1),
    "spec.checkpoint.url": ("bucket/prefix", "memory://x", "https://x/y", "s3://", "s3://a b"),
    "spec.checkpoint.keep": (0, 1001, 3),
    "spec.checkpoint.secretRef": ({"name": "bucket"},),
    "spec.checkpoint": (
        STORE | {"claimName": "c"},
        STORE | {"shared": True},
    ),
    "spec.sharedMemory": ("", "8 Gi", "8GB", "-1Gi", "1e3", "Gi", "8Gi\n", "0%", "100%", "5.5%"),
    "spec.scheduling.topologyKey": ("zone",),
    "spec.activeDeadlineSeconds": (0, -1, 10**15),
    "spec.managedBy": ("", "multikueue", "/x", "kueue.x-k8s.io/", f"a.b/{'c' * 60}"),
    "spec.pendingDeadlineSeconds": (0, -1, 10**15),
    "spec.ttlSecondsAfterFinished": (-1, 10**15),
}
GOOD: dict[str, tuple[Any, ...]] = {
    "metadata.name": ("a", "a" * 50, "a-1", "a--b"),
    "spec.nodes": (1, 5000),
    "spec.procPerNode": (1, 1024, "auto", "gpu", "cpu"),
    "spec.rendezvous.port": (1024, 65535),
    "spec.metrics.port": (1024, 65535),
    "spec.metrics.logPatterns": ([], ["(?P<step>.)"] * 8, ["x" * 512]),
    "spec.metrics": ({"port": 9400, "logPatterns": ["(?P<epoch>.)"], "epochs": 1},),
    "spec.managedBy": ("kueue.x-k8s.io/multikueue", "ddp-operator.dev/ddp-operator", f"a.b/{'c' * 59}"),
    "spec.rendezvous.joinTimeoutSeconds": (10, YEAR),
    "spec.recovery.inPlaceRestarts": (0, 10_000),
    "spec.recovery.maxRestarts": (0, 10_000),
    "spec.recovery.resetAfterSteps": (1, 2**31 - 1),
    "spec.recovery.forceDeleteAfterSeconds": (0, YEAR),
    "spec.recovery.nonRetryableExitCodes": ([], [1], [255, 1]),
    "spec.checkpoint.path": ("/", "/c/d"),
    "spec.checkpoint.graceSeconds": (0, YEAR),
    "spec.checkpoint.url": ("s3://bucket/prefix", "file://data", "gs://b"),
    "spec.checkpoint": (STORE | {"keep": 1000, "secretRef": {"name": "bucket"}},),
    "spec.sharedMemory": ("8Gi", "1", "0.5Ti", "100M", "1%", "99%"),
    "spec.scheduling": (
        {},
        {"placement": "Pack", "topologyKey": "example.com/rack_1"},
    ),
    "spec.activeDeadlineSeconds": (1, YEAR),
    "spec.pendingDeadlineSeconds": (1, YEAR),
    "spec.ttlSecondsAfterFinished": (0, YEAR),
}
BAD["spec.scheduling.topologyKey"] += ("", "a b", "/a", "a/b/c", "-a")
BASE = stored(checkpoint={"path": "/ckpt"})
cases = [(path, value) for path, values in BAD.items() for value in values]


@pytest.mark.parametrize(("path", "value"), cases, ids=[f"{path}={str(value)[:12]!r}" for path, value in cases])
def test_bad_value_is_refused_by_name_of_its_field(path: str, value: Any) -> None:
    assert path in refused(change(BASE, path, value))


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, values in GOOD.items() for value in values],
)  # fmt: skip
def test_bound_itself_is_taken(path: str, value: Any) -> None:
    assert refused(change(BASE, path, value)) == []


def test_every_single_object_rule_refuses_a_bad_value() -> None:
    met = set()
    elastic = ("spec.elastic", {"minNodes": 2, "maxNodes": 3})
    for path, value in [*cases, ("spec.recovery", {"inPlaceRestarts": 1}), elastic]:
        item = change(BASE, path, value)
        if path in ("spec.recovery", "spec.elastic"):
            item = change(item, "spec.rendezvous.backend", "static")
        met |= {error.message for error in check_rules(item, KERNEL)}
    assert {rule.message for rule in list_rules(KERNEL) if not rule.is_transition} - met == set()


@pytest.mark.parametrize("rule", list_rules(KERNEL), ids=lambda rule: f"{rule.at}{rule.field}")
def test_rule_message_has_remedy(rule: CelRule) -> None:
    problem, _, remedy = rule.message.rpartition("; ")
    assert problem
    assert remedy
    assert not rule.message.endswith(".")


ELASTIC = {"minNodes": 2, "maxNodes": 4}
STATIC = {"spec.rendezvous.backend": "static"}
DEPENDENT: list[tuple[dict[str, Any], list[str]]] = [
    (STATIC | {"spec.recovery.inPlaceRestarts": 1}, ["spec.recovery.inPlaceRestarts"]),
    (STATIC | {"spec.recovery.inPlaceRestarts": 0}, []),
    (STATIC, []),
    ({"spec.recovery.inPlaceRestarts": 3}, []),
    ({"spec.elastic": ELASTIC, "spec.nodes": 1}, ["spec.nodes"]),
    ({"spec.elastic": ELASTIC, "spec.nodes": 2}, []),
    ({"spec.elastic": ELASTIC, "spec.nodes": 4}, []),
    ({"spec.elastic": ELASTIC, "spec.nodes": 5}, ["spec.nodes"]),
    ({"spec.elastic": ELASTIC, "spec.nodes": 2} | STATIC, ["spec.elastic"]),
    ({"spec.nodes": 2, "spec.spares": 1}, []),
    ({"spec.nodes": 1, "spec.spares": 1}, ["spec.spares"]),
    ({"spec.nodes": 2, "spec.spares": 1, "spec.elastic": ELASTIC}, ["spec.spares"]),
    ({"spec.nodes": 2, "spec.spares": 1} | STATIC, ["spec.spares"]),
    ({"spec.nodes": 1, "spec.spares": 0} | STATIC, []),
    ({"spec.rendezvous.port": 9400}, ["spec.metrics.port"]),
]


@pytest.mark.parametrize(("changes", "paths"), DEPENDENT, ids=lambda value: str(value)[:60])
def test_rule_that_depends_on_another_field(changes: dict[str, Any], paths: list[str]) -> None:
    item = stored()
    for path, value in changes.items():
        item = change(item, path, value)
    assert refused(item) == paths


def test_number_beyond_64_bits_in_template_hides_no_other_refusal() -> None:
    item = change(stored(template=template(trainer(securityContext={"runAsUser": 2**70}))), "spec.metrics.port", 29400)
    assert refused(change(item, "metadata.name", "A")) == ["metadata.name", "spec.metrics.port"]


FIXED = {
    "spec.procPerNode": 4,
    "spec.rendezvous.port": 30000,
    "spec.metrics.port": 30001,
    "spec.sharedMemory": "1Gi",
    "spec.elastic": {"minNodes": 1, "maxNodes": 9},
    "spec.spares": 0,
    "spec.securityProfile": "Restricted",
    "spec.scheduling.placement": "Pack",
    "spec.successPolicy": "RankZero",
    "spec.checkpoint.path": "/elsewhere",
    "spec.template.spec.containers": [trainer(image="other")],
}
MUTABLE = {
    "spec.nodes": 4,
    "spec.suspend": True,
    "spec.activeDeadlineSeconds": 5,
    "spec.ttlSecondsAfterFinished": 5,
    "spec.pendingDeadlineSeconds": 5,
    "spec.cleanPodPolicy": "All",
    "spec.recovery.maxRestarts": 9,
    "metadata.labels": {"a": "b"},
}


RAN = {"attempt": 1, "firstRunTime": "2026-11-20T12:00:00Z"}


def said(item: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """Return the refusals of a change, each without its remedy."""
    errors = check_rules(item, KERNEL, old)
    return [str(error).partition(" can't be changed once the job has started; ")[0] for error in errors]


def made_once(item: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of the Service, which all attempts of a stored job share."""
    item = change(item, "metadata", item["metadata"] | {"uid": "1", "generation": 1, "resourceVersion": "1"})
    spec: dict[str, Any] = build_service(parse_resource(item, KERNEL))["spec"]
    return spec


class TestTransitionRules:
    @pytest.mark.parametrize("path", FIXED)
    def test_pod_fields_are_fixed_after_first_pod(self, path: str) -> None:
        old = stored() | {"status": RAN}
        field = ".".join(path.split(".")[:2])
        assert said(change(old, path, FIXED[path]), old) == [f"spec: Invalid value: {field}"]

    def test_all_that_was_changed_is_named_at_once(self) -> None:
        new = old = stored() | {"status": RAN}
        for path, value in (FIXED | MUTABLE).items():
            new = change(new, path, value)
        [words] = said(new, old)
        assert sorted(words.removeprefix("spec: Invalid value: ").split(", ")) == sorted(
            {".".join(path.split(".")[:2]) for path in FIXED}
        )

    @pytest.mark.parametrize("before", [{"status": {"attempt": 1, "phase": "Pending"}}, {}])
    def test_status_write_ignores_rules_of_spec(self, before: dict[str, Any]) -> None:
        """An API server writes spec or status; a rule that reads the status first reads nothing else then."""
        old = stored() | before
        new = change(old, "spec.securityProfile", "Restricted") | {"status": {"attempt": 1, "phase": "Running"}}
        assert refused(new, old) == []

    @pytest.mark.parametrize("path", FIXED)
    @pytest.mark.parametrize("status", [None, {}, {"attempt": 0}, {"phase": "Rejected"}])
    def test_refused_job_may_be_corrected_in_place(self, path: str, status: Any) -> None:
        old = stored() if status is None else stored() | {"status": status}
        assert refused(change(old, path, FIXED[path]), old) == []

    @pytest.mark.parametrize("path", MUTABLE)
    def test_running_job_accepts_live_changes(self, path: str) -> None:
        old = stored() | {"status": RAN}
        assert refused(change(old, path, MUTABLE[path]), old) == []

    @pytest.mark.parametrize("path", FIXED)
    def test_job_metadata_may_change_until_first_pod(self, path: str) -> None:
        old = stored() | {"status": {"attempt": 1}}
        field = path.split(".")[1]
        assert (refused(change(old, path, FIXED[path]), old) == []) == (field in KERNEL.list_fixed("run"))

    @pytest.mark.parametrize("path", FIXED | MUTABLE)
    @pytest.mark.parametrize("ran", [RAN, {"attempt": 1}])
    def test_ended_job_refuses_ineffective_changes(self, path: str, ran: dict[str, Any]) -> None:
        old = stored() | {"status": ran | {"completionTime": "2026-11-20T13:00:00Z"}}
        results = [str(error) for error in check_rules(change(old, path, (FIXED | MUTABLE)[path]), KERNEL, old)]
        if path in ("spec.ttlSecondsAfterFinished", "spec.cleanPodPolicy", "metadata.labels"):
            assert results == []
        else:
            field = ".".join(path.split(".")[:2])
            words = "can't be changed once the job has ended; delete the job and create it again"
            assert results == [f"spec: Invalid value: {field} {words}"]

    @pytest.mark.parametrize("stored_value", [None, "ddp-operator.dev/ddp-operator"])
    def test_manager_is_fixed_from_creation(self, stored_value: str | None) -> None:
        old = stored() if stored_value is None else change(stored(), "spec.managedBy", stored_value)
        [error] = check_rules(change(old, "spec.managedBy", "kueue.x-k8s.io/multikueue"), KERNEL, old)
        assert error.path == "spec.managedBy"
        assert check_rules(old, KERNEL, old) == []

    def test_every_field_is_tried(self) -> None:
        tried = {path.split(".")[1] for path in {**FIXED, **MUTABLE} if path.startswith("spec.")} | {"managedBy"}
        assert tried == {field.encode_name for field in msgspec.structs.fields(KERNEL.spec)}

    def test_service_uses_only_fixed_fields(self) -> None:
        """All attempts share it, and it is never patched: its fields must not change."""
        old = stored() | {"status": {"attempt": 1}}
        reports: set[str] = set()
        for path, value in [*FIXED.items(), *MUTABLE.items()]:
            new = change(old, path, value)
            if made_once(new) != made_once(old):
                reports.add(path)
                assert said(new, old) == ["spec: Invalid value: " + ".".join(path.split(".")[:2])]
        assert reports == {"spec.rendezvous.port", "spec.metrics.port"}
