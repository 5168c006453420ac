"""A real control plane for tests: etcd and kube-apiserver, and controller-manager and scheduler if they exist.

The binaries come from ``$KUBEBUILDER_ASSETS`` (envtest's convention; etcd also from PATH). Everything runs on free
ports of the loopback address, keeps its state in one temporary folder, checks permissions (RBAC), and ends with the
block.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ddp_cli.local.ports import hold_free_port
from tests.support import PATIENCE
from tests.support.certificates import Authority
from tests.support.kubernetes_binaries import find_binary
from tests.support.stoppable import Stoppable

START_LIMIT = 240.0
NODES = ("node-0", "node-1")


def free_ports(count: int) -> list[int]:
    """Return distinct ports that are reserved as long as this process runs."""
    return [hold_free_port() for _ in range(count)]


class ControlPlane(Stoppable):
    """Starts on entering, ends on leaving. Without ``controllers`` it is etcd and the API server alone.

    ``gates``: feature gates of all components that are switched on, and ``api``: API groups and versions beside the
    usual ones. ``cpus``: of each node. ``apiserver``: further flags of the API server.
    """

    def __init__(
        self,
        folder: Path,
        *,
        controllers: bool = True,
        scheduler: bool = True,
        gates: Sequence[str] = (),
        api: Sequence[str] = (),
        cpus: int = 256,
        apiserver: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._gates = [f"--feature-gates={','.join(f'{gate}=true' for gate in gates)}"] if gates else []
        self._api = [f"--runtime-config={','.join(f'{name}=true' for name in api)}"] if api else []
        self._cpus = cpus
        self._apiserver_flags = tuple(apiserver)
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._etcd, self._peer, self._port, self._kcm, self._scheduler = free_ports(5)
        self.has_controllers = controllers and find_binary("kube-controller-manager") is not None
        self.has_scheduler = controllers and scheduler and find_binary("kube-scheduler") is not None
        self.admin = folder / "admin.kubeconfig"
        """A kubeconfig with all rights."""

    @property
    def url(self) -> str:
        """The address of the API server."""
        return f"https://127.0.0.1:{self._port}"

    @property
    def version(self) -> str:
        """The version of Kubernetes."""
        return str(json.loads(self.kubectl("get", "--raw", "/version").stdout)["gitVersion"])

    def __enter__(self) -> ControlPlane:
        try:
            self._certify()
            self._start_etcd()
            self._start_apiserver()
            self._start_others()
            self._add_nodes()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End all processes, the last one started first."""
        for _, process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for _, process in reversed(self._processes):
            try:
                process.wait(1)  # these programs need no graceful end
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def signal(self, name: str, number: int) -> None:
        """Send a signal to one of the programs."""
        (process,) = (process for its_name, process in self._processes if its_name == name)
        process.send_signal(number)

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator."""
        # A separate cache: the machine's may describe another server at the same port.
        cache = self._folder / "kubectl-cache"
        command = ["kubectl", f"--kubeconfig={self.admin}", f"--cache-dir={cache}", *args]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)
        deadline = time.monotonic() + PATIENCE
        while check and "doesn't have a resource type" in done.stderr and time.monotonic() < deadline:
            # The server lists a new kind a moment after its CRD is established, and kubectl keeps the former list.
            time.sleep(0.5)
            shutil.rmtree(cache, ignore_errors=True)
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)
        if args[0] == "wait" and "accessor error" in done.stderr:  # an object without conditions: a CRD just created
            return self.kubectl(*args, stdin=stdin, check=check)
        if check and done.returncode:
            raise AssertionError(f"kubectl {' '.join(args)}: {done.stderr or done.stdout}")
        return done

    def write_kubeconfig(self, name: str, user: dict[str, Any], namespace: str = "default") -> Path:
        """Write a kubeconfig for a user of this server; ``namespace`` is the user's default namespace."""
        path = self._folder / f"{name}.kubeconfig"
        cluster = {"server": self.url, "certificate-authority": "pki/ca.crt"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name, "namespace": namespace}}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def account(self, namespace: str, name: str) -> Path:
        """Return a kubeconfig with a token of a service account."""
        token = self._folder / f"{namespace}.{name}.token"
        token.write_text(self.kubectl("create", "token", name, "-n", namespace, "--duration=1h").stdout)
        return self.write_kubeconfig(f"{namespace}.{name}", {"tokenFile": token.name}, namespace)

    def _certify(self) -> None:
        authority = Authority(self._folder / "pki")
        certificates = (
            ("apiserver", "/CN=kube-apiserver", "server"),
            ("admin", "/O=system:masters/CN=admin", "client"),
            ("kcm", "/CN=system:kube-controller-manager", "client"),
            ("scheduler", "/CN=system:kube-scheduler", "client"),
        )
        for name, subject, use in certificates:
            authority.issue(name, subject, use)
        authority.call_openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "sa.key")
        authority.call_openssl("ec", "-in", "sa.key", "-pubout", "-out", "sa.pub")
        for name in ("admin", "kcm", "scheduler"):
            self.write_kubeconfig(name, {"client-certificate": f"pki/{name}.crt", "client-key": f"pki/{name}.key"})

    def _start_etcd(self) -> None:
        client = f"http://127.0.0.1:{self._etcd}"
        peer = f"http://127.0.0.1:{self._peer}"
        self._start(
            "etcd",
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )

    def _start_apiserver(self) -> None:
        pki = self._folder / "pki"
        self._start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd}",
            f"--secure-port={self._port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=Node,RBAC",
            # The strictest setting of clusters: a client that adds an owner must be allowed to delete it.
            "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
            f"--client-ca-file={pki / 'ca.crt'}",
            f"--tls-cert-file={pki / 'apiserver.crt'}",
            f"--tls-private-key-file={pki / 'apiserver.key'}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={pki / 'sa.pub'}",
            f"--service-account-signing-key-file={pki / 'sa.key'}",
            *self._gates,
            *self._api,
            *self._apiserver_flags,
        )
        self._wait("the API server", "get", "--raw", "/readyz")

    def _start_others(self) -> None:
        pki = self._folder / "pki"
        if self.has_controllers:
            kubeconfig = self._folder / "kcm.kubeconfig"
            self._start(
                "kube-controller-manager",
                f"--kubeconfig={kubeconfig}",
                f"--authentication-kubeconfig={kubeconfig}",
                f"--authorization-kubeconfig={kubeconfig}",
                f"--secure-port={self._kcm}",
                "--bind-address=127.0.0.1",
                f"--root-ca-file={pki / 'ca.crt'}",
                f"--service-account-private-key-file={pki / 'sa.key'}",
                "--use-service-account-credentials=true",
                "--leader-elect=false",
                "--kube-api-qps=500",
                "--kube-api-burst=1000",
                # The nodes have no kubelet that reports readiness.
                "--node-monitor-grace-period=1h",
                *self._gates,
            )
            self._wait("the service account of the default namespace", "get", "serviceaccount", "default")
        if self.has_scheduler:
            kubeconfig = self._folder / "scheduler.kubeconfig"
            self._start(
                "kube-scheduler",
                f"--kubeconfig={kubeconfig}",
                f"--authentication-kubeconfig={kubeconfig}",
                f"--authorization-kubeconfig={kubeconfig}",
                f"--secure-port={self._scheduler}",
                "--bind-address=127.0.0.1",
                "--leader-elect=false",
                *self._gates,
            )

    def _add_nodes(self) -> None:
        """Add empty nodes with capacity for everything."""
        room = {"memory": "4Ti", "pods": "500", "nvidia.com/gpu": "64", "ephemeral-storage": "4Ti"}
        room["cpu"] = str(self._cpus)
        for name in NODES:
            labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
            self.kubectl("create", "-f", "-", stdin=yaml.safe_dump(node))
            ready = {"type": "Ready", "status": "True", "reason": "Test", "message": ""}
            patch = {"status": {"capacity": room, "allocatable": room, "conditions": [ready]}}
            self.kubectl("patch", "node", name, "--subresource=status", "-p", yaml.safe_dump(patch))

    def _start(self, name: str, *args: str) -> None:
        binary = find_binary(name)
        assert binary is not None, name
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen([binary, *args], stdout=log, stderr=log, cwd=self._folder)
        self._processes.append((name, process))

    def _wait(self, event: str, *kubectl: str) -> None:
        deadline = time.monotonic() + START_LIMIT
        while True:
            done = self.kubectl(*kubectl, check=False)
            if done.returncode == 0:
                return
            for name, process in self._processes:
                if process.poll() is not None:
                    log = (self._folder / f"{name}.log").read_text(errors="replace")
                    raise RuntimeError(f"{name} ended with exit code {process.returncode}:\n{log[-3000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{event} did not come up: {done.stderr}")
            time.sleep(0.1)
