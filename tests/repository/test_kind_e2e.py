"""`make e2e` without a cluster: its calls, their order, and that nothing remains. Needs no Docker itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ddp_operator import __version__
from tests.support import ROOT
from tests.support.recording_tools import run_script

SCRIPT = ROOT / "deploy" / "kind" / "e2e"
# Records its call, prints "ddp-taken" as the existing cluster, and fails if FAIL matches.
FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in
  "kind get clusters") echo ddp-taken ;;
  "kind get nodes"*) echo ddp-e2e-worker ;;
  "kind create"*)
    cp "$(echo "$*" | sed 's/.*--config \\([^ ]*\\).*/\\1/')" "$CALLS.kind"
    echo kubeconfig > "$(echo "$*" | sed 's/.*--kubeconfig \\([^ ]*\\).*/\\1/')" ;;
  "python-of-mine"*) env > "$CALLS.env" ;;
esac
case "$(basename "$0") $*" in "${FAIL:-nothing}"*) exit 3 ;; esac
"""
BASICS = ("bash", "basename", "cat", "cp", "dirname", "env", "git", "grep", "mkdir", "mktemp", "rm", "sed", "sh")
TOOLS = ("docker", "kind", "kubectl", "helm", "python-of-mine")


def run(folder: Path, *arguments: str, without: str = "", **env: str) -> tuple[int, str, list[str]]:
    """Run the script with tools that only record their calls. Return code, output and calls."""
    tools = [name for name in TOOLS if name != without]
    env = {"PYTHON": "python-of-mine", **env}
    return run_script(SCRIPT, *arguments, folder=folder, tool=FAKE, tools=tools, basics=BASICS, **env)


def kinds(calls: list[str]) -> list[str]:
    return [" ".join(call.split()[:2]) for call in calls]


def test_script_builds_loads_installs_tests_and_removes(tmp_path: Path) -> None:
    code, output, calls = run(tmp_path, "-k", "sample")
    assert code == 0, output
    assert kinds(calls) == [
        "docker info", "kind get", "kind create", "docker info", "docker build", "docker build", "docker save",
        "kind load", "docker save", "kind load", "helm install", "helm test",
        "python-of-mine -m", "kind get", "docker exec", "kind delete",
    ]  # fmt: skip
    # It builds the images that the chart and the samples name.
    for name in ("operator", "trainer"):
        image = f"localhost/ddp-operator/{name}:{__version__}"
        for step in ("docker build", "docker save"):
            assert any(call.startswith(step) and image in call for call in calls)
    assert "kind load image-archive --name ddp-e2e" in calls[7]
    assert "helm install ddp-operator charts/" in calls[10]
    assert calls[12] == "python-of-mine -m pytest tests/e2e -k sample"
    assert not list(tmp_path.glob("tmp.*"))


def test_nodes_can_be_switched_off_and_share_folder_that_is_emptied(tmp_path: Path) -> None:
    code, output, calls = run(tmp_path)
    assert code == 0, output
    cluster = yaml.safe_load((tmp_path / "calls.kind").read_text())
    (mount,) = cluster["nodes"][0].pop("extraMounts")
    assert all(node.pop("extraMounts") == [mount] for node in cluster["nodes"][1:])
    assert cluster == yaml.safe_load((ROOT / "deploy" / "kind" / "cluster.yaml").read_text())
    assert mount["hostPath"].startswith(str(tmp_path))
    report = dict(line.split("=", 1) for line in (tmp_path / "calls.env").read_text().splitlines() if "DDP_E2E" in line)
    assert yaml.safe_load(report["DDP_E2E_CHECKPOINTS"]) == {"hostPath": {"path": mount["containerPath"]}}
    assert (report["DDP_E2E_NODE_STOP"], report["DDP_E2E_NODE_START"]) == ("docker stop", "docker start")
    # The operator is on no node that a test switches off; only a node's root may remove the pods' files.
    assert 'nodeSelector={"node-role.kubernetes.io/control-plane":""}' in calls[10]
    assert f"docker exec ddp-e2e-worker find {mount['containerPath']} -mindepth 1 -delete" in calls


@pytest.mark.parametrize("step", ["docker build", "kind load", "helm install", "helm test", "python-of-mine"])
def test_failure_is_result_and_cluster_is_removed(tmp_path: Path, step: str) -> None:
    code, output, calls = run(tmp_path, FAIL=step)
    assert code == 3, output
    assert calls[-1] == "kind delete cluster --name ddp-e2e"
    assert "kubectl" in " ".join(calls), "a cluster that was there is asked what became of it, before it goes"


def test_cluster_is_kept_on_request(tmp_path: Path) -> None:
    code, output, calls = run(tmp_path, KEEP="1", CLUSTER="mine")
    assert code == 0, output
    assert "kind delete" not in kinds(calls)
    assert "kind delete cluster --name mine" in output
    assert list(tmp_path.glob("tmp.*/kubeconfig"))


def test_foreign_cluster_is_unchanged(tmp_path: Path) -> None:
    code, output, calls = run(tmp_path, CLUSTER="ddp-taken")
    assert code == 2
    assert "ddp-taken exists already" in output
    assert kinds(calls) == ["docker info", "kind get"]


@pytest.mark.parametrize("tool", ["docker", "kind", "helm"])
def test_missing_tool_is_named_with_alternative(tmp_path: Path, tool: str) -> None:
    code, output, calls = run(tmp_path, without=tool)
    assert (code, calls) == (2, [])
    assert f"not found: {tool}" in output
    assert "DDP_E2E_KUBECONFIG" in output


def test_unresponsive_docker_is_reported(tmp_path: Path) -> None:
    code, output, calls = run(tmp_path, FAIL="docker info")
    assert code == 2
    assert "docker does not respond" in output
    assert kinds(calls) == ["docker info"]
