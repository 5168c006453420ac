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
    listed = dict(re.findall(r"^\| `(\S+)` \| (.*) \|$", find_section("Refused"), re.MULTILINE))
    assert listed.pop("spec.volumes[].csi") == find_refusal("spec.volumes[].", "csi")
    assert listed == REFUSED


def test_unknown_kind_of_volume_is_refused() -> None:
    assert check(volumes=[{"name": "v", "fromTheFuture": {"a": 1}}]) == {"spec.volumes[0].fromTheFuture": "refused"}


def test_devices_that_are_claimed_are_refused() -> None:
    claimed = {"resources": {"claims": [{"name": "gpus"}]}}
    assert check(claimed, resourceClaims=[{"name": "gpus"}]) == {"spec.resourceClaims": "refused"}


def test_supported_field_gives_no_note() -> None:
    volume = {"name": "v", "emptyDir": {}}
    env = [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    assert check({"env": env, "volumeMounts": [{"name": "v", "mountPath": "/v"}]}, volumes=[volume]) == {}


@pytest.mark.parametrize(
    ("container", "path"),
    [
        ({"image": "x"}, "spec.containers[0].image"),
        ({"resources": {"limits": {"cpu": "1"}}}, "spec.containers[0].resources.limits"),
        ({"readinessProbe": {"exec": {}}}, "spec.containers[0].readinessProbe"),
    ],
)
def test_ineffective_field_gives_warning(container: dict[str, Any], path: str) -> None:
    assert check(container) == {path: "warned about"}


def test_gpus_alone_are_no_reason_for_warning() -> None:
    assert check({"resources": {"limits": {"nvidia.com/gpu": "2"}}}) == {}


def test_empty_values_give_no_note() -> None:
    assert check(tolerations=[], nodeSelector={}, affinity=None) == {}


def test_sidecar_and_init_containers_are_warned_about() -> None:
    result = check(others=[{"name": "helper", "image": "y"}], initContainers=[{"name": "i"}])
    assert result == {"spec.containers[1]": "warned about", "spec.initContainers": "warned about"}


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"volumes": [{"name": "v", "nfs": {"server": "s"}}]}, "spec.volumes[0].nfs"),
        ({"volumes": [{"name": "v", "csi": {"driver": "d"}}]}, "spec.volumes[0].csi"),
        ({"resourceClaims": [{"name": "c"}]}, "spec.resourceClaims"),
    ],
)
def test_unsupported_field_is_refused(spec: dict[str, Any], path: str) -> None:
    assert check(**spec) == {path: "refused"}


def test_resource_field_references_are_refused() -> None:
    env = [{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}]
    assert check({"env": env}) == {"spec.containers[0].env[0].valueFrom.resourceFieldRef": "refused"}


def test_unknown_field_gives_warning() -> None:
    assert check(fromTheFuture=True) == {"spec.fromTheFuture": "warned about"}


def test_scheduling_and_network_give_note_only_if_set() -> None:
    defaults = {
        "scheduling": {"gang": "None", "placement": "Any"},
        "networkPolicy": {"enabled": False},
        "network": {"profile": "auto", "require": False},
    }
    assert check_job(defaults) == check_job({}) == []
    asked = {"scheduling": {"gang": "Volcano"}, "networkPolicy": {"enabled": True}, "network": {"require": True}}
    assert [finding.path for finding in check_job(asked)] == ["spec.scheduling", "spec.networkPolicy", "spec.network"]


def test_interface_variable_is_listed_by_its_name() -> None:
    env = [{"name": "GLOO_SOCKET_IFNAME", "value": "eth9"}, {"name": "A", "value": "1"}]
    assert check({"env": env}) == {"spec.containers[0].env[GLOO_SOCKET_IFNAME]": "warned about"}
