"""The operator as the chart delivers it: the rendered pod, in a container without anything else of this machine.

It has no login name, no home folder, no writable folder but its volumes, and no variable but those of the pod.
"""

from __future__ import annotations

import json
import shlex
import shutil
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

import pytest

from tests.support.builders import job_manifest
from tests.support.certificates import Authority
from tests.support.chart import Object, render, the
from tests.support.container import (
    BASE_PATH,
    Container,
    ContainerProcess,
    PodContext,
    read_container,
    resolve_env,
)
from tests.support.container_main import NOT_POSSIBLE
from tests.support.control_plane import free_ports
from tests.support.standin import ClusterActors, StandIn
from tests.unit.test_dockerfiles import last_stage, read, values

POD_NAME = "ddp-operator-6c5d7f9b8-x2v4q"
NAMESPACE = "kube-system"
KOPF = ("python", "-m", "kopf", "run", "-A", "-m", "ddp_operator.manager.handlers")
# Tries to write in every folder, and prints what the process has.
INSPECT = """
import getpass, json, os
def may_write(folder):
    try:
        path = os.path.join(folder, "probe")
        open(path, "w").close()
        os.remove(path)
        return True
    except OSError:
        return False
try:
    login = getpass.getuser()
except (KeyError, OSError):
    login = None
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
print(json.dumps({
    "user": [os.getuid(), os.getgid(), *os.getgroups()],
    "login": login,
    "process": os.getpid(),
    "capabilities": [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "no_new_privileges": status["NoNewPrivs"].strip(),
    "folder": os.getcwd(),
    "read_only": bool(os.statvfs("/").f_flag & os.ST_RDONLY),
    "env": dict(os.environ),
    "writable": sorted({top for top, _, _ in os.walk("/") if not top.startswith("/proc") and may_write(top)}),
}))
"""


def read_image() -> tuple[dict[str, str], str]:
    """Return the environment and the folder that the image of the operator sets."""
    stage = last_stage(read("operator"))
    env = {"PATH": BASE_PATH}
    for line in values(stage, "ENV"):
        for word in shlex.split(line):
            name, _, value = word.partition("=")
            env[name] = Template(value).substitute(env)
    return env, values(stage, "WORKDIR")[-1]


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    """The folder with the certificates of the API server."""
    if shutil.which("openssl") is None:
        pytest.skip("not found: openssl")
    authority = Authority(tmp_path / "pki")
    authority.issue("apiserver", "/CN=kube-apiserver", "server")
    return authority.folder


@pytest.fixture
def server(pki: Path) -> Iterator[StandIn]:
    """A stand-in API server that a pod reaches by TLS, like a real one."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pki / "apiserver.crt", pki / "apiserver.key")
    with StandIn(tls=tls) as standin:
        yield standin


@pytest.fixture
def surroundings(server: StandIn, pki: Path) -> PodContext:
    """The parts that a kubelet adds to the operator's pod."""
    image_env, image_folder = read_image()
    return PodContext(
        env={
            "HOSTNAME": POD_NAME,
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(server.secure_port),
        },
        account={"token": "operator", "namespace": NAMESPACE, "ca.crt": (pki / "ca.crt").read_text()},
        # Without a UID: no object of the pod exists that could own the Lease.
        fields={"metadata.name": POD_NAME, "metadata.namespace": NAMESPACE, "metadata.uid": ""},
        image_env=image_env,
        image_folder=image_folder,
    )


@pytest.fixture
def pod() -> Object:
    """The Deployment's pod, whose pages are on a free port of this machine."""
    (port,) = free_ports(1)
    deployment = the(render({"port": port}, namespace=NAMESPACE), "Deployment")
    spec: Object = deployment["spec"]["template"]["spec"]
    return spec


@pytest.fixture
def container(pod: Object, surroundings: PodContext, tmp_path: Path) -> Container:
    """The container of the operator's pod."""
    return read_container(pod, surroundings, tmp_path / "root")


Run = Callable[..., ContainerProcess]


@pytest.fixture
def run(container: Container, tmp_path: Path) -> Iterator[Run]:
    """Run the container, with these changes; skip, with the reason, where this machine allows no namespaces."""
    started: list[ContainerProcess] = []

    def begin(**changes: Any) -> ContainerProcess:
        process = ContainerProcess(replace(container, **changes), tmp_path / f"log-{len(started)}")
        started.append(process)
        return process

    tried = begin(command=["true"])
    code = tried.wait()
    if code == NOT_POSSIBLE:
        pytest.skip(tried.log.strip())
    assert code == 0, tried.log
    yield begin
    for process in started:
        process.stop()


def probe_url(pod: Object, probe: str) -> str:
    """Return the address of the page that the kubelet reads."""
    (container,) = pod["containers"]
    (port,) = (port["containerPort"] for port in container["ports"] if port["name"] == "http")
    return f"http://127.0.0.1:{port}{container[probe]['httpGet']['path']}"


@pytest.mark.parametrize("command", [pytest.param(None, id="deployment"), pytest.param(KOPF, id="kopf-run")])
async def test_delivered_operator_becomes_ready_and_creates_job(
    command: tuple[str, ...] | None, pod: Object, run: Run, server: StandIn, actors: ClusterActors
) -> None:
    process = run(**({"command": command} if command else {}))
    for probe in ("readinessProbe", "livenessProbe"):
        process.wait_until_ok(probe_url(pod, probe))
    lease = server.get("Lease", "ddp-operator", NAMESPACE)
    assert lease is not None
    assert lease["spec"]["holderIdentity"] == POD_NAME

    await actors.create(job_manifest())
    await actors.child_job("digits-1")

    assert process.terminate() == 0, process.log
    lines = [json.loads(line) for line in process.log.splitlines() if command is None]
    assert not [line for line in lines if line["severity"] != "info"], process.log
    assert "Traceback" not in process.log


def test_delivered_pod_without_token_names_missing_credentials(run: Run, container: Container) -> None:
    process = run(volumes=[volume for volume in container.volumes if volume.path == "/tmp"])
    assert process.wait() == 1
    (line,) = process.log.splitlines()
    assert "cannot start: no credentials for a cluster" in line


def test_container_has_only_what_pod_defines(run: Run, container: Container) -> None:
    process = run(command=["python", "-c", INSPECT])
    assert process.wait() == 0, process.log
    result = json.loads(process.log)
    env = result.pop("env")
    env.pop("LC_CTYPE", None)  # Python sets it where no locale is set
    assert env == container.env
    user, group, *groups = result.pop("user")
    assert (user, group) == (65532, 65532)
    assert set(groups) <= {65532}
    assert result == {
        "login": None,
        "process": 1,
        "capabilities": [0, 0, 0, 0, 0],
        "no_new_privileges": "1",
        "folder": "/tmp",
        "read_only": True,
        "writable": ["/tmp"],
    }


def test_values_of_references_are_resolved(surroundings: PodContext) -> None:
    objects = [
        {"kind": "ConfigMap", "metadata": {"name": "proxy"}, "data": {"address": "http://proxy:3128"}},
        {"kind": "Secret", "metadata": {"name": "login"}, "stringData": {"password": "hidden"}},
    ]
    around = replace(surroundings, objects=objects)
    by_map = {"configMapKeyRef": {"name": "proxy", "key": "address"}}
    by_secret = {"secretKeyRef": {"name": "login", "key": "password"}}
    by_field = {"fieldRef": {"fieldPath": "metadata.namespace"}}
    results = [resolve_env({"name": "A", "valueFrom": source}, around) for source in (by_map, by_secret, by_field)]
    assert results == ["http://proxy:3128", "hidden", NAMESPACE]
