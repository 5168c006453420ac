"""The preset of a small GPT: its loss, its scores, its throughput, and an exact resume."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest
import torch

from ddp_sdk.errors import UserError
from ddp_trainer.cli import main
from ddp_trainer.config.run import resolve
from ddp_trainer.data import DataConfig
from ddp_trainer.data.text import LENGTH, load
from ddp_trainer.models import ModelConfig, build_model
from ddp_trainer.tasks import LanguageModel
from tests.support import saved_states

GPT = [
    "--preset", "python-reference-gpt", "--model-width", "32", "--validation-fraction", "0.02", "--device", "cpu",
    "--precision", "fp32", "--metrics-port", "0",
]  # fmt: skip


def test_windows_cover_text_and_targets_are_next_bytes() -> None:
    data = load(DataConfig(validation_fraction=0.25))
    train = data.train
    validation = data.validation
    assert len(train) / (len(train) + len(validation)) == pytest.approx(0.75, abs=0.01)  # type: ignore[arg-type]
    inputs, targets = train[3]  # type: ignore[index]
    more, _ = train[4]  # type: ignore[index]
    assert inputs.shape == targets.shape == (LENGTH,)
    assert torch.equal(inputs[1:], targets[:-1])
    assert targets[-1] == more[0]
    assert b"Python" in bytes(torch.cat([train[index][0] for index in range(200)]).tolist())  # type: ignore[index]


def test_missing_text_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UserError, match=r"^data\.name: this Python has no module pydoc_data; use another"):
        load(DataConfig())


def test_output_depends_only_on_previous_tokens_and_model_has_size() -> None:
    config = resolve("python-reference-gpt")
    model = build_model(config.model, LENGTH, 256)
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 0.9e6
    tokens = torch.randint(256, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    second = tokens.clone()
    second[:, 60:] = 7
    with torch.no_grad():
        assert torch.equal(model(tokens)[:, :60], model(second)[:, :60])
        assert not torch.equal(model(tokens)[:, 60:], model(second)[:, 60:])
    with pytest.raises(UserError, match=r"model\.width: 48 is not a multiple of 32 \(gpt\)"):
        build_model(ModelConfig(name="gpt", width=48), LENGTH, 256)


def test_scores_are_by_token() -> None:
    task = LanguageModel()
    logits = torch.zeros(2, 3, 5)
    target = torch.tensor([[0, 1, 0], [2, 0, 4]])
    scores = task.scores(task.totals(logits, target).tolist())
    assert scores == {"loss": pytest.approx(math.log(5)), "accuracy": pytest.approx(0.5)}
    assert float(task.loss(logits, target)) == pytest.approx(math.log(5))
    assert task.correct(logits, target).tolist() == [3.0, 6.0]
    assert task.tokens(target) == 6


def test_gpt_beats_byte_frequencies_and_reports_tokens_per_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DDP_RUNTIME_DIR", str(tmp_path))
    assert main([*GPT, "--max-steps", "60", "--lr", "0.01"]) == 0
    message = capsys.readouterr().out
    (loss,) = re.findall(r"validation: loss ([\d.]+) accuracy", message)
    text = torch.cat([load(DataConfig()).train[index][0] for index in range(1000)])  # type: ignore[index]
    shares = torch.bincount(text).double() / len(text)
    entropy = float(-(shares * shares.clamp(min=1e-300).log()).sum())
    assert float(loss) < entropy - 0.5
    assert re.search(r"step 60/60 loss [\d.]+ \d+ tokens/s lr", message)
    assert re.search(r"training: [\d.]+ s, \d+ tokens/s", message)
    assert "samples/s" not in message
    page = (tmp_path / "metrics" / "0.prom").read_text()
    (tokens,) = re.findall(r'ddp_tokens_total{rank="0"} (\S+)', page)
    (samples,) = re.findall(r'ddp_samples_total{rank="0"} (\S+)', page)
    assert float(tokens) == LENGTH * float(samples) > 0


def test_run_that_was_cut_ends_in_bitwise_same_state(tmp_path: Path) -> None:
    whole, cut = ([*GPT, "--max-steps", "6", "--checkpoint-dir", str(tmp_path / name)] for name in ("whole", "cut"))
    assert main(whole) == 0
    assert main([*cut, "--checkpoint-every-steps", "3"]) == 0
    for path in (tmp_path / "cut").glob("*06.*"):
        path.unlink()
    torch.manual_seed(12345)
    assert main(cut) == 0
    for name in ("model.pt", "step-000000006.pt"):
        assert saved_states.same(
            saved_states.load(tmp_path / "cut" / name), saved_states.load(tmp_path / "whole" / name)
        )
