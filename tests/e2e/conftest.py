"""A complete cluster, named by DDP_E2E_KUBECONFIG. Every test works in a separate namespace.

Environment variables describe the cluster:

- ``DDP_E2E_OPERATOR``: ``installed`` (default: the operator runs there already), ``chart`` (the tests install the chart
  by Helm, and uninstall it in the end) or ``process`` (the tests apply the CRD and run ``python -m ddp_operator`` from
  this checkout; it must be able to reach pod addresses for progress).
- ``DDP_E2E_CHART_VALUES``: the values of ``chart`` as YAML, such as ``{image: {tag: mine}}``.
- ``DDP_E2E_BUILD``: ``1`` builds both images by ``images/build`` before the first test; its variables (``LOAD``,
  ``REGISTRY``, ``BUILDER``, ``BUILD_ARGS``) name the builder and the way to the nodes. Without it the nodes have them.
- ``DDP_E2E_IMAGE``: the trainer's image; default: the samples' own.
- ``DDP_E2E_TRACKING_IMAGE``: an image with PyTorch, tensorboard and mlflow, for the tests of trackers.
- ``DDP_E2E_S3_IMAGE``: an image with PyTorch and s3fs, for checkpoints in an object store on this machine.
- ``DDP_E2E_POD``: a YAML file merged into every pod's spec and its trainer container (a node selector, a mount).
- ``DDP_E2E_CHECKPOINTS``: a volume that all nodes share, as in a pod's ``volumes`` without its name, such as
  ``{hostPath: {path: /shared}}``; without it the tests that resume from a checkpoint are skipped. Its folder must exist
  on the nodes, with mode 777.
- ``DDP_E2E_NODE_STOP``, ``DDP_E2E_NODE_START``: commands that switch a node off and on; its name is added to them
  (``docker stop``). Without them no node is lost.
- ``DDP_E2E_FREEZE``, ``DDP_E2E_THAW``: commands that stop a part of the control plane (SIGSTOP) and resume it; its
  name is added to them: ``kube-apiserver``, ``etcd``, ``kube-controller-manager``. Without them these have no outage.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config
from kubernetes.client import ApiException
from kubernetes.client.exceptions import NotFoundException

from ddp_operator.api.constants import GROUP, LABEL_JOB_NAME, PLURAL, VERSION
from tests.support import ROOT

from .release import Release, build_images

DIGITS = yaml.safe_load((ROOT / "deploy" / "samples" / "digits.yaml").read_text())
PATIENCE = 240.0
"""Seconds after which something that should happen counts as never happening. No test measures time with it."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the images before the first test: a build takes longer than a test may."""
    if os.environ.get("DDP_E2E_BUILD") != "1" or session.config.option.collectonly:
        return
    if any(item.path.parent == Path(__file__).parent for item in session.items):
        build_images()


class UserNamespace:
    """One namespace of the cluster, for a user of it."""

    def __init__(self, kubeconfig: str, namespace: str) -> None:
        self.kubeconfig = kubeconfig
        self.namespace = namespace
        api = config.new_client_from_config(config_file=kubeconfig)
        self.core = client.CoreV1Api(api)
        self.batch = client.BatchV1Api(api)
        self.custom = client.CustomObjectsApi(api)

    def kubectl(self, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl in the namespace."""
        line = ["kubectl", "--kubeconfig", self.kubeconfig, "--namespace", self.namespace, *words]
        return subprocess.run(line, input=text, text=True, capture_output=True, timeout=120, check=False)

    def apply(self, manifest: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
        """Apply a manifest as a user does."""
        return self.kubectl("apply", "-f", "-", text=yaml.safe_dump(dict(manifest)))

    def get(self, name: str) -> dict[str, Any] | None:
        """Return the training job, or None."""
        try:
            namespaced_custom_object: dict[str, Any] = self.custom.get_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, name
            )
        except ApiException as error:
            if error.status == 404:
                return None
            raise
        return namespaced_custom_object

    def status(self, name: str) -> dict[str, Any]:
        """Return the training job's status."""
        result: dict[str, Any] = (self.get(name) or {}).get("status") or {}
        return result

    def why(self, name: str) -> str:
        """Return what `ddp why` says of the training job."""
        line = [sys.executable, "-m", "ddp_cli", "why", name, "--namespace", self.namespace]
        env = os.environ | {"KUBECONFIG": self.kubeconfig}
        return subprocess.run(line, env=env, text=True, capture_output=True, timeout=PATIENCE, check=True).stdout

    def until(self, probe: Callable[[], Any], what: str) -> Any:
        """Call ``probe`` until it returns something true."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            result = probe()
            if result:
                return result
            time.sleep(0.5)
        jobs = self.kubectl("get", "ddp,job,pods", "-o", "wide").stdout
        raise AssertionError(f"never happened: {what}\n{jobs}\n{self.kubectl('describe', 'ddp').stdout}")

    def phase(self, name: str, *phases: str) -> dict[str, Any]:
        """Wait for one of these phases and return the status."""

        def probe() -> dict[str, Any] | None:
            status = self.status(name)
            return status if status.get("phase") in phases else None

        result: dict[str, Any] = self.until(probe, f"{name} in phase {' or '.join(phases)}")
        return result

    def pods(self, name: str) -> list[Any]:
        """Return the training job's pods."""
        items: list[Any] = self.core.list_namespaced_pod(
            self.namespace, label_selector=f"{LABEL_JOB_NAME}={name}"
        ).items
        return items


def _merge(base: Any, patch: Any) -> Any:
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{key: _merge(base.get(key), value) for key, value in patch.items()}}
    if isinstance(base, list) and isinstance(patch, list) and all(isinstance(item, dict) for item in base + patch):
        return base + patch
    return patch


