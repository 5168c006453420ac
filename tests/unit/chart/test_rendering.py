"""For all values, Helm renders the chart to objects that Kubernetes accepts."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from charts.tooling.values import Value
from charts.tooling.values import read_values as read_documented
from ddp_cli.client.validation import check_manifest
from ddp_operator import __version__
from tests.support import ROOT
from tests.support.chart import CHART, CI_FILES, is_test, of_kind, read_values, render, render_texts, the

KEPT_VALUES = sorted((ROOT / "tests/golden/chart/values").glob("*.yaml"))
KUBERNETES = ("1.31", "1.36")
ci_files = pytest.mark.parametrize("path", CI_FILES, ids=lambda path: path.stem.removesuffix("-values"))


@ci_files
def test_every_object_is_valid(path: Path) -> None:
    objects = render(read_values(path))
    assert len(objects) >= 5
    for result in objects:
        if result["apiVersion"] == "monitoring.coreos.com/v1":
            continue  # the tests of their selectors and rules read them
        for version in KUBERNETES:
            kubernetes_validate.validate(result, version, strict=True)


@ci_files
def test_names_are_unique_and_objects_have_owner_labels(path: Path) -> None:
    objects = render(read_values(path), namespace="system")
    keys = [(item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]) for item in objects]
    assert len(set(keys)) == len(keys)
    cluster_wide = {"CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding"}
    for result in objects:
        labels = result["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "ddp-operator"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert ("namespace" in result["metadata"]) == (result["kind"] not in cluster_wide), result


@ci_files
def test_lint_has_no_complaint(path: Path) -> None:
    report = helm_python.lint(CHART, read_values(path), kube_version="1.31.0")
    assert report["errors"] == []
    assert [message["error"] for message in report["messages"]] == ["icon is recommended"]


def test_defaults_are_golden_file(golden: Callable[[str, str], None]) -> None:
    texts = render_texts()
    parts = [
        f"# {path}\n{text.strip()}\n"
        for path, text in sorted(texts.items())
        if text.strip() and path != "crd.yaml" and not path.startswith("tests/")
    ]
    golden("chart/defaults.yaml", "---\n".join(parts))


def test_definition_equals_generated_one() -> None:
    made = {crd["metadata"]["name"]: crd["spec"] for crd in of_kind(render(), "CustomResourceDefinition")}
    kept = [yaml.safe_load(path.read_text()) for path in (ROOT / "deploy/crds").iterdir()]
    assert made == {crd["metadata"]["name"]: crd["spec"] for crd in kept}


def test_definition_is_kept_by_default() -> None:
    kept, *_ = of_kind(render(), "CustomResourceDefinition")
    assert kept["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    dropped, *_ = of_kind(render({"crds": {"keep": False}}), "CustomResourceDefinition")
    assert "annotations" not in dropped["metadata"]
    assert of_kind(render({"crds": {"enabled": False}}), "CustomResourceDefinition") == []


class TestSchema:
    # A chart above this one may add keys to `global`.
    GROUPS = [(), *(value.path for value in read_documented() if value.is_group and value.path != ("global",))]

    @pytest.mark.parametrize("group", GROUPS, ids=lambda group: ".".join(group) or "top")
    def test_unknown_value_is_refused_by_its_name(self, group: tuple[str, ...]) -> None:
        values: dict[str, Any] = {"mistyped": 1}
        for name in reversed(group):
            values = {name: values}
        with pytest.raises(helm_python.HelmValuesError, match="additional properties 'mistyped' not allowed") as caught:
            render(values)
        assert f"at '{''.join('/' + name for name in group)}'" in str(caught.value)

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"replicas": -1}, "/replicas': minimum: got -1, want 0"),
            ({"namespaces": ["Team"]}, "/namespaces/0'"),
            ({"image": {"digest": "latest"}}, "/image/digest'"),
            ({"settings": {"workers": 0}}, "/settings/workers'"),
            ({"settings": {"logLevel": "loud"}}, "/settings/logLevel'"),
            ({"imagePullSecrets": ["plain"]}, "/imagePullSecrets/0'"),
            ({"crds": {"keep": "yes"}}, "/crds/keep'"),
            ({"resources": {"request": {}}}, "/resources'"),
            ({"resources": {"limits": {"memory": "1Gib"}}}, "/resources/limits/memory'"),
            ({"resources": {"requests": {"cpu": "one"}}}, "/resources/requests/cpu'"),
            ({"runAsUser": "root"}, "/runAsUser'"),
            ({"runAsUser": 0}, "/runAsUser'"),
        ],
    )
    def test_bad_value_is_refused_at_its_place(self, values: dict[str, Any], message: str) -> None:
        with pytest.raises(helm_python.HelmValuesError, match=re.escape(message)):
            render(values)

    def test_missing_account_is_named(self) -> None:
        with pytest.raises(helm_python.HelmRenderError, match=r"serviceAccount\.name: name an existing account"):
            render({"serviceAccount": {"create": False}})

    def test_value_without_comment_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"^b\.d: has no comment"):
            read_documented("# about a\na: 1\nb:\n  # about c\n  c: 1\n\n  d: 2\n")


def with_value(values: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return values with this additional one."""
    name, *rest = path
    return {**values, name: with_value(values.get(name, {}), tuple(rest), value) if rest else value}


