"""The CUDA graph of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddp_trainer.data.loader import Batch
from ddp_trainer.engine import Engine, StepResult
from tests.gpu.small_runs import gpu_only, on_device, train

pytestmark = [*on_device, gpu_only]
GRAPH = ["--cuda-graph", "auto", "--dropout", "0.2", "--augment", "crop,flip", "--deterministic", "true"]


def test_replayed_steps_end_in_weights_of_eager_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replayed = train(tmp_path / "graph", *GRAPH, "--epochs", "12", "--checkpoint-every-steps", "5")
    assert "CUDA graph of a step: recorded after 11 steps" in capsys.readouterr().out
    eager = train(tmp_path / "eager", *GRAPH, "--epochs", "12", "--cuda-graph", "off")
    assert all(torch.equal(eager[name], replayed[name]) for name in eager)


def test_failed_recording_is_undone_and_run_continues_eagerly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Engine.take

    def read_in_recording(self: Engine, batch: Batch) -> StepResult:
        result = take(self, batch)
        if torch.cuda.is_current_stream_capturing():
            result.loss.item()
        return result

    eager = train(tmp_path / "eager", *GRAPH, "--epochs", "12", "--cuda-graph", "off")
    monkeypatch.setattr(Engine, "take", read_in_recording)
    failed = train(tmp_path / "failed", *GRAPH, "--epochs", "12")
    assert (
        "CUDA graph of a step: not recorded (steps run kernel by kernel): the recording failed"
        in capsys.readouterr().out
    )
    assert all(torch.equal(eager[name], failed[name]) for name in eager)
    # Memory is released, random numbers are drawn, and the next recording works.
    torch.cuda.empty_cache()
    torch.rand(1, device="cuda")
    monkeypatch.setattr(Engine, "take", take)
    train(tmp_path / "next", *GRAPH, "--epochs", "12")
    assert "CUDA graph of a step: recorded after 11 steps" in capsys.readouterr().out


def test_trace_of_graph_run_starts_after_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", *GRAPH, "--epochs", "12", "--profile", str(tmp_path / "traces"))
    message = capsys.readouterr().out
    assert message.index("recorded after 11 steps") < message.index("traces of steps 23 to 27")
