"""How a run ends, mostly for mistakes: one line on rank 0, the same exit code on every rank, and no hang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_sdk import contract
from tests.support.trainer_ranks import start, train

pytestmark = pytest.mark.process

PRESET = ["--preset", "digits-resnet"]
DIGITS = [*PRESET, "--model-width", "4", "--batch-size", "16", "--log-every", "5"]
OCCUPIED = ["--checkpoint-dir", "ckpt"]
"""A folder with checkpoints of another run."""
# Users' mistakes: unsuitable data and models.
MINE = """
import torch
from torch import nn
from ddp_trainer.data.arrays import Datasets, ImageData


def data(images, labels, classes=10):
    one = ImageData(images, labels)
    return Datasets(one, one, num_classes=classes, mean=(0.0,), std=(1.0,))


def single(config):
    return data(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))


def floats(config):
    return data(torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64))


def flat(config):
    return data(torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))


def beyond(config):
    return data(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.full((4,), 10))


def of_colour(config, in_channels, num_classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(num_classes))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(64, 10), nn.Linear(3, 3)

    def forward(self, images):
        return self.used(images.flatten(1))


def unused(config, in_channels, num_classes):
    return Unused()


def too_few(config, in_channels, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 9))
"""
MISTAKES = {
    "preset: 'digits-resnt' is not known; did you mean 'digits-resnet'?": ["--preset", "digits-resnt"],
    "2 ranks share 1 samples": ["--data", "mine:single"],
    "drop_last leaves no step": ["--batch-size", "800", "--drop-last"],
    "images are torch.float32": ["--data", "mine:floats"],
    "images are torch.uint8 of shape (4, 64); give uint8 of shape (N, C, H, W)": ["--data", "mine:flat"],
    "labels run from 10 to 10 with 10 classes": ["--data", "mine:beyond"],
    "the model can't process images of shape (B, 1, 8, 8)": ["--model", "mine:of_colour"],
    "the model returned logits of shape (1, 9)": ["--model", "mine:too_few"],
    "step 1 gave no gradient to spare.weight, spare.bias, and DDP": ["--model", "mine:unused"],
    "optim.beta1: nothing reads --beta1 without --optimizer adamw or novograd": ["--beta1", "0.5"],
    "early_stop.target_accuracy: 85 is not a share": ["--target-accuracy", "85"],
    "data.download: only published datasets can be downloaded": ["--data", "nowhere:load", "--data-download"],
    "data.dir: Fashion-MNIST is not complete in": ["--preset", "fashion-mnist-wideresnet", "--data-dir", "nowhere"],
    "optim.lr: 0.0 is out of range": ["--lr", "0"],
    "model.name: module 'no_such_module'": ["--model", "no_such_module:build"],
    "precision.name: fp16 needs a GPU": ["--precision", "fp16", "--device", "cpu"],
    "cannot write to": ["--checkpoint-dir", "/proc/nowhere"],
    "does not fit this model or optimizer": [*OCCUPIED, "--model-width", "8"],
}


@pytest.mark.parametrize("message", list(MISTAKES))
def test_user_error_ends_both_ranks_with_81_and_one_line(message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    words = [str(tmp_path / word) if word == "ckpt" else word for word in MISTAKES[message]]
    if words[:1] == OCCUPIED[:1] and "ckpt" in words[1]:
        train(tmp_path / "old", [*DIGITS, "--max-steps", "2", *words[:2]])
    environ = {"PYTHONPATH": str(tmp_path), contract.ENV_RUNTIME_DIR: str(tmp_path / "runtime")}
    with start(tmp_path, [*PRESET, *words], 2, environ) as ranks:
        assert ranks.codes() == [contract.EXIT_USER_ERROR] * 2, ranks.output(0) + ranks.output(1)
    errors = [line for line in ranks.output(0).splitlines() if "error: " in line]
    assert len(errors) == 1, ranks.output(0)
    assert errors[0].startswith("ddp_trainer: error: ")
    assert message in errors[0]
    assert "Traceback" not in ranks.output(0)
    assert ranks.output(1) == ""
    for rank in range(2):
        record = json.loads((tmp_path / "runtime" / "errors" / f"{rank}.json").read_text())
        assert record["rank"] == rank
        assert message in record["message"]


def test_user_error_on_one_rank_ends_all_and_names_rank(tmp_path: Path) -> None:
    # The dataset's function fails on rank 1 alone, as with a folder that is missing on one node.
    (tmp_path / "picky_data.py").write_text(
        "import os\n"
        "from ddp_trainer.data.published import load_digits as digits\n"
        "from ddp_sdk.errors import UserError\n"
        "def load(config):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise UserError('data.dir', 'the folder is empty', 'mount it')\n"
        "    return digits(config)\n"
    )
    arguments = [*DIGITS, "--data", "picky_data:load"]
    with start(tmp_path, arguments, 2, {"PYTHONPATH": str(tmp_path)}) as ranks:
        assert ranks.codes() == [contract.EXIT_USER_ERROR] * 2
    assert "ddp_trainer: error: data.dir: the folder is empty (rank 1); mount it" in ranks.output(0)
    assert ranks.output(1) == ""


def test_sigterm_without_checkpoint_folder_still_ends_in_order(tmp_path: Path) -> None:
    with start(tmp_path, [*DIGITS, "--epochs", "50"], hold="step 5/") as ranks:
        ranks.wait_for("step 5/")
        ranks.processes[0].terminate()
        ranks.release()
        assert ranks.codes() == [contract.EXIT_PREEMPTED]
    assert "nothing saved" in ranks.output(0)


def test_last_metrics_page_is_kept(tmp_path: Path) -> None:
    train(tmp_path, [*DIGITS, "--epochs", "1"], 2, {contract.ENV_RUNTIME_DIR: str(tmp_path)})
    for rank in range(2):
        page = (tmp_path / "metrics" / f"{rank}.prom").read_text()
        assert f'ddp_progress_ratio{{rank="{rank}"}} 1.0' in page
        assert f'ddp_validation_accuracy_ratio{{rank="{rank}"}}' in page