class TestNull:
    """Helm removes the default of a null value, and templates would fail on the missing value."""

    EVERYTHING: Any = {
        "monitoring": {
            name: {"enabled": True} for name in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
        },
        "podDisruptionBudget": {"enabled": True},
        "networkPolicy": {"enabled": True},
    }

    @pytest.mark.parametrize(
        "value",
        [value for value in read_documented() if "null" not in value.keywords.get("type", ())],
        ids=lambda value: ".".join(value.path),
    )
    def test_value_is_default_or_empty_map(self, value: Value) -> None:
        default = value.default
        if isinstance(default, dict) and not value.is_group and not value.keywords.get("minProperties"):
            default = dict.fromkeys(default)  # without one of its keys
        assert render(with_value(self.EVERYTHING, value.path, None)) == render(
            with_value(self.EVERYTHING, value.path, default)
        )

    def test_map_that_users_fill_is_not_filled_again(self) -> None:
        labels = {"grafana_dashboard": None, "ours": "yes"}
        result = render({"monitoring": {"dashboards": {"enabled": True, "labels": labels}}, "resources": None})
        boards = [item for item in of_kind(result, "ConfigMap") if "-dashboard-" in item["metadata"]["name"]]
        assert boards
        for board in boards:
            assert board["metadata"]["labels"]["ours"] == "yes"
            assert "grafana_dashboard" not in board["metadata"]["labels"]
        (container,) = the(result, "Deployment")["spec"]["template"]["spec"]["containers"]
        assert container["resources"] == {}


class TestOlderValues:
    """`helm upgrade --reuse-values` passes an older release's values to the new chart, without the new defaults."""

    def test_those_of_this_version_are_kept(self, golden: Callable[[str, str], None]) -> None:
        """The file of a released version never changes."""
        golden(f"chart/values/{__version__}.yaml", yaml.safe_dump(read_values(CHART / "values.yaml"), sort_keys=False))

    @pytest.mark.parametrize("path", KEPT_VALUES, ids=lambda path: path.stem)
    def test_chart_renders_with_them(self, path: Path) -> None:
        values = old = read_values(path)
        for known in read_documented():
            above: Any = old
            for name in known.path[:-1]:
                above = above and above.get(name)
            if above is not None and known.path[-1] not in above:
                values = with_value(values, known.path, None)  # removes the default
        kinds = {result["kind"] for result in render(values)}
        assert {"Deployment", "ClusterRole", "CustomResourceDefinition", "ServiceAccount"} <= kinds


class TestChartReadme:
    def test_readme_has_row_for_every_value(self) -> None:
        rows = re.findall(r"^\| `([\w.]+)` \|", (CHART / "README.md").read_text(), flags=re.MULTILINE)
        assert rows == [".".join(value.path) for value in read_documented() if not value.is_group]

    def test_version_is_that_of_package(self) -> None:
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        assert (chart["version"], chart["appVersion"]) == (__version__, __version__)

    def test_package_contains_no_tooling(self, tmp_path: Path) -> None:
        archive = helm_python.package(CHART, destination=tmp_path)
        listed = subprocess.run(["tar", "-tzf", archive], capture_output=True, text=True, check=True).stdout.split()
        assert "ddp-operator/files/crd.yaml" in listed
        assert "ddp-operator/files/helm_test.py" in listed
        assert [name for name in listed if "/ci/" in name or "/tooling/" in name] == []


class TestRenderedNames:
    @pytest.mark.parametrize(
        ("release", "values", "name"),
        [
            ("ddp-operator", {}, "ddp-operator"),
            ("prod", {}, "prod-ddp-operator"),
            ("my-ddp-operator-2", {}, "my-ddp-operator-2"),
            ("prod", {"nameOverride": "train"}, "prod-train"),
            ("prod", {"fullnameOverride": "x"}, "x"),
            ("r" * 53, {}, "r" * 50),
        ],
    )
    def test_follow_release(self, release: str, values: dict[str, Any], name: str) -> None:
        objects = render(values, name=release)
        (deployment,) = of_kind(objects, "Deployment")
        assert deployment["metadata"]["name"] == name
        for result in objects:
            assert len(result["metadata"]["name"]) <= 63
            assert result["metadata"]["name"].startswith(name[:40]) or result["kind"] == "CustomResourceDefinition"
        assert check_manifest(submitted(objects)).children


def submitted(objects: list[dict[str, Any]]) -> str:
    """Return the job that `helm test` submits."""
    (scripts,) = (result for result in of_kind(objects, "ConfigMap") if is_test(result))
    return str(scripts["data"]["job.json"])


@pytest.mark.parametrize("own", [[], [{"key": "dedicated", "operator": "Exists"}]], ids=["default", "own"])
def test_operator_leaves_lost_node_after_30_seconds(own: list[dict[str, str]]) -> None:
    pod = the(render({"tolerations": own}), "Deployment")["spec"]["template"]["spec"]
    kept = [toleration for toleration in pod["tolerations"] if "tolerationSeconds" not in toleration]
    lost = {
        toleration["key"]: toleration["tolerationSeconds"]
        for toleration in pod["tolerations"]
        if toleration not in kept
    }
    assert lost == {"node.kubernetes.io/not-ready": 30, "node.kubernetes.io/unreachable": 30}
    assert kept == own
