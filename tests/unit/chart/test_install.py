"""The chart on a real API server: installed, used by the operator under its own account, upgraded, uninstalled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from ddp_operator.manager.settings import Settings
from tests.support import ROOT
from tests.support.chart import CHART, CI_FILES, is_test, of_kind, read_values, render
from tests.support.control_plane import ControlPlane
from tests.support.running_operator import RunningOperator

from .test_rendering import submitted

pytestmark = pytest.mark.apiserver

NAMESPACE = "ddp-operator"
VALUES = {path.stem.removesuffix("-values"): read_values(path) for path in CI_FILES}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane without any objects of this project."""
    with ControlPlane(tmp_path_factory.mktemp("chart-plane")) as control_plane:
        yield control_plane


def helm(plane: ControlPlane, namespace: str = NAMESPACE) -> helm_python.Config:
    """Helm for one namespace."""
    return helm_python.Config(kubeconfig_path=plane.admin, namespace=namespace)


def get(plane: ControlPlane, *arguments: str) -> Any:
    """Return the objects that `kubectl get` finds."""
    return json.loads(plane.kubectl("get", *arguments, "-o", "json").stdout)


def until(probe: Callable[[], Any], event: str) -> Any:
    """Wait until ``probe()`` is true."""
    deadline = time.monotonic() + 300
    while not (result := probe()):
        assert time.monotonic() < deadline, f"never happened: {event}"
        time.sleep(0.1)
    return result


def operator(plane: ControlPlane, namespace: str, account: str, **settings: Any) -> RunningOperator:
    """Start the operator as the pod of the release would run, by the account's own token."""
    kubeconfig = plane.account(namespace, account)
    return RunningOperator(Settings(kubeconfig=str(kubeconfig), health_port=0, **settings)).start()


def submit(plane: ControlPlane, namespace: str) -> None:
    """Apply the first sample."""
    plane.kubectl("apply", "-n", namespace, "-f", str(ROOT / "deploy/samples/digits.yaml"))


def children(plane: ControlPlane, namespace: str) -> list[str]:
    """Return the UIDs of the Jobs of the sample."""
    result = get(plane, "jobs", "-n", namespace, "-l", "ddp-operator.dev/job-name=digits")
    return [item["metadata"]["uid"] for item in result["items"]]


def launchers(plane: ControlPlane) -> list[Any]:
    """Return the launchers of the namespace ``default``."""
    items: list[Any] = get(plane, "configmaps", "-n", "default", "-l", "ddp-operator.dev/job-name=")["items"]
    return items


