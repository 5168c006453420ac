"""What only a GPU can show. Beside torch this needs pytest alone:

PYTHONPATH=operator:trainer:. python -m pytest -c /dev/null --noconftest --import-mode=importlib tests/gpu
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ddp_trainer.api import Trainer
from ddp_trainer.cli import parse
from ddp_trainer.data.loader import Batch
from ddp_trainer.distributed.world import RankEnv
from ddp_trainer.engine import Engine, StepResult
from ddp_trainer.observability.meters import Timeline
from ddp_trainer.optim import OptimConfig, build_optimizer
from tests.support.trainer_plugins import COLOURED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
SMALL = [
    "--data", COLOURED, "--model", "small-resnet", "--model-width", "8", "--batch-size", "20", "--lr", "0.05",
    "--epochs", "6", "--device", "cuda", "--metrics-port", "0", "--checkpoint-keep", "99",
]  # fmt: skip


def train(folder: Path, *options: str) -> dict[str, torch.Tensor]:
    """Train in this process; return the weights."""
    Trainer(parse([*SMALL, *options, "--checkpoint-dir", str(folder)]), env=RankEnv()).fit()
    weights: dict[str, torch.Tensor] = torch.load(folder / "model.pt", weights_only=True)
    return weights


def accuracy(folder: Path) -> float:
    """Return the accuracy of the newest checkpoint."""
    return float(json.loads(max(folder.glob("step-*.json")).read_text())["accuracy"])


@pytest.mark.parametrize("precision", ["fp32", "torch", "tf32", "bf16", "fp16", "auto"])
def test_run_learns_in_every_precision(precision: str, tmp_path: Path) -> None:
    train(tmp_path, "--precision", precision)
    assert accuracy(tmp_path) == 1.0


def test_default_run_learns_and_states_its_numerics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path)
    assert accuracy(tmp_path) == 1.0
    assert capsys.readouterr().out.count("defaults on this GPU: precision ") == 1


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "novograd"])
def test_run_that_is_cut_ends_in_same_weights(optimizer: str, tmp_path: Path) -> None:
    options = ("--optimizer", optimizer, "--deterministic", "true", "--dropout", "0.2", "--augment", "crop,flip")
    whole = train(tmp_path / "whole", *options)
    train(tmp_path / "cut", *options, "--max-steps", "7")
    resumed = train(tmp_path / "cut", *options)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_scaled_loss_resumes_with_its_scale(tmp_path: Path) -> None:
    options = ("--precision", "fp16", "--deterministic", "true")
    whole = train(tmp_path / "whole", *options)
    train(tmp_path / "cut", *options, "--max-steps", "7")
    resumed = train(tmp_path / "cut", *options)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_compiled_step_learns(tmp_path: Path) -> None:
    train(tmp_path, "--compile", "true")
    assert accuracy(tmp_path) == 1.0


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_fused_optimiser_steps_as_on_cpu(name: str) -> None:
    config = OptimConfig(name=name, lr=0.1, weight_decay=0.01)
    after = []
    for device in ("cpu", "cuda"):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 64, device=device))
        optimizer = build_optimizer(config, [weight])
        assert optimizer.defaults["fused"]
        for _ in range(3):
            weight.grad = weight.detach() * 0.5
            optimizer.step()
        after.append(weight.detach().cpu())
    torch.testing.assert_close(after[0], after[1])


def test_devices_time_is_counted_not_hosts() -> None:
    timeline = Timeline(torch.device("cuda", 0))
    begin = timeline.now()
    torch.cuda._sleep(500_000_000)  # cycles: a fifth of a second or more, for which the host does not wait
    end = timeline.now()
    assert not timeline.reached(end)
    assert timeline.seconds(begin, end) > 0.1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gradients_of_two_gpus_are_averaged_over_nccl(tmp_path: Path) -> None:
    from tests.support.trainer_ranks import train as train_ranks

    train_ranks(tmp_path, [*SMALL, "--checkpoint-dir", str(tmp_path)], 2)
    assert accuracy(tmp_path) == 1.0


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