def adapt(manifest: Mapping[str, Any], name: str | None = None) -> dict[str, Any]:
    """Return a sample with this cluster's image and DDP_E2E_POD merged in; lists of objects are joined."""
    adapted: dict[str, Any] = yaml.safe_load(yaml.safe_dump(dict(manifest)))
    if name:
        adapted["metadata"]["name"] = name
    pod = adapted["spec"]["template"]["spec"]
    overlay = yaml.safe_load(Path(os.environ["DDP_E2E_POD"]).read_text()) if os.environ.get("DDP_E2E_POD") else {}
    trainer = overlay.pop("trainer", {})
    container = _merge(pod["containers"][0], trainer)
    if os.environ.get("DDP_E2E_IMAGE"):
        container["image"] = os.environ["DDP_E2E_IMAGE"]
    if "securityProfile" in overlay:
        adapted["spec"]["securityProfile"] = overlay.pop("securityProfile")
    adapted["spec"]["template"]["spec"] = _merge(pod, overlay) | {"containers": [container]}
    return adapted


class CheckoutOperator:
    """The operator as a process of this checkout, which a test may kill and restart."""

    def __init__(self, kubeconfig: str, log: Path) -> None:
        self.kubeconfig = kubeconfig
        self.log = log
        self.source: Path | None = None
        """The folder ``operator`` of another checkout whose operator works now."""
        self.start()

    def start(self, source: Path | None = None) -> None:
        """Start it, or that of another checkout."""
        self.source = source
        with self.log.open("a") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ddp_operator"],
                env=os.environ | {"KUBECONFIG": self.kubeconfig} | ({"PYTHONPATH": str(source)} if source else {}),
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


def apply_crds(kubeconfig: str, checkout: Path = ROOT) -> None:
    """Install the custom resource as a checkout defines it."""
    crds = str(checkout / "deploy" / "crds")
    subprocess.run(["kubectl", "--kubeconfig", kubeconfig, "apply", "-f", crds], check=True, timeout=60)


@pytest.fixture(scope="session")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckoutOperator | None]:
    """Ensure that an operator runs. Return it if it is a process of these tests."""
    kubeconfig = os.environ["DDP_E2E_KUBECONFIG"]
    source = os.environ.get("DDP_E2E_OPERATOR", "installed")
    assert source in ("installed", "chart", "process"), f"DDP_E2E_OPERATOR={source}: not installed, chart or process"
    if source == "installed":
        yield None
        return
    if source == "chart":
        with Release(kubeconfig) as release:
            release.install(yaml.safe_load(os.environ.get("DDP_E2E_CHART_VALUES", "{}")))
            yield None
            release.uninstall()
        return
    apply_crds(kubeconfig)
    checkout_operator = CheckoutOperator(kubeconfig, tmp_path_factory.mktemp("operator") / "operator.log")
    try:
        yield checkout_operator
    finally:
        checkout_operator.process.terminate()
        checkout_operator.process.wait(30)
    assert "Traceback" not in checkout_operator.log.read_text(), checkout_operator.log.read_text()


