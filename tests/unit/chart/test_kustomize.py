"""The plain manifests: kustomize's result equals the chart's objects."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.support import ROOT
from tests.support.chart import Object, of_kind, read_objects, render

from .test_operator_pod import granted

DEPLOY = ROOT / "deploy"
FOLDERS = sorted(path.parent for path in DEPLOY.rglob("kustomization.yaml"))
INSTALLABLE = ("manifests", "overlays/ha", "overlays/monitoring", "overlays/namespaced")
folders = pytest.mark.parametrize("folder", INSTALLABLE)


def build(folder: str) -> list[Object]:
    """Return the result of `kubectl kustomize` for a folder of deploy/."""
    beside = Path(os.environ.get("KUBEBUILDER_ASSETS", "")) / "kubectl"
    for command in ([shutil.which("kustomize"), "build"], [shutil.which("kubectl") or beside, "kustomize"]):
        if command[0] and os.access(command[0], os.X_OK):
            ran = subprocess.run([*command, DEPLOY / folder], capture_output=True, text=True, timeout=300)
            assert ran.returncode == 0, ran.stderr
            return read_objects(ran.stdout)
    pytest.skip("neither kustomize nor kubectl is installed (nor is kubectl in $KUBEBUILDER_ASSETS)")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_everything_that_is_named_exists(folder: Path) -> None:
    content = yaml.safe_load((folder / "kustomization.yaml").read_text())
    files = [entry.partition("=")[2] for made in content.get("configMapGenerator", []) for entry in made["files"]]
    for name in [*content.get("resources", []), *content.get("components", []), *files]:
        path = folder / name
        assert path.is_file() or (path / "kustomization.yaml").is_file(), name
        # kustomize refuses a folder that contains the one in which it is named.
        assert not folder.resolve().is_relative_to(path.resolve()), name


@folders
def test_every_object_is_valid_and_in_namespace(folder: str) -> None:
    objects = build(folder)
    (namespace,) = of_kind(objects, "Namespace")
    for result in objects:
        if result["apiVersion"] != "monitoring.coreos.com/v1":
            kubernetes_validate.validate(result, "1.31", strict=True)
        reads_nodes = result["metadata"]["name"] == "ddp-operator-nodes"
        expected = "kube-node-lease" if reads_nodes else namespace["metadata"]["name"]
        assert result["metadata"].get("namespace") in (None, expected)
    for binding in of_kind(objects, "ClusterRoleBinding") + of_kind(objects, "RoleBinding"):
        assert [subject["namespace"] for subject in binding["subjects"]] == [namespace["metadata"]["name"]]


def test_kustomize_base_equals_rendered_chart() -> None:
    def without_labels(resource: Object) -> Object:
        return {key: value for key, value in resource.items() if key != "metadata"}

    installed = {
        (result["kind"], result["metadata"]["name"]): without_labels(result)
        for result in render(name="ddp-operator", namespace="ddp-operator")
        if "helm.sh/hook" not in (result["metadata"].get("annotations") or {}) and result["kind"] != "Deployment"
    }
    built = {(result["kind"], result["metadata"]["name"]): without_labels(result) for result in build("manifests")}
    (deployment,) = (result for (kind, _), result in built.items() if kind == "Deployment")
    (from_chart,) = of_kind(render(name="ddp-operator", namespace="ddp-operator"), "Deployment")
    assert deployment["spec"]["template"]["spec"] == from_chart["spec"]["template"]["spec"]
    assert {key: built.get(key) for key in installed} == installed


def test_namespaced_overlay_has_same_rules_in_role() -> None:
    objects = build("overlays/namespaced")
    role, home = of_kind(objects, "Role")
    assert home["metadata"]["name"] == "ddp-operator-leader"
    (whole,) = (
        result for result in of_kind(build("manifests"), "ClusterRole") if result["metadata"]["name"] == "ddp-operator"
    )
    assert granted(role) == granted(whole)
    binding, _ = of_kind(objects, "RoleBinding")
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "ddp-operator"}
    assert of_kind(objects, "ClusterRoleBinding") == []
    (deployment,) = of_kind(objects, "Deployment")
    env = {e["name"]: e.get("value") for e in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert env["DDP_OPERATOR_NAMESPACES"] == role["metadata"]["namespace"]


@pytest.mark.parametrize("folder", ["manifests", "overlays/ha"])
def test_leases_of_nodes_are_readable_in_their_namespace(folder: str) -> None:
    objects = build(folder)
    for kind in ("Role", "RoleBinding"):
        (item,) = (item for item in of_kind(objects, kind) if item["metadata"]["name"] == "ddp-operator-nodes")
        assert item["metadata"]["namespace"] == "kube-node-lease"
    assert item["subjects"][0]["namespace"] == "ddp-operator"


def test_ha_overlay_has_two_pods_and_budget() -> None:
    objects = build("overlays/ha")
    (deployment,) = of_kind(objects, "Deployment")
    assert deployment["spec"]["replicas"] == 2
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert budget["spec"]["maxUnavailable"] == 1


def test_monitoring_overlay_adds_monitors_rules_and_dashboards() -> None:
    objects = build("overlays/monitoring")
    kinds = {result["kind"] for result in objects}
    assert {"ServiceMonitor", "PodMonitor", "PrometheusRule"} <= kinds
    dashboards = of_kind(objects, "ConfigMap")
    assert len(dashboards) == len(list((DEPLOY / "monitoring/dashboards").glob("*.json")))
    assert all(dashboard["metadata"]["labels"]["grafana_dashboard"] == "1" for dashboard in dashboards)
