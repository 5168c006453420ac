"""The operator as a process: both ways to start it, and its message if it cannot start."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ddp_operator
from tests.support import PATIENCE, ROOT
from tests.support.builders import job_manifest
from tests.support.control_plane import free_ports
from tests.support.operator_process import MODULE, OperatorProcess
from tests.support.standin import ClusterActors, StandIn
from tests.support.warm import WarmProcess


def run(command: Sequence[str], **env: str) -> subprocess.CompletedProcess[str]:
    """Run the operator to its end; its output is the result's ``stdout``."""
    expected = {"DDP_OPERATOR_HEALTH_PORT": "0", **env}
    inherited = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        process = WarmProcess(command, output=output, folder=ROOT, environ=inherited | expected)
        try:
            return subprocess.CompletedProcess(command, process.wait(PATIENCE), output.read_text())
        finally:
            process.kill()


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode not in (0, None)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    for word in words:
        assert word in lines[0]


async def test_operator_starts_and_exits_on_sigterm(
    server: StandIn, actors: ClusterActors, kubeconfig: Path, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    with OperatorProcess(kubeconfig, tmp_path / "log", port=port) as operator:
        await actors.create(job_manifest())
        await actors.child_job("digits-1")
    assert "ready: serving all namespaces" in operator.log
    assert "Traceback" not in operator.log
    assert "Hung" not in operator.log


async def test_logs_can_be_json(actors: ClusterActors, kubeconfig: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    env = {"DDP_OPERATOR_LOG_FORMAT": "json", "DDP_OPERATOR_LOG_LEVEL": "debug"}
    with OperatorProcess(kubeconfig, tmp_path / "log", port=port, env=env, warm=True) as operator:
        pass
    assert all(line.startswith("{") for line in operator.log.splitlines())


def test_missing_crd_is_named_with_its_remedy(tmp_path: Path) -> None:
    with StandIn(crd=False) as server:
        done = run(MODULE, KUBECONFIG=str(server.write_kubeconfig(tmp_path)))
    assert_one_line(done, "ddptrainingjobs.ddp-operator.dev is not installed", "kubectl apply")


async def test_deleted_crd_ends_operator_and_its_return_allows_start(
    server: StandIn, actors: ClusterActors, kubeconfig: Path, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    operator = OperatorProcess(kubeconfig, tmp_path / "log", port=port, warm=True)
    with operator:
        assert operator.process is not None
        await actors.create(job_manifest())
        await actors.child_job("digits-1")
        server.withdraw("DDPTrainingJob")
        process = operator.process
        operator.process = None
        assert process.wait(PATIENCE) == 1
    assert "Traceback" not in operator.log
    last = operator.log.splitlines()[-1]
    assert "exiting: the custom resource ddptrainingjobs.ddp-operator.dev is not installed: run `kubectl apply" in last
    assert server.get("Lease", "ddp-operator")["spec"]["holderIdentity"] == ""  # type: ignore[index]
    server.install()
    with operator:
        await actors.create(job_manifest("again"))
        await actors.child_job("again-1")


def test_missing_permissions_are_named(server: StandIn, kubeconfig: Path) -> None:
    server.allow(lambda name: (name["resource"], name["verb"]) not in {("jobs", "create"), ("pods", "watch")})
    done = run(MODULE, KUBECONFIG=str(kubeconfig))
    assert_one_line(done, "create jobs.batch in all namespaces", "watch pods in all namespaces", "rbac.yaml")
    assert "services" not in done.stdout


def test_permissions_are_checked_for_served_namespaces(server: StandIn, kubeconfig: Path) -> None:
    server.allow(lambda name: name.get("namespace") == "a")
    done = run(MODULE, KUBECONFIG=str(kubeconfig), DDP_OPERATOR_NAMESPACES="a,b")
    assert_one_line(done, "get, list, watch, create, patch, delete jobs.batch in namespace b")
    assert "namespace a" not in done.stdout


def test_unreachable_api_server_is_named_at_start(server: StandIn, kubeconfig: Path) -> None:
    port = server.port
    server.stop()
    done = run(MODULE, KUBECONFIG=str(kubeconfig))
    assert_one_line(done, "cannot reach the API server", f"127.0.0.1:{port}")


def test_missing_credentials_are_reported(tmp_path: Path) -> None:
    assert_one_line(run(MODULE, HOME=str(tmp_path)), "no credentials", "KUBECONFIG")


def test_bad_setting_is_refused_before_anything_else() -> None:
    done = run(MODULE, DDP_OPERATOR_WORKERS="many")
    assert_one_line(done, "DDP_OPERATOR_WORKERS", "'many'", "a whole number")
    assert done.returncode == 2


def test_taken_port_is_named(server: StandIn, kubeconfig: Path) -> None:
    done = run(MODULE, KUBECONFIG=str(kubeconfig), DDP_OPERATOR_HEALTH_PORT=str(server.port))
    assert_one_line(done, f"port {server.port}", "DDP_OPERATOR_HEALTH_PORT")


def test_help_and_version_need_no_cluster(tmp_path: Path) -> None:
    assert run((*MODULE, "--version"), HOME=str(tmp_path)).stdout == f"ddp-operator {ddp_operator.__version__}\n"
    assert "DDP_OPERATOR_NAMESPACES" in run((*MODULE, "--help"), HOME=str(tmp_path)).stdout


def test_process_imports_no_unneeded_module(server: StandIn, kubeconfig: Path) -> None:
    code = (
        "import sys; from ddp_operator.__main__ import main; sys.argv = ['x']\n"
        "try: main()\nfinally: print([name for name in ('kubernetes', 'torch', 'rich', 'cel_expr_python', 'jsonschema')"
        " if sys.modules.get(name)])"
    )
    server.allow(lambda name: False)
    environ = os.environ | {"KUBECONFIG": str(kubeconfig), "DDP_OPERATOR_HEALTH_PORT": "0"}
    command = [MODULE[0], "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "[]\n"