def test_chart_installs_upgrades_and_uninstalls(plane: ControlPlane) -> None:
    with helm(plane) as client:
        client.install(CHART, "ddp-operator", {}, create_namespace=True, timeout=300)
        assert [release["name"] for release in client.list()] == ["ddp-operator"]
        plane.kubectl("wait", "--for=condition=Established", "crd/ddptrainingjobs.ddp-operator.dev")

        with operator(plane, NAMESPACE, "ddp-operator"):
            submit(plane, "default")
            (uid,) = until(lambda: children(plane, "default"), "the operator creates the Job")

            changed = VALUES["locked-down"] | {"replicas": 0}
            client.upgrade(CHART, "ddp-operator", changed, timeout=300)
            (deployment,) = get(plane, "deployments", "-n", NAMESPACE)["items"]
            assert deployment["spec"]["replicas"] == 0
            assert get(plane, "networkpolicies", "-n", NAMESPACE)["items"]
            assert children(plane, "default") == [uid]

            # Values of an older release remain valid, and the refusal of a removed one contains its name.
            client.upgrade(CHART, "ddp-operator", {"settings": {"logLevel": "debug"}}, reuse_values=True, timeout=300)
            (deployment,) = get(plane, "deployments", "-n", NAMESPACE)["items"]
            env = {e["name"]: e.get("value") for e in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
            assert (env["DDP_OPERATOR_LOG_LEVEL"], env["DDP_OPERATOR_WORKERS"]) == ("debug", "64")
            with pytest.raises(helm_python.HelmError, match="'formerly' not allowed"):
                client.upgrade(CHART, "ddp-operator", {"formerly": 1}, timeout=300)
            assert children(plane, "default") == [uid]

        client.uninstall("ddp-operator", timeout=300)
    assert get(plane, "deployments,services,networkpolicies", "-n", NAMESPACE)["items"] == []
    assert not [r for r in get(plane, "clusterroles")["items"] if r["metadata"]["name"].startswith("ddp-operator")]
    kept = get(plane, "ddp", "-n", "default")["items"]
    assert [item["metadata"]["name"] for item in kept] == ["digits"]
    assert children(plane, "default") == [uid]
    assert len(launchers(plane)) == 1, "the Job controller may still replace pods"
    plane.kubectl("delete", "crd", "ddptrainingjobs.ddp-operator.dev")
    if plane.has_controllers:
        until(lambda: not launchers(plane), "Kubernetes deletes the launcher with the definition")


def test_release_for_some_namespaces_serves_these_and_no_other(plane: ControlPlane) -> None:
    """Needs the custom resource, which the previous release has left."""
    if plane.kubectl("get", "crd", "ddptrainingjobs.ddp-operator.dev", check=False).returncode:
        plane.kubectl("apply", "--server-side", "-f", str(ROOT / "deploy/crds/ddptrainingjobs.yaml"))
        plane.kubectl("wait", "--for=condition=Established", "crd/ddptrainingjobs.ddp-operator.dev")
    for name in ("team-a", "team-b", "team-c"):
        plane.kubectl("create", "namespace", name)
    with helm(plane, "team-a") as client:
        client.install(CHART, "some", VALUES["namespaced"], timeout=300)
    account = "some-ddp-operator"
    with operator(plane, "team-a", account, namespaces=("team-a", "team-b")):
        submit(plane, "team-b")
        until(lambda: children(plane, "team-b"), "the operator creates the Job")
    subject = f"--as=system:serviceaccount:team-a:{account}"
    for verb, resource, namespace in (
        ("create", "jobs", "team-c"), ("list", "pods", "default"), ("get", "secrets", "team-a"),
        ("create", "rolebindings", "team-a"), ("create", "pods --subresource=exec", "team-a"),
    ):  # fmt: skip
        asked = plane.kubectl("auth", "can-i", verb, *resource.split(), "-n", namespace, subject, check=False)
        assert asked.stdout.strip() == "no", (verb, resource, namespace)


def test_helm_test_has_only_required_rights(plane: ControlPlane, tmp_path: Path) -> None:
    """Under its own account, at a server that checks rights; the test acts as the operator."""
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "deploy/crds/ddptrainingjobs.yaml"))
    plane.kubectl("wait", "--for=condition=Established", "crd/ddptrainingjobs.ddp-operator.dev")
    plane.kubectl("create", "namespace", "tested")
    hooks = [result for result in render(name="t", namespace="tested") if is_test(result) and result["kind"] != "Pod"]
    plane.kubectl("apply", "-n", "tested", "-f", "-", stdin=yaml.safe_dump_all(hooks))
    (account,) = (result["metadata"]["name"] for result in of_kind(hooks, "ServiceAccount"))
    kubeconfig = plane.account("tested", account)
    shutil.copy(kubeconfig.parent / f"tested.{account}.token", tmp_path / "token")
    shutil.copy(kubeconfig.parent / "pki/ca.crt", tmp_path / "ca.crt")
    (tmp_path / "job.json").write_text(submitted(hooks))
    program = subprocess.Popen(
        [sys.executable, CHART / "files/helm_test.py", tmp_path / "job.json", "60"],
        env=os.environ | {"KUBERNETES_SERVER": plane.url, "SERVICE_ACCOUNT": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        (job,) = until(lambda: get(plane, "ddp", "-n", "tested")["items"], "the program submits its job")
        status = json.dumps({"status": {"phase": "Succeeded"}})
        plane.kubectl(
            "patch",
            "ddp",
            job["metadata"]["name"],
            "-n",
            "tested",
            "--subresource=status",
            "--type=merge",
            "-p",
            status,
        )
        output, _ = program.communicate(timeout=300)
    finally:
        program.kill()
        program.communicate()
    assert (program.returncode, output.splitlines()[-1]) == (0, "Succeeded"), output
    assert get(plane, "ddp", "-n", "tested")["items"] == []
    for verb, resource in (("create", "pods"), ("get", "secrets"), ("list", "ddptrainingjobs"), ("create", "jobs")):
        subject = f"--as=system:serviceaccount:tested:{account}"
        asked = plane.kubectl("auth", "can-i", verb, resource, "-n", "tested", subject, check=False)
        assert asked.stdout.strip() == "no", (verb, resource)


@pytest.mark.parametrize("create", [False, True], ids=["namespace exists", "Helm would create it"])
def test_missing_namespace_is_refused_before_any_object(plane: ControlPlane, create: bool) -> None:
    home = f"refused-{create}".lower()
    if not create:
        plane.kubectl("create", "namespace", home)
    values = {"namespaces": [home, "no-such-team"], "crds": {"enabled": False}}
    with helm(plane, home) as client:
        with pytest.raises(helm_python.HelmError, match="namespace no-such-team does not exist; create it first"):
            client.install(CHART, "ddp", values, create_namespace=create)
        assert client.list() == []
    assert get(plane, "roles,deployments", "-n", home)["items"] == []


@pytest.mark.parametrize("name", ["default", "locked-down", "foreign-account", "spread"])
def test_server_accepts_every_object(plane: ControlPlane, name: str) -> None:
    """A dry run on the server: its defaults, its validation, and the restricted Pod Security Standard's admission."""
    namespace = f"dry-{name}"
    plane.kubectl("create", "namespace", namespace)
    plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    objects = render(VALUES[name], name="dry", namespace=namespace)
    (deployment,) = of_kind(objects, "Deployment")
    pods = [*of_kind(objects, "Pod"), {"kind": "Pod", **deployment["spec"]["template"]}]
    for index, pod in enumerate(pods):
        # A dry run creates no account, but the admission of the pod needs it.
        spec = pod["spec"] | {"serviceAccountName": "default"}
        pods[index] = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{index}"}, "spec": spec}
    until(lambda: get(plane, "serviceaccounts", "-n", namespace)["items"], "the account default")
    expected = [result for result in objects if result["kind"] != "Pod"] + pods
    places = {item["metadata"].get("namespace", namespace) for item in expected}
    accepted = 0
    for place in places:  # the Role for Leases of nodes is in another one than the release
        message = plane.kubectl(
            "apply", "-n", place, "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-",
            stdin=yaml.safe_dump_all(
                item for item in expected if item["metadata"].get("namespace", namespace) == place
            ),
        )  # fmt: skip
        assert "Warning" not in message.stderr
        accepted += len(message.stdout.splitlines())
    assert accepted == len(expected)


@pytest.mark.parametrize("path", sorted((ROOT / "deploy/samples").glob("*.yaml")), ids=lambda path: path.stem)
def test_server_accepts_every_sample(plane: ControlPlane, path: Path) -> None:
    """A dry run on the server, with the CRD's own rules."""
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "deploy/crds/ddptrainingjobs.yaml"))
    plane.kubectl("wait", "--for=condition=Established", "crd/ddptrainingjobs.ddp-operator.dev")
    plane.kubectl("create", "namespace", "samples", check=False)
    message = plane.kubectl("apply", "--server-side", "--dry-run=server", "-n", "samples", "-f", str(path))
    assert "Warning" not in message.stderr
