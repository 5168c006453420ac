"""Validation without training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ddp_trainer.cli import main
from tests.support import trainer_plugins as plugins
from tests.support.saved_states import load

DIGITS = [
    "--preset", "digits-resnet", "--model-width", "4", "--batch-size", "64", "--device", "cpu", "--metrics-port", "0",
]  # fmt: skip


def said_scores(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the scores of the last printed validation."""
    return re.findall(r"validation: (.*) in ", capsys.readouterr().out)[-1]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_validation_of_weights_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ["--checkpoint-dir", str(tmp_path / "kept")]
    peers = ["--log-dir", str(tmp_path / "logs"), "--csv-dir", str(tmp_path / "csv")]
    assert main([*DIGITS, *kept, *peers, "--max-steps", "20"]) == 0
    expected = said_scores(capsys)
    before = contents(tmp_path)
    # An attempt that runs in the folder is not disturbed; settings of the training have no effect.
    monkeypatch.setenv("DDP_ATTEMPT", "9")
    monkeypatch.setenv("DDP_RUNTIME_DIR", str(tmp_path / "runtime"))
    assert main([*DIGITS, *kept, *peers, "--eval-only", "--optimizer", "adamw", "--resume", "never"]) == 0
    assert said_scores(capsys) == expected
    page = (tmp_path / "runtime" / "metrics" / "0.prom").read_text()
    assert f'ddp_validation_accuracy_ratio{{rank="0"}} {expected.split()[-1]}'[:-2] in page
    assert {path: data for path, data in contents(tmp_path).items() if "runtime" not in path.parts} == before
    assert main([*DIGITS, "--init-from", str(tmp_path / "kept" / "model.pt"), "--eval-only"]) == 0
    assert said_scores(capsys) == expected


def test_missing_weights_are_user_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        assert main([*DIGITS, "--eval-only", *arguments]) == 81
        return capsys.readouterr().err

    assert "eval_only: no weights to validate; give a --checkpoint-dir" in refused()
    assert "none holds no checkpoint; give" in refused("--checkpoint-dir", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    assert main([*DIGITS, "--max-steps", "1", "--output-dir", str(tmp_path)]) == 0
    weights = load(tmp_path / "model.pt")
    del weights["head.weight"]
    torch.save(weights, tmp_path / "part.pt")
    assert "lacks 1 of the model's" in refused("--init-from", str(tmp_path / "part.pt"))


def test_stopped_validation_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*DIGITS, "--model", plugins.INTERRUPTING, "--checkpoint-dir", str(tmp_path), "--eval-batch-size", "50"]
    assert main([*arguments, "--max-steps", "2"]) == 0
    before = contents(tmp_path)
    monkeypatch.setenv("TEST_INTERRUPT", "0:2:VALIDATIONSIGTERM")
    capsys.readouterr()
    assert main([*arguments, "--eval-only"]) == 85
    assert "nothing saved" in capsys.readouterr().out
    assert contents(tmp_path) == before
