"""This operator and its neighbours as processes of this machine, for the comparison.

A neighbour needs its binary and the folder of its source, which has the definitions: ``JOBSET_BIN`` and ``JOBSET_SRC``,
``TRAINER_BIN`` and ``TRAINER_SRC`` (Kubeflow Trainer, which needs JobSet too), ``KUBERAY_BIN`` and ``KUBERAY_SRC``.
``JOBSET_VERSION`` and so on are printed.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from ddp_operator._version import __version__
from tests.support import ROOT
from tests.support.certificates import Authority
from tests.support.control_plane import ControlPlane, free_ports
from tests.support.operator_process import OperatorProcess

JOBS: Final = Path(__file__).with_name("jobs")
START_LIMIT: Final = 60.0
CRDS: Final = Path("config") / "components" / "crd" / "bases"
WEBHOOKS: Final = Path("config") / "components" / "webhook" / "manifests.yaml"
KUBEFLOW: Final = "kubeflow-system"
TRAINER_SECRET: Final = "kubeflow-trainer-webhook-cert"
TRAINER_CERTIFICATES: Final = Path("/tmp/k8s-webhook-server/serving-certs")
"""Fixed in the source of Trainer."""


@dataclass(frozen=True)
class Tool:
    """A controller that runs jobs.

    ``key``: its account, its file in ``jobs`` and its variables. ``jobs_path``: the path of its jobs below a namespace.
    ``node_label``: the label of the pods that train. ``needs``: keys of the binaries.
    """

    key: str
    title: str
    jobs_path: str
    node_label: str
    needs: tuple[str, ...] = ()

    @property
    def sample(self) -> Path:
        """The job as a user writes it."""
        return JOBS / f"{self.key}.yaml"

    @property
    def version(self) -> str:
        """The version that is compared."""
        names = self.needs or ("",)
        return __version__ if not self.needs else os.environ.get(f"{names[0]}_VERSION", "unknown version")

    def find_missing(self) -> str | None:
        """Return why the tool cannot run here, or None."""
        for name in self.needs:
            for variable in (f"{name}_BIN", f"{name}_SRC"):
                if not Path(os.environ.get(variable) or "/nonexistent").exists():
                    return f"not measured: no binary ({variable} names none)"
        return None

    def load_job(self, name: str) -> dict[str, Any]:
        """Return the sample with another name."""
        manifest: dict[str, Any] = yaml.safe_load(
            self.sample.read_text().replace("mine-node-0-0.mine", f"{name}-node-0-0.{name}")
        )
        manifest["metadata"]["name"] = name
        return manifest

    def count_lines(self) -> int:
        """Return the lines of YAML that a user writes."""
        return len(self.sample.read_text().splitlines())


OURS: Final = Tool(
    "ddp-operator",
    "DDP operator",
    "/apis/ddp-operator.dev/v1alpha1/namespaces/{}/ddptrainingjobs",
    "ddp-operator.dev/job-name",
)
JOBSET: Final = Tool(
    "jobset",
    "JobSet",
    "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets",
    "jobset.sigs.k8s.io/jobset-name",
    ("JOBSET",),
)
TRAINER: Final = Tool(
    "kubeflow-trainer",
    "Kubeflow Trainer",
    "/apis/trainer.kubeflow.org/v1alpha1/namespaces/{}/trainjobs",
    "jobset.sigs.k8s.io/jobset-name",
    ("TRAINER", "JOBSET"),
)
KUBERAY: Final = Tool("kuberay", "KubeRay", "/apis/ray.io/v1/namespaces/{}/rayjobs", "ray.io/node-type", ("KUBERAY",))
TOOLS: Final = (OURS, JOBSET, TRAINER, KUBERAY)


class NotStarted(Exception):
    """A controller ended, or did not listen in time."""


class Site:
    """The control plane on which the tools run in turn, and a folder for their files."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane = plane
        self.folder = folder
        self._authority = Authority(folder / "webhooks")

    def install(self, tool: Tool) -> None:
        """Create a tool's account and its definitions."""
        kubectl = self.plane.kubectl
        kubectl("create", "serviceaccount", tool.key)
        account = f"--serviceaccount=default:{tool.key}"
        kubectl("create", "clusterrolebinding", tool.key, "--clusterrole=cluster-admin", account)
        if tool is OURS:
            self._apply_definitions(ROOT / "deploy" / "crds")
        if "JOBSET" in tool.needs:
            self._apply_definitions(_source("JOBSET") / CRDS)
        if tool is TRAINER:
            base = _source("TRAINER") / "manifests" / "base"
            self._apply_definitions(base / "crds")
            self._prepare_trainer()
            kubectl("apply", "--server-side", "-f", str(base / "runtimes" / "torch_distributed.yaml"))
        if tool is KUBERAY:
            self._apply_definitions(_source("KUBERAY") / "config" / "crd" / "bases")

    @contextmanager
    def run(self, tool: Tool) -> Iterator[list[int]]:
        """Run a tool's controllers; yield their process ids."""
        kubeconfig = self.plane.account("default", tool.key)
        with ExitStack() as stack:
            pids = []
            if tool is OURS:
                (port,) = free_ports(1)
                operator = stack.enter_context(OperatorProcess(kubeconfig, self.folder / "operator.log", port=port))
                assert operator.process is not None
                pids.append(operator.process.pid)
            if "JOBSET" in tool.needs:
                pids.append(stack.enter_context(self._run_jobset(kubeconfig)))
            if tool is TRAINER:
                pids.append(stack.enter_context(self._run_trainer(kubeconfig)))
            if tool is KUBERAY:
                pids.append(stack.enter_context(self._run_kuberay(kubeconfig)))
            yield pids

    def _apply_definitions(self, folder: Path) -> None:
        for path in sorted(folder.glob("*.yaml")):
            if path.name == "kustomization.yaml":
                continue
            self.plane.kubectl("apply", "--server-side", "-f", str(path))
            established = ("wait", "--for=condition=Established", "-f", str(path))
            deadline = time.monotonic() + START_LIMIT
            # kubectl fails if the definition has no condition yet.
            while self.plane.kubectl(*established, check=False).returncode and time.monotonic() < deadline:
                time.sleep(0.1)

    def _prepare_trainer(self) -> None:
        """Create what Trainer's certificate rotation needs. Its webhooks only validate, and are left out."""
        self.plane.kubectl("create", "namespace", KUBEFLOW)
        self.plane.kubectl("create", "secret", "generic", TRAINER_SECRET, "-n", KUBEFLOW)
        kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
        webhook = kind | {"metadata": {"name": "validator.trainer.kubeflow.org"}, "webhooks": []}
        self.plane.kubectl("create", "-f", "-", stdin=yaml.safe_dump(webhook))

    @contextmanager
    def _run_jobset(self, kubeconfig: Path) -> Iterator[int]:
        health, hooks = free_ports(2)
        certificates = self._issue("jobset")
        config = {
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": "127.0.0.1", "port": hooks, "certDir": str(certificates)},
        }
        path = self.folder / "jobset-config.yaml"
        path.write_text(yaml.safe_dump(config))
        with self._run_process("JOBSET", kubeconfig, hooks, f"--config={path}", "--zap-log-level=error") as pid:
            webhooks = self._register_webhooks(_source("JOBSET") / WEBHOOKS, hooks)
            try:
                yield pid
            finally:
                self.plane.kubectl("delete", "-f", "-", stdin=webhooks)

    @contextmanager
    def _run_trainer(self, kubeconfig: Path) -> Iterator[int]:
        health, hooks = free_ports(2)
        flags = (f"--health-probe-bind-address=127.0.0.1:{health}", f"--webhook-server-port={hooks}")
        with self._start_process("TRAINER", kubeconfig, *flags, "--zap-log-level=error") as process:
            self._mount_trainer_secret()
            _wait_for_port(hooks, process)
            yield process.pid

    def _mount_trainer_secret(self) -> None:
        """Write the certificates from the Secret to Trainer's folder, as a kubelet does."""
        read = ("get", "secret", TRAINER_SECRET, "-n", KUBEFLOW, "-o", "json")
        deadline = time.monotonic() + START_LIMIT
        data: dict[str, str] = {}
        while "tls.crt" not in data and time.monotonic() < deadline:
            time.sleep(0.5)
            data = json.loads(self.plane.kubectl(*read).stdout).get("data") or {}
        TRAINER_CERTIFICATES.mkdir(parents=True, exist_ok=True)
        for name, content in data.items():
            (TRAINER_CERTIFICATES / name).write_bytes(base64.b64decode(content))

    @contextmanager
    def _run_kuberay(self, kubeconfig: Path) -> Iterator[int]:
        health, metrics = free_ports(2)
        flags = (
            f"--health-probe-bind-address=127.0.0.1:{health}",
            f"--metrics-addr=127.0.0.1:{metrics}",
            "--enable-leader-election=false",
        )
        with self._run_process("KUBERAY", kubeconfig, health, *flags, "--zap-log-level=error") as pid:
            yield pid

    @contextmanager
    def _run_process(self, name: str, kubeconfig: Path, port: int, *flags: str) -> Iterator[int]:
        """Run a binary until the block ends; it is ready when it listens on the port."""
        with self._start_process(name, kubeconfig, *flags) as process:
            _wait_for_port(port, process)
            yield process.pid

    @contextmanager
    def _start_process(self, name: str, kubeconfig: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a binary until the block ends."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [os.environ[f"{name}_BIN"], *flags],
                env=os.environ | {"KUBECONFIG": str(kubeconfig)},
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _issue(self, name: str) -> Path:
        """Return a folder with ``tls.crt`` and ``tls.key`` for a server on this machine."""
        folder = self.folder / f"{name}-certificates"
        if not folder.exists():
            folder.mkdir()
            self._authority.issue(name, f"/CN={name}", "server")
            for suffix in ("crt", "key"):
                shutil.copy(self._authority.folder / f"{name}.{suffix}", folder / f"tls.{suffix}")
        return folder

    def _register_webhooks(self, path: Path, port: int) -> str:
        """Register a project's webhooks at a port of this machine; return the YAML of what was registered."""
        authority = base64.b64encode((self._authority.folder / "ca.crt").read_bytes()).decode()
        documents = []
        for document in yaml.safe_load_all(path.read_text()):
            for hook in document["webhooks"]:
                url = f"https://127.0.0.1:{port}{hook['clientConfig']['service']['path']}"
                hook["clientConfig"] = {"url": url, "caBundle": authority}
                if "pod" in hook["name"]:  # otherwise the hook of pods would also see those of the other tools
                    label = {"key": JOBSET.node_label, "operator": "Exists"}
                    hook["objectSelector"] = {"matchExpressions": [label]}
            documents.append(document)
        text = yaml.safe_dump_all(documents)
        self.plane.kubectl("apply", "-f", "-", stdin=text)
        return text


def _source(name: str) -> Path:
    return Path(os.environ[f"{name}_SRC"])


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a process listens. Raises: NotStarted if it ends, or does not listen in time."""
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as connection:
            if connection.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise NotStarted(f"{process.args!r} does not listen on port {port} (exit code {process.poll()})")
