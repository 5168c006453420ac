"""The operator's pod has exactly the settings and rights that its program needs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from ddp_cli.client.validation import check_manifest
from ddp_operator.api.constants import (
    LABEL_JOB_NAME,
    LABEL_MANAGED_BY,
    MANAGED_BY,
)
from ddp_operator.api.status import Profile
from ddp_operator.features import FEATURES, SCHEMA
from ddp_operator.features.early_checks.template import PORT_NAMES
from ddp_operator.features.gangs.fields import PERMISSIONS as GANG_PERMISSIONS
from ddp_operator.features.network_policy.fields import COMPONENT_OPERATOR, LABEL_COMPONENT
from ddp_operator.features.profiles import ProfileSettings
from ddp_operator.features.profiles.defaults import read_job_defaults
from ddp_operator.kube.resources import group, plural
from ddp_operator.kube.startup_checks import (
    HOME_PERMISSIONS,
    NODE_PERMISSIONS,
    WORKER_PERMISSIONS,
    list_permissions,
    split_permission,
)
from ddp_operator.manager.settings import Settings
from tests.support import ROOT
from tests.support.chart import CI_FILES, Object, is_test, of_kind, read_values, render, render_texts, the

ci_files = pytest.mark.parametrize("path", CI_FILES, ids=lambda path: path.stem.removesuffix("-values"))


def container_of(objects: list[Object]) -> Object:
    """Return the operator's container."""
    (container,) = the(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(container)


def settings_of(objects: list[Object]) -> Settings:
    """Return the settings that the operator reads from its environment."""
    return Settings.from_env({e["name"]: e["value"] for e in container_of(objects)["env"] if "value" in e}, FEATURES)


def read_defaults(settings: Settings) -> Profile | None:
    own = settings.features["profiles"]
    assert isinstance(own, ProfileSettings)
    return read_job_defaults(own.job_defaults, SCHEMA)


class TestSettings:
    def test_defaults_are_operators_own(self) -> None:
        objects = render()
        settings = settings_of(objects)
        assert read_defaults(settings) is None
        assert asdict(settings.features["history"]) == {"history_image": container_of(objects)["image"]}
        assert replace(settings, features={}) == Settings(log_format="json")

    def test_defaults_of_jobs_arrive_in_operator(self) -> None:
        peer = {"namespaceSelector": {"matchLabels": {"a": "b"}}}
        policy = {"enabled": True, "egressCidrs": ["10.0.0.0/8"], "metricsFrom": [peer]}
        for source in ({"securityProfile": "Restricted"}, {"networkPolicy": policy}, {"history": {"url": "s3://a/b"}}):
            job_defaults = read_defaults(settings_of(render({"jobDefaults": source})))
            assert job_defaults is not None
            assert job_defaults.job == source

    def test_settings_of_chart_arrive_in_operator(self) -> None:
        values = {
            "namespaces": ["a", "b"], "port": 9090,
            "settings": {"workers": 3, "qps": 0.5, "burst": 100000, "callTimeout": 1.5, "progressInterval": 60,
                         "resyncInterval": 86400, "leaseSeconds": 30, "logFormat": "text", "logLevel": "error"},
        }  # fmt: skip
        expected = Settings(
            namespaces=("a", "b"), health_port=9090, workers=3, qps=0.5, burst=100000, call_timeout=1.5,
            progress_interval=60, resync_interval=86400, lease_seconds=30, log_format="text", log_level="error",
        )  # fmt: skip
        assert replace(settings_of(render(values)), features={}) == expected

    @pytest.mark.parametrize(
        ("endpoint", "port"), [("http://collector.monitoring:4318", 4318), ("https://collector.example/otlp", 443)]
    )
    def test_endpoint_of_traces_arrives_and_is_reachable(self, endpoint: str, port: int) -> None:
        enabled = {"networkPolicy": {"enabled": True}}
        closed = the(render(enabled), "NetworkPolicy")["spec"]["egress"]
        objects = render({"monitoring": {"tracing": {"endpoint": endpoint}}, **enabled})
        assert {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": endpoint} in container_of(objects)["env"]
        opened = [rule for rule in the(objects, "NetworkPolicy")["spec"]["egress"] if rule not in closed]
        assert opened == [{"ports": [{"port": port, "protocol": "TCP"}]}]


class TestSecurity:
    @ci_files
    def test_pods_fulfil_restricted_standard(self, path: Path) -> None:
        objects = render(read_values(path))
        pods = [the(objects, "Deployment")["spec"]["template"]["spec"], *(p["spec"] for p in of_kind(objects, "Pod"))]
        assert len(pods) == 2
        for pod in pods:
            shared = pod["securityContext"]
            assert shared["runAsNonRoot"] is True
            assert shared["runAsUser"] >= 1
            assert shared["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
            assert {key for volume in pod["volumes"] for key in volume} - {"name"} <= {"configMap", "emptyDir"}
            for container in pod["containers"]:
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                    "readOnlyRootFilesystem": True,
                }
                assert container["resources"]["requests"]
                assert container["resources"]["limits"]["memory"]

    @ci_files
    def test_roles_have_no_wildcard_and_read_no_secret(self, path: Path) -> None:
        objects = render(read_values(path))
        for role in of_kind(objects, "ClusterRole") + of_kind(objects, "Role"):
            for rule in role["rules"]:
                words = {word for key in ("apiGroups", "resources", "verbs") for word in rule[key]}
                assert not [word for word in words if "*" in word]
                assert "secrets" not in words or rule == {
                    "apiGroups": [""],
                    "resources": ["secrets"],
                    "verbs": ["create"],
                }
                assert words & {"escalate", "bind", "impersonate"} == set()

    def test_role_equals_permissions_checked_at_start(self) -> None:
        expected = checked(list_permissions(SCHEMA.shared_kinds))
        clusterwide = next(r for r in of_kind(render(), "ClusterRole") if r["metadata"]["name"] == "ddp-operator")
        assert granted(clusterwide) == expected
        roles = [r for r in of_kind(render({"namespaces": ["a", "b"]}), "Role") if not is_test(r)]
        *served, home = roles
        assert [role["metadata"]["namespace"] for role in served] == ["a", "b"]
        assert all(granted(role) == expected for role in served)
        assert granted(home) == checked(HOME_PERMISSIONS)

    def test_leases_of_nodes_are_read_by_operator_of_all_namespaces_only(self) -> None:
        (role,) = (r for r in of_kind(render(), "Role") if r["metadata"]["namespace"] == "kube-node-lease")
        assert granted(role) == checked(NODE_PERMISSIONS)
        (binding,) = (b for b in of_kind(render(), "RoleBinding") if b["metadata"]["namespace"] == "kube-node-lease")
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert binding["subjects"][0]["name"] == "ddp-operator"

    def test_only_worker_cluster_of_multikueue_may_adopt_workloads(self) -> None:
        clusterwide = next(r for r in of_kind(render(), "ClusterRole") if r["metadata"]["name"] == "ddp-operator")
        assert not checked(WORKER_PERMISSIONS) & granted(clusterwide)
        objects = render({"settings": {"multikueueWorker": True}})
        worker = next(r for r in of_kind(objects, "ClusterRole") if r["metadata"]["name"] == "ddp-operator")
        assert granted(worker) - granted(clusterwide) == checked(WORKER_PERMISSIONS)

    def test_gang_schedulers_add_only_their_groups(self) -> None:
        objects = render({"rbac": {"gangSchedulers": list(GANG_PERMISSIONS)}})
        clusterwide = next(r for r in of_kind(objects, "ClusterRole") if r["metadata"]["name"] == "ddp-operator")
        expected = set().union(*map(checked, GANG_PERMISSIONS.values()))
        assert granted(clusterwide) - checked(list_permissions(SCHEMA.shared_kinds)) == expected
        assert {resource for _, resource, _ in expected} == {"podgroups"}

    def test_drain_requests_add_rights_in_their_namespace_only(self) -> None:
        objects = render({"settings": {"drainRequests": "nvsentinel/drainrequests.v1alpha1.nvsentinel.nvidia.com"}})
        role = next(role for role in of_kind(objects, "Role") if role["metadata"]["namespace"] == "nvsentinel")
        group = "nvsentinel.nvidia.com"
        assert granted(role) == {(group, "drainrequests", "list"), (group, "drainrequests/status", "patch")}
        binding = next(item for item in of_kind(objects, "RoleBinding") if item["metadata"] == role["metadata"])
        assert binding["roleRef"]["name"] == role["metadata"]["name"]

    def test_service_account_is_bound(self) -> None:
        for values in ({}, {"serviceAccount": {"name": "x"}}, {"namespaces": ["a"]}):
            objects = render(values, namespace="system")
            kind = "RoleBinding" if values.get("namespaces") else "ClusterRoleBinding"
            account = the(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"]
            assert the(objects, "ServiceAccount")["metadata"]["name"] == account
            bindings = [result for result in of_kind(objects, kind) if not is_test(result)]
            assert bindings
            for binding in bindings:
                assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "system"}]

    def test_namespaced_release_has_no_cluster_scoped_object(self) -> None:
        values = read_values(next(path for path in CI_FILES if path.stem.startswith("namespaced")))
        assert not {result["kind"] for result in render(values)} & {
            "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"
        }  # fmt: skip


def checked(permissions: Mapping[str, Sequence[str]]) -> set[tuple[str, str, str]]:
    """Return group, resource and verb of all permissions that the operator checks at its start."""
    return {
        (group(kind), ":".join(filter(None, (f"{plural(kind)}/{sub}" if sub else plural(kind), name))), verb)
        for resource, verbs in permissions.items()
        for kind, sub, name in [split_permission(resource)]
        for verb in verbs
    }


def granted(role: Object) -> set[tuple[str, str, str]]:
    """Return group, resource and verb of all permissions of a role."""
    return {
        (in_group, ":".join((resource, *rule.get("resourceNames", ()))), verb)
        for rule in role["rules"]
        for in_group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


class TestSelectors:
    """A selector without a match fails silently, so each is compared with labels that exist."""

    @pytest.fixture
    def objects(self) -> list[Object]:
        files = {path.stem.removesuffix("-values"): path for path in CI_FILES}
        return render(read_values(files["monitoring"]) | read_values(files["locked-down"]))

    @pytest.fixture
    def training_pod(self) -> dict[str, Any]:
        children = check_manifest((ROOT / "deploy/samples/digits.yaml").read_text()).children
        (job,) = (child for child in children if child["kind"] == "Job")
        return dict(job["spec"]["template"])

    def test_operators_pod_is_selected(self, objects: list[Object]) -> None:
        labels = the(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
        selectors = [
            the(objects, "Deployment")["spec"]["selector"]["matchLabels"],
            the(objects, "Service")["spec"]["selector"],
            the(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
            the(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        ]
        # The last one lets the NetworkPolicies of jobs select the operator.
        selectors.append({LABEL_COMPONENT: COMPONENT_OPERATOR})
        assert all(selector.items() <= labels.items() for selector in selectors)
        (test,) = of_kind(objects, "Pod")
        assert not any(selector.items() <= test["metadata"]["labels"].items() for selector in selectors)

    def test_service_monitor_selects_service_and_its_port(self, objects: list[Object]) -> None:
        monitor = the(objects, "ServiceMonitor")["spec"]
        service = the(objects, "Service")
        assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert [port["name"] for port in service["spec"]["ports"]] == [e["port"] for e in monitor["endpoints"]]

    def test_pod_monitor_and_policy_select_training_pods(
        self, objects: list[Object], training_pod: dict[str, Any]
    ) -> None:
        labels = training_pod["metadata"]["labels"]
        assert labels[LABEL_MANAGED_BY] == MANAGED_BY
        policy = the(objects, "NetworkPolicy")["spec"]["egress"][-1]["to"][0]["podSelector"]
        for selector in (the(objects, "PodMonitor")["spec"]["selector"], policy):
            assert selector["matchLabels"].items() <= labels.items()
            assert [entry["key"] for entry in selector["matchExpressions"]] == [LABEL_JOB_NAME]
            assert LABEL_JOB_NAME in labels
        (endpoint,) = the(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in PORT_NAMES
        ports = training_pod["spec"]["containers"][0]["ports"]
        assert endpoint["port"] in {port["name"] for port in ports}
        for relabeling in endpoint["relabelings"]:
            (source,) = relabeling["sourceLabels"]
            meta = {"__meta_kubernetes_pod_label_" + re.sub(r"[^a-zA-Z0-9_]", "_", label) for label in labels}
            assert source in meta

    @pytest.mark.parametrize(
        ("name", "kept"),
        [
            ("ddp_step", True),
            ("ddp_launcher_phase", True),
            ("ddp_operator_queue_depth", False),
            ("ddp:job_step:max", False),
            ("kube_pod_status_phase", False),
            ("ALERTS", False),
        ],
    )
    def test_pod_monitor_keeps_series_of_training_only(self, objects: list[Object], name: str, kept: bool) -> None:
        (endpoint,) = the(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
        rules = endpoint["metricRelabelings"]
        passed = [(rule["action"] == "keep") == bool(re.fullmatch(rule["regex"], name)) for rule in rules]
        assert all(passed) == kept


class TestNotes:
    @ci_files
    def test_notes_name_next_two_commands(self, path: Path) -> None:
        notes = render_texts(read_values(path), namespace="system")["NOTES.txt"]
        commands = re.findall(r"^  ((?:kubectl|sed) .*)$", notes, flags=re.MULTILINE)
        assert len(commands) == 2
        name = the(render(read_values(path)), "Deployment")["metadata"]["name"]
        assert commands[0] == f"kubectl -n system rollout status deployment/{name}"
        sample = re.search(r"deploy/samples/\S+", commands[1])
        assert sample
        assert (ROOT / sample[0]).is_file()
        registry = read_values(path).get("image", {}).get("registry", "localhost")
        assert ("localhost" in commands[1]) == (registry != "localhost"), "a sample's image is where the operator's is"
        foreign = path.stem == "foreign-account-values"
        assert ("WARNING: crds.keep=false" in notes) == foreign
        assert ("paused" in notes) == foreign


class TestJobOfTheHelmTest:
    def test_job_is_created_in_served_namespace(self) -> None:
        for namespaces, expected in (([], "system"), (["a", "b"], "a"), (["a", "system"], "system")):
            objects = render({"namespaces": namespaces}, namespace="system")
            assert {result["metadata"]["namespace"] for result in objects if is_test(result)} == {expected}