@pytest.fixture
def release(operator: CheckoutOperator | None) -> Iterator[Release]:
    """The release of the chart whose operator works."""
    if operator is not None:
        pytest.skip("the operator is a process of these tests and no release of the chart (DDP_E2E_OPERATOR)")
    with Release(os.environ["DDP_E2E_KUBECONFIG"]) as result:
        if not result.exists():
            pytest.skip(f"the operator is not installed as the Helm release {result.namespace}/{result.name}")
        yield result


@contextmanager
def new_namespace() -> Iterator[UserNamespace]:
    """Make a namespace, deleted afterwards."""
    name = f"ddp-e2e-{uuid.uuid4().hex[:8]}"
    user_namespace = UserNamespace(os.environ["DDP_E2E_KUBECONFIG"], name)
    user_namespace.core.create_namespace({"metadata": {"name": name}})
    try:
        yield user_namespace
    finally:
        # pytest shows it where the test failed; it is deleted with the namespace.
        print(user_namespace.kubectl("get", "ddp,job,pods", "-o", "wide").stdout)
        print(
            user_namespace.kubectl(
                "logs", "--timestamps", "--selector", LABEL_JOB_NAME, "--prefix", "--tail", "100"
            ).stdout
        )
        with suppress(NotFoundException):  # a test may have deleted it
            user_namespace.core.delete_namespace(name, grace_period_seconds=0)


@pytest.fixture
def cluster(operator: CheckoutOperator | None) -> Iterator[UserNamespace]:
    """A new namespace, deleted afterwards."""
    with new_namespace() as result:
        yield result


def make_claim(cluster: UserNamespace, name: str, source: dict[str, Any]) -> Iterator[str]:
    """Make a claim on this volume, deleted afterwards."""
    mode = {"accessModes": ["ReadWriteMany"]}
    volume = f"{cluster.namespace}-{name}"
    spec = {"capacity": {"storage": "1Gi"}, **mode, "claimRef": {"namespace": cluster.namespace, "name": name}}
    cluster.core.create_persistent_volume({"metadata": {"name": volume}, "spec": spec | source})
    asked = {"storageClassName": "", **mode, "resources": {"requests": {"storage": "1Gi"}}}
    cluster.core.create_namespaced_persistent_volume_claim(
        cluster.namespace, {"metadata": {"name": name}, "spec": asked | {"volumeName": volume}}
    )
    try:
        yield name
    finally:
        cluster.core.delete_persistent_volume(volume)


def make_writable(cluster: UserNamespace, folder: str) -> None:
    """Create a folder on every node to which pods of any user may write; a kubelet creates one for root only."""
    image = adapt(DIGITS)["spec"]["template"]["spec"]["containers"][0]["image"]
    for node in cluster.core.list_node().items:
        name = f"folder-{node.metadata.name}"
        container = {
            "name": "chmod",
            "image": image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["chmod", "777", "/folder"],
            "securityContext": {"runAsUser": 0},
            "volumeMounts": [{"name": "folder", "mountPath": "/folder"}],
        }
        volume = {"name": "folder", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}
        spec = {
            "nodeName": node.metadata.name,
            "restartPolicy": "Never",
            "containers": [container],
            "volumes": [volume],
        }
        cluster.core.create_namespaced_pod(cluster.namespace, {"metadata": {"name": name}, "spec": spec})
        cluster.until(
            lambda name=name: cluster.core.read_namespaced_pod(name, cluster.namespace).status.phase == "Succeeded",
            f"{folder} is writable on {node.metadata.name}",
        )
        cluster.core.delete_namespaced_pod(name, cluster.namespace)


def here(cluster: UserNamespace) -> str:
    """Return the address by which the cluster's nodes know this machine."""
    [node, *_] = cluster.core.list_node().items
    [address] = [item.address for item in node.status.addresses if item.type == "InternalIP"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


@pytest.fixture
def claim(cluster: UserNamespace) -> Iterator[str]:
    """A claim that all nodes share, empty at first."""
    if not os.environ.get("DDP_E2E_CHECKPOINTS"):
        pytest.skip("DDP_E2E_CHECKPOINTS names no volume that all nodes share")
    source = yaml.safe_load(os.environ["DDP_E2E_CHECKPOINTS"])
    if "hostPath" in source:
        folder = f"{source['hostPath']['path']}/{cluster.namespace}"
        make_writable(cluster, folder)
        source = {"hostPath": {"path": folder, "type": "Directory"}}
    yield from make_claim(cluster, "data", source)
