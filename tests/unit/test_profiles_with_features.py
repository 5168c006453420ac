"""Profiles and the operator's defaults with the fields of other features."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.job_file import find_among, parse_manifest
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features import SCHEMA, claims
from ddp_operator.features.profiles.defaults import read_job_defaults
from ddp_operator.manifests.children import build_children
from tests.support.builders import job, profile, resource, template, trainer
from tests.support.decisions import present
from tests.support.fabrics import FABRICS, complete, read_fabric
from tests.support.fake_cluster import ReconcilerHarness
from tests.unit.ddp_operator.features.profiles.test_service import harness_of, start

GPUS = {"limits": {"nvidia.com/gpu": "8", "memory": "512Gi"}}


@pytest.mark.parametrize(
    ("field", "needy", "needed"),
    [
        (
            "recovery.nodeHealth",
            {"recovery": {"nodeHealth": {"action": "Report"}}},
            {"recovery": {"nodeHealth": {"taints": ["x"]}}},
        ),
        (
            "preflight.minPairMegabytesPerSecond",
            {"preflight": {"minPairMegabytesPerSecond": 9}},
            {"preflight": {"checks": ["pairs"]}},
        ),
        (
            "preflight.minMegabytesPerSecond",
            {"preflight": {"minMegabytesPerSecond": 9}},
            {"preflight": {"checks": ["allreduce"]}},
        ),
        ("scheduling.queue", {"scheduling": {"queue": "q"}}, {"scheduling": {"gang": "Volcano"}}),
        (
            "networkPolicy.egressCidrs",
            {"networkPolicy": {"egressCidrs": ["10.0.0.0/8"]}},
            {"networkPolicy": {"enabled": True}},
        ),
        (
            "tracking",
            {"tracking": {"runId": "r"}},
            {"tracking": {"mlflow": {"trackingUri": "https://mlflow.example", "experiment": "e"}}},
        ),
    ],
)
def test_requirement_may_be_met_by_profile(field: str, needy: dict[str, Any], needed: dict[str, Any]) -> None:
    text = json.dumps(resource(profileRef={"name": "gpu"}, **needy))
    manifest = parse_manifest(text, SCHEMA, profiles=find_among([profile(needed)]))
    group = field.split(".")[0]
    assert {**needy.get(group, {}), **needed.get(group, {})}.keys() <= manifest.completed[group].keys()
    with pytest.raises(InvalidManifest, match=f"^spec.{field}: "):
        parse_manifest(text, SCHEMA, profiles=find_among([profile({})]))


def test_default_history_of_operator_needs_url() -> None:
    with pytest.raises(InvalidManifest, match=r"^spec\.history: needs a place"):
        read_job_defaults({"history": {"url": None}}, SCHEMA)
    with pytest.raises(InvalidManifest, match=r"^spec\.history"):
        read_job_defaults({"history": {"secretRef": {"name": "keys"}}}, SCHEMA)
    assert read_job_defaults({"history": {}}, SCHEMA) is None
    defaults = present(read_job_defaults({"history": {"url": "s3://a/b"}}, SCHEMA))
    assert defaults.job == {"history": {"url": "s3://a/b"}}


@pytest.mark.parametrize("name", FABRICS)
def test_job_gets_fields_of_fabric(name: str) -> None:
    spec = complete(name, template=template(trainer(name="main", resources=GPUS)))
    made = build_children(job(nodes=2, **spec), attempt=1, nodes=2)
    pod = next(child for child in made if child["kind"] == "Job")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    added = read_fabric(name)["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == GPUS["limits"] | added.get("resources", {}).get("limits", {})
    assert {item["name"] for item in added.get("env", ())} <= {item["name"] for item in container["env"]}


def test_huge_pages_of_fabric_need_cpu_or_memory_beside_them() -> None:
    bare = template(trainer(resources={"limits": {"nvidia.com/gpu": "8"}}))
    with pytest.raises(InvalidManifest, match=r"limits\[hugepages-2Mi\]: Kubernetes allows huge pages only together"):
        build_children(job(nodes=2, **complete("efa", template=bare)), attempt=1, nodes=2)


async def test_claim_of_profile_is_first_jobs_alone() -> None:
    harness = harness_of({"checkpoint": {"path": "/c", "claimName": "c"}}, template=template())
    await harness.settle()
    second = resource("second", template=template(), checkpoint={"path": "/c", "claimName": "c"})
    later = start(ReconcilerHarness(second))
    later.hooks = Hooks((*later.hooks.features, claims.FEATURE), later.hooks.services)
    later.restart_operator()
    assert harness.raw is not None
    later.cluster.add(harness.raw)
    await later.settle()
    assert later.status.reason == "ClaimInUse"
