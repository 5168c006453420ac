"""Run the FSDP script of docs/your-script.md under ``ddp run``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tests.support import ROOT
from tests.support.ddp_run import DdpRun
from tests.unit.test_docs import fenced

pytestmark = pytest.mark.process

PAGE = (ROOT / "docs" / "your-script.md").read_text(encoding="utf-8")


def build_job(epochs: int, nodes: int) -> str:
    container = {
        "name": "trainer",
        "image": "registry.example/any:1",
        "command": ["python", "train.py"],
        "env": [{"name": "EPOCHS", "value": str(epochs)}],
    }
    return yaml.safe_dump(
        {
            "apiVersion": "ddp-operator.dev/v1alpha1",
            "kind": "DDPTrainingJob",
            "metadata": {"name": "sharded"},
            "spec": {
                "nodes": nodes,
                "checkpoint": {"claimName": "sharded", "path": "/checkpoints"},
                "template": {"spec": {"containers": [container]}},
            },
        }
    )


def run_job(folder: Path, epochs: int, nodes: int) -> str:
    with DdpRun(folder, build_job(epochs, nodes)) as run:
        assert run.wait() == 0, run.output
        log = (run.run_folder / "logs" / "attempt-1-pod-0.log").read_text()
        shutil.rmtree(run.run_folder)  # DdpRun expects one run in the folder; the claim remains
        return log


def test_fsdp_script_resumes_sharded_checkpoint_with_fewer_ranks(tmp_path: Path) -> None:
    (script,) = [block for block in fenced(PAGE, "python") if "fully_shard" in block]
    (tmp_path / "train.py").write_text(script)
    first = run_job(tmp_path, epochs=2, nodes=2)
    assert "epoch 2/2: loss" in first
    assert len(list((tmp_path / "ddp-runs" / "claims" / "sharded" / "epoch-0002").glob("*.distcp"))) == 2
    second = run_job(tmp_path, epochs=3, nodes=1)
    assert "resume after epoch 2" in second
    assert "epoch 3/3: loss" in second
    assert "epoch 2/3: loss" not in second
