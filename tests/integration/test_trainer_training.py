"""The trainer as its users start it: torchrun, the presets, and the metrics endpoint during training."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

from ddp_sdk import contract
from tests.support import PATIENCE
from tests.support.tiny_datasets import write_cifar10
from tests.support.trainer_ranks import start, train

pytestmark = pytest.mark.process


def test_every_rank_serves_metrics_while_training(tmp_path: Path) -> None:
    arguments = ["--preset", "digits-resnet", "--model-width", "4", "--epochs", "60"]
    environ = {contract.ENV_RUNTIME_DIR: str(tmp_path)}
    with start(tmp_path, arguments, 2, environ, hold="epoch 2/") as ranks:
        ranks.wait_for("epoch 2/")
        for rank in range(2):
            port = int((tmp_path / "metrics" / f"{rank}.port").read_text())
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as response:
                page = response.read().decode()
            result = dict(re.findall(rf'^(\w+){{rank="{rank}"}} (\S+)$', page, re.MULTILINE))
            assert float(result["ddp_samples_total"]) > 0
            assert 0 < float(result["ddp_progress_ratio"]) < 1
            assert float(result["ddp_loss"]) > 0
            assert 0 < float(result["ddp_validation_accuracy_ratio"]) <= 1
            assert float(result["ddp_compute_seconds_total"]) > 0
            assert result["ddp_world_size"] == "2.0"


def test_cifar10_is_read_from_its_real_format_and_trains(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "data")
    arguments = ["--preset", "cifar10-resnet18", "--data-dir", str(tmp_path / "data"), "--data-verify", "false"]
    arguments += ["--batch-size", "10", "--epochs", "1", "--log-every", "1", "--output-dir", str(tmp_path / "out")]
    ranks = train(tmp_path, arguments, 2)
    assert "100 samples, 5 steps in 1 epoch(s)" in ranks.output(0)
    assert (tmp_path / "out" / "model.pt").exists()


def test_unpublished_cifar10_files_are_user_error(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "data")
    with start(tmp_path, ["--preset", "cifar10-resnet18", "--data-dir", str(tmp_path / "data")]) as ranks:
        assert ranks.codes() == [contract.EXIT_USER_ERROR]
    assert "damaged or not the published ones" in ranks.output(0)
    assert "--data-verify false" in ranks.output(0)
