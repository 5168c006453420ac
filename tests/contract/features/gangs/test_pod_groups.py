"""The PodGroup of a native gang against the published schemas of Kubernetes 1.35 to 1.37."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest

from ddp_operator.features.gangs.pod_groups import list_versions
from ddp_operator.manifests.children import build_children
from tests.support.builders import job, template

SERVED = {"1.35": [], "1.36": ["v1alpha2"], "1.37": ["v1beta1", "v1alpha3"]}
FIELDS = {"gangTopology": "example.com/rack", "sharedClaims": ["fabric", "device"]}
ENTRIES = [
    {"name": "fabric", "resourceClaimTemplateName": "channel"},
    {"name": "device", "resourceClaimName": "one"},
    {"name": "own", "resourceClaimTemplateName": "gpu"},
]


def build(**scheduling: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the PodGroup and the Job of a native gang."""
    made = template(resourceClaims=ENTRIES, priorityClassName="high")
    spec = {"scheduling": {"gang": "Native", **FIELDS, **scheduling}, "template": made}
    group, owner = build_children(job(**spec), attempt=1, nodes=2)[-2:]
    return group, owner


def version_of(manifest: Any) -> str:
    return str(manifest["apiVersion"]).rpartition("/")[2]


@pytest.mark.parametrize("mode", ["All", "Single"])
@pytest.mark.parametrize("kubernetes", ["1.36", "1.37"])
def test_first_served_version_is_valid_and_has_all_fields(kubernetes: str, mode: str) -> None:
    group, owner = build(disruptionMode=mode)
    versions = {version_of(manifest): manifest for manifest in list_versions(group)}
    for served in SERVED[kubernetes]:
        kubernetes_validate.validate(versions[served], kubernetes, strict=True)
        assert versions[served]["spec"].keys() == group["spec"].keys()
    kubernetes_validate.validate(owner, kubernetes, strict=True)


@pytest.mark.parametrize("kubernetes", SERVED)
def test_tried_versions_are_those_that_kubernetes_has(kubernetes: str) -> None:
    group, _ = build()
    known = []
    for manifest in list_versions(group):
        try:
            kubernetes_validate.validate(manifest, kubernetes, strict=True)
        except kubernetes_validate.utils.SchemaNotFoundError:
            continue
        known.append(version_of(manifest))
    assert known == SERVED[kubernetes]


def test_kubernetes_without_pod_groups_knows_no_group_of_pods() -> None:
    _, owner = build()
    with pytest.raises(kubernetes_validate.ValidationError, match="schedulingGroup"):
        kubernetes_validate.validate(owner, "1.35", strict=True)


def test_mode_in_another_versions_form_is_invalid() -> None:
    newest, *_, oldest = list_versions(build(disruptionMode="All")[0])
    swapped = {**oldest, "spec": newest["spec"]}
    with pytest.raises(kubernetes_validate.ValidationError, match="disruptionMode"):
        kubernetes_validate.validate(swapped, "1.36", strict=True)
