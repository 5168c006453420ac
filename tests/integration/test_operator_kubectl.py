"""kubectl against the stand-in, so that its users may look into it as they are used to."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.standin import StandIn

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")

Kubectl = Callable[..., str]


@pytest.fixture
def kubectl(server: StandIn, kubeconfig: Path, tmp_path: Path) -> Kubectl:
    """Run kubectl; its output, or an assertion with its words."""

    def run(*args: str) -> str:
        command = ["kubectl", f"--kubeconfig={kubeconfig}", f"--cache-dir={tmp_path / 'cache'}", *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_kubectl_applies_lists_scales_and_deletes_sample(server: StandIn, kubectl: Kubectl) -> None:
    sample = str(ROOT / "deploy" / "samples" / "digits.yaml")
    assert "created" in kubectl("apply", "--validate=false", "-f", sample)
    assert "unchanged" in kubectl("apply", "--validate=false", "-f", sample)
    assert "digits" in kubectl("get", "ddp")
    assert kubectl("get", "ddp", "digits", "-o", "jsonpath={.spec.nodes}") == "2"
    kubectl("scale", "ddp/digits", "--replicas=3")
    assert kubectl("get", "ddp", "digits", "-o", "jsonpath={.spec.nodes}") == "3"
    kubectl("label", "ddp", "digits", "team=a")
    assert "digits" in kubectl("get", "ddp", "-l", "team=a", "-o", "name")
    assert "deleted" in kubectl("delete", "ddp", "digits")
    assert server.list("DDPTrainingJob") == []
