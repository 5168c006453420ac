"""One run in several ways with the same result: on other numbers of ranks, and interrupted in the middle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_trainer.data import DataConfig
from ddp_trainer.data.datasets import load_datasets
from ddp_trainer.models import ModelConfig, build_model
from tests.support.saved_states import load, same
from tests.support.trainer_ranks import start, train

pytestmark = pytest.mark.process

DIGITS = ["--preset", "digits-resnet", "--model-width", "8", "--log-every", "5"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load(folder / "model.pt")


def newest(folder: Path) -> dict[str, Any]:
    return load(max(folder.glob("step-*.pt")))


# Everything that has a state or draws numbers: batch norm, dropout, augmentation, momentum, warm-up and cosine.
STATEFUL = [*DIGITS, "--dropout", "0.2", "--batch-size", "16", "--epochs", "3", "--checkpoint-every-steps", "10"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(folder, [*STATEFUL, "--checkpoint-dir", str(folder)], 2)
    return folder


def test_validation_of_two_ranks_is_that_of_saved_model_on_all_samples(uninterrupted: Path) -> None:
    # Ranks have separate batch-norm statistics, and 359 samples are not divisible by two.
    datasets = load_datasets(DataConfig())
    model = build_model(ModelConfig(width=8, dropout=0.2), 1, 10)
    model.load_state_dict(weights(uninterrupted))
    model.eval()
    images = (datasets.validation.images.float() - datasets.mean[0]) / datasets.std[0]
    with torch.inference_mode():
        outputs = model(images)
    loss = float(torch.nn.functional.cross_entropy(outputs, datasets.validation.labels))
    accuracy = float((outputs.argmax(1) == datasets.validation.labels).float().mean())
    message = re.findall(r"validation: loss (\S+) accuracy (\S+)", (uninterrupted / "rank-0.txt").read_text())[-1]
    assert float(message[0]) == pytest.approx(loss, abs=2e-4)
    assert float(message[1]) == pytest.approx(accuracy, abs=1e-4)


def test_killed_run_resumes_to_bitwise_same_state(tmp_path: Path, uninterrupted: Path) -> None:
    arguments = [*STATEFUL, "--checkpoint-dir", str(tmp_path)]
    # After the first epoch, in the middle of the second.
    with start(tmp_path, arguments, 2, hold="epoch 2/3 step 60/") as ranks:
        ranks.wait_for("epoch 2/3 step 60/")
        ranks.kill()
        assert ranks.codes() == [-9, -9]
    assert not (tmp_path / "model.pt").exists()
    assert "resumed from" in train(tmp_path, arguments, 2).output(0)
    assert same(newest(tmp_path), newest(uninterrupted))
    assert same(weights(tmp_path), weights(uninterrupted))


@pytest.mark.nightly
def test_language_model_resumes_bitwise_on_two_ranks(tmp_path: Path) -> None:
    arguments = ["--preset", "python-reference-gpt", "--model-width", "32", "--max-steps", "6"]
    arguments += ["--validation-fraction", "0.02", "--checkpoint-every-steps", "3"]
    for name in ("whole", "cut"):
        train(tmp_path / name, [*arguments, "--checkpoint-dir", str(tmp_path / name)], 2)
    for path in (tmp_path / "cut").glob("step-*06.*"):
        path.unlink()
    again = train(tmp_path / "cut", [*arguments, "--checkpoint-dir", str(tmp_path / "cut")], 2)
    assert "3 steps and 0 epoch(s) are done" in again.output(0)
    assert same(newest(tmp_path / "cut"), newest(tmp_path / "whole"))


def test_sigterm_on_one_rank_saves_same_step_on_all_and_resumes_bitwise(tmp_path: Path, uninterrupted: Path) -> None:
    arguments = [*STATEFUL, "--checkpoint-dir", str(tmp_path), "--checkpoint-every-steps", "0"]
    with start(tmp_path, arguments, 2, hold="epoch 1/3 step 5/") as ranks:
        ranks.wait_for("epoch 1/3 step 5/")
        ranks.processes[1].terminate()
        ranks.release()
        assert ranks.codes() == [85, 85]
        first = ranks.output(0)
        assert "preempted: stopped after step" in first
        assert ranks.output(1) == ""
    step = newest(tmp_path)["position"]["step"]
    assert 5 <= step < 60
    assert f"stopped after step {step};" in first
    assert f"resumed from {tmp_path}: {step} steps" in train(tmp_path, arguments, 2).output(0)
    assert same(newest(tmp_path)["engine"], newest(uninterrupted)["engine"])


def test_restart_of_finished_run_does_nothing(uninterrupted: Path) -> None:
    before = newest(uninterrupted)
    ranks = train(uninterrupted, [*STATEFUL, "--checkpoint-dir", str(uninterrupted)], 2)
    assert "loss" not in ranks.output(0).split("training:")[1].split("done:")[0]
    assert same(newest(uninterrupted), before)
