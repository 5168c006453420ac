"""Mistakes in data, model and combinations: one line on rank 0, 81 on every rank, within seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_trainer import contract
from tests.support.trainer_ranks import start

pytestmark = pytest.mark.process

DIGITS = ["--preset", "digits-resnet"]
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
    "optim.beta1: optimizer sgd does not read --beta1": ["--beta1", "0.5"],
    "distributed.compression: 'powersgd' is not known": ["--compression", "powersgd"],
    "early_stop.target_accuracy: 85 is not a share": ["--target-accuracy", "85"],
    "data.download: only published datasets can be downloaded": ["--data", "nowhere:load", "--data-download"],
    "data.dir: Fashion-MNIST is not complete in": ["--preset", "fashion-mnist-wideresnet", "--data-dir", "nowhere"],
}


@pytest.mark.parametrize("message", list(MISTAKES))
def test_user_error_ends_both_ranks_with_81_and_one_line(message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    arguments = [*DIGITS, *MISTAKES[message]]
    with start(tmp_path, arguments, 2, {"PYTHONPATH": str(tmp_path)}) as ranks:
        assert ranks.codes() == [contract.EXIT_USER_ERROR] * 2, ranks.output(0) + ranks.output(1)
    errors = [line for line in ranks.output(0).splitlines() if "error" in line]
    assert len(errors) == 1, ranks.output(0)
    assert errors[0].startswith("ddp_trainer: error: ")
    assert message in errors[0]
    assert "Traceback" not in ranks.output(0)
    assert ranks.output(1) == ""
