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


ROWS = re.findall(
    r"^\| `(\S+[.])([a-z]\w+)` \| (honoured|warned about|refused) \| (.*) \|$", DOCS.read_text(), re.MULTILINE
)
# The last table groups the fields with a warning by their reason.
IGNORED = DOCS.read_text().partition("\n## Ignored fields of a pod\n")[2]
ROWS += [(prefix, name, "warned about", "") for prefix, name in re.findall(r"`(\S+[.])([a-z]\w+)`", IGNORED)]

OF_THE_JOB = {("spec.", name) for name in ("scheduling", "networkPolicy", "network", "code", "inputs", "profileRef")}


@pytest.mark.parametrize(("prefix", "name", "support", "note"), [row for row in ROWS if row[0] != "metadata."])
def test_documentation_lists_effect_of_field(prefix: str, name: str, support: str, note: str) -> None:
    if (prefix, name) in OF_THE_JOB:
        return
    assert find_refusal(prefix, name) == {"honoured": None, "warned about": "", "refused": note}[support]


def test_documentation_names_every_field_once() -> None:
    documented = [prefix + name for prefix, name, _, _ in ROWS]
    assert sorted(documented) == sorted(set(documented))
    honoured = {prefix + name for prefix, names in HONOURED.items() for name in names.split()}
    assert honoured | {*REFUSED} <= {*documented}


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
