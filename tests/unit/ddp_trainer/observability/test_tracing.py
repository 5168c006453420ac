"""The traces of ``--profile``: their content, the messages about them, and a run without them."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_trainer.cli import main
from ddp_trainer.observability.tracing import LEFT_OUT, TRACED
from tests.support.saved_states import load, same

# Six steps an epoch: a trace of five steps after ten contains validations.
DIGITS = [
    "--preset", "digits-resnet", "--model-width", "4", "--batch-size", "256", "--epochs", "3", "--device", "cpu",
    "--metrics-port", "0",
]  # fmt: skip


def test_trace_has_configured_steps_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DDP_RUNTIME_DIR", str(tmp_path / "runtime"))
    folder = tmp_path / "traces"
    assert main([*DIGITS, "--checkpoint-dir", str(tmp_path / "with"), "--profile", str(folder)]) == 0
    assert f"traces of steps 11 to 15 of each rank in {folder}" in capsys.readouterr().out
    (trace,) = folder.iterdir()
    assert trace.name == "rank-0.json.gz"
    assert (tmp_path / "runtime" / "traces" / "0").read_text() == str(trace)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = {match[0] for event in events if (match := re.fullmatch(r"ProfilerStep#(\d+)", event["name"]))}
    assert len(steps) == TRACED
    assert {f"ProfilerStep#{LEFT_OUT + number}" for number in range(TRACED)} == steps
    assert {"aten::conv2d", "Optimizer.step#SGD.step"} <= {event["name"] for event in events}

    def fail(**named: Any) -> Any:
        raise AssertionError("a profiler was made")

    monkeypatch.setattr(torch.profiler, "profile", fail)
    assert main([*DIGITS, "--checkpoint-dir", str(tmp_path / "without")]) == 0
    assert same(load(tmp_path / "with" / "model.pt"), load(tmp_path / "without" / "model.pt"))


def test_short_run_and_unwritable_folder_warn_about_missing_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*DIGITS, "--max-steps", "12", "--profile", str(tmp_path)]) == 0
    message = capsys.readouterr().err
    assert "warning: no traces: the run took 12 steps, but the traced ones are 11 to 15" in message
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert main([*DIGITS, "--profile", str(tmp_path / "file" / "traces")]) == 81
    assert "profile_dir: cannot write to" in capsys.readouterr().err
    (tmp_path / "traces" / "rank-0.json.gz").mkdir(parents=True)
    assert main([*DIGITS, "--max-steps", "16", "--profile", str(tmp_path / "traces")]) == 0
    message = capsys.readouterr()
    assert "warning: rank 0: cannot write to" in message.err
    assert "done: 16 steps" in message.out
