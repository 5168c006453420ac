"""The pod fields that are honoured, ignored and refused, and their list in docs/local.md."""

import re
from typing import Any

import pytest

from ddp_cli.local.adapt import HONOURED, REFUSED, check_job, check_template, find_refusal
from tests.support import ROOT

DOCS = ROOT / "docs" / "local.md"


def check(container: dict[str, Any] | None = None, **spec: Any) -> dict[str, str]:
    trainer = {"name": "trainer", "command": ["python"], **(container or {})}
    template = {"spec": {"containers": [trainer, *spec.pop("others", [])], **spec}}
    return {
        finding.path: "refused" if finding.refusal else "warned about"
        for finding in check_template(template, "trainer")
    }


def find_section(title: str) -> str:
    """Return the text of a section of the page."""
    return DOCS.read_text().partition(f"\n## {title} fields of a pod\n")[2].partition("\n## ")[0]


def test_page_lists_every_field_that_is_honoured() -> None:
    listed = {name for name in re.findall(r"`(spec[.]\S+)`", find_section("Honoured")) if "resources" not in name}
    assert listed >= {prefix + name for prefix, names in HONOURED.items() for name in names.split()}
    split = [re.fullmatch(r"(.*[.])(\w+)", name) for name in listed]
    assert {find_refusal(match[1], match[2]) for match in split if match} - {None} == set()


def test_page_lists_every_field_that_is_refused_with_its_remedy() -> None:
    listed = dict(re.findall(r"^- `(\S+)`: (.*)$", find_section("Refused"), re.MULTILINE))
    assert listed.pop("spec.volumes[].csi") == find_refusal("spec.volumes[].", "csi")
    assert listed == REFUSED


def test_scheduling_and_network_give_note_only_if_set() -> None:
    defaults = {
        "scheduling": {"gang": "None", "placement": "Any"},
        "networkPolicy": {"enabled": False},
    }
    assert check_job(defaults) == check_job({}) == []
    asked = {"scheduling": {"gang": "Volcano"}, "networkPolicy": {"enabled": True}}
    assert [finding.path for finding in check_job(asked)] == ["spec.scheduling", "spec.networkPolicy"]


@pytest.mark.parametrize(
    ("container", "spec", "findings"),
    [
        ({}, {"volumes": [{"name": "v", "fromTheFuture": {"a": 1}}]}, {"spec.volumes[0].fromTheFuture": "refused"}),
        ({}, {"volumes": [{"name": "v", "csi": {"driver": "d"}}]}, {"spec.volumes[0].csi": "refused"}),
        ({"resources": {"claims": [{"name": "gpus"}]}}, {"resourceClaims": [{"name": "gpus"}]},
         {"spec.resourceClaims": "refused"}),
        ({"env": [{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}]}, {},
         {"spec.containers[0].env[0].valueFrom.resourceFieldRef": "refused"}),
        ({"image": "x"}, {}, {"spec.containers[0].image": "warned about"}),
        ({"resources": {"limits": {"cpu": "1"}}}, {}, {"spec.containers[0].resources.limits": "warned about"}),
        ({"env": [{"name": "GLOO_SOCKET_IFNAME", "value": "eth9"}, {"name": "A", "value": "1"}]}, {},
         {"spec.containers[0].env[GLOO_SOCKET_IFNAME]": "warned about"}),
        ({}, {"fromTheFuture": True}, {"spec.fromTheFuture": "warned about"}),
        ({}, {"others": [{"name": "helper", "image": "y"}], "initContainers": [{"name": "i"}]},
         {"spec.containers[1]": "warned about", "spec.initContainers": "warned about"}),
        ({"resources": {"limits": {"nvidia.com/gpu": "2"}}}, {}, {}),
        ({}, {"tolerations": [], "nodeSelector": {}, "affinity": None}, {}),
        ({"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
          "volumeMounts": [{"name": "v", "mountPath": "/v"}]}, {"volumes": [{"name": "v", "emptyDir": {}}]}, {}),
    ],
)  # fmt: skip
def test_field_is_honoured_ignored_or_refused(
    container: dict[str, Any], spec: dict[str, Any], findings: dict[str, str]
) -> None:
    assert check(container, **spec) == findings
