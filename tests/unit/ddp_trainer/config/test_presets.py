"""The presets against the documents' values (docs/trainer.md has their texts)."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Any

import pytest

from ddp_trainer.config.presets import PRESETS
from ddp_trainer.config.run import resolve
from ddp_trainer.optim import Schedule
from tests.support import ROOT

DOCUMENT = (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")
LARGE = "fashion-mnist-wideresnet-large-batch"
_WIDE = {
    "epochs": 40, "model.name": "wide-resnet", "model.dropout": 0.01, "early_stop.target_accuracy": 0.85,
    "early_stop.patience": 2, "data.drop_last": True, "data.validation_as_training": (False, True),
    "precision.name": ("auto", "fp32"),
}  # fmt: skip
_NOVOGRAD = {
    "optim.name": "novograd", "optim.grad_averaging": True, "optim.betas": ((0.95, 0.98), (0.95, 0.0)),
    "optim.lr_scaling": ("linear", "none"),
}  # fmt: skip
# Preset -> setting -> its value, or the value of the preset and that of --as-published.
VALUES: dict[str, dict[str, Any]] = {
    "cifar10-resnet50": {
        "data.name": "cifar10", "model.name": "resnet50", "data.batch_size": 256, "epochs": 1, "optim.lr": 0.001,
        "optim.name": "sgd", "data.crop_padding": (4, 0), "data.validation_augment": (False, True),
        "model.num_outputs": (None, 1000), "data.drop_last": False, "precision.name": ("auto", "fp32"),
    },
    "cifar10-resnet18": {
        "data.name": "cifar10", "model.name": "resnet18", "data.batch_size": 64, "epochs": 2, "optim.lr": 0.01,
        "optim.name": "sgd", "data.drop_last": False, "precision.name": ("auto", "fp32"),
    },
    "fashion-mnist-wideresnet": _WIDE | {
        "data.name": "fashion-mnist", "data.batch_size": 32, "optim.lr": 0.01, "optim.name": "sgd",
        "model.sync_batchnorm": True, "data.eval_batch_size": (256, 32),
    },
    LARGE: _WIDE | _NOVOGRAD | {
        "data.name": "fashion-mnist", "data.batch_size": 32, "optim.lr": 0.01, "model.sync_batchnorm": False,
        "data.eval_batch_size": (256, 32),
    },
    "cifar10-wideresnet": _WIDE | _NOVOGRAD | {
        "data.name": "cifar10", "data.batch_size": 256, "optim.lr": 0.15, "model.sync_batchnorm": True,
        "train_accuracy": True, "data.augment": ["flip", "rotate", "affine", "jitter"], "data.rotation": 10,
        "data.shear": 10, "data.scale_min": 0.8, "data.scale_max": 1.2, "data.jitter": 0.2, "model.pool": (None, 7),
    },
    "voc2012-deeplabv3-resnet101": {
        "data.name": "voc2012", "model.name": "deeplabv3_resnet101", "data.batch_size": 8, "epochs": 20,
        "optim.lr": 0.01, "optim.name": "sgd", "data.drop_last": (True, False), "precision.deterministic": True,
        "precision.name": ("auto", "fp32"),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_document_values_equal_presets(name: str) -> None:
    for index, config in enumerate((resolve(name), resolve(name, as_published=True))):
        for key, value in VALUES[name].items():
            expected = value[index] if isinstance(value, tuple) else value
            present = attrgetter(key)(config)
            assert (list(present) if isinstance(expected, list) else present) == expected, key
    (row,) = re.findall(rf"^\| `{name}` \|(?:[^|\n]+\|){{6}}$", DOCUMENT, re.MULTILINE)
    assert f" {VALUES[name]['data.batch_size']} " in row
    assert f" {VALUES[name]['optim.lr']:g} " in row


def test_every_preset_is_in_document_and_every_row_is_preset() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|(?:[^|\n]+\|){6}$", DOCUMENT, re.MULTILINE)
    assert set(rows) == set(PRESETS) == VALUES.keys() | {"digits-resnet", "python-reference-gpt"}


@pytest.mark.parametrize("name", [LARGE, "cifar10-wideresnet"])
@pytest.mark.parametrize(
    ("as_published", "scale", "rates"), [(False, 8.0, [1.0, 1.7, 2.4, 8.0]), (True, 1.0, [0.25, 0.25, 0.4, 1.0])]
)
def test_warm_up_reaches_scaled_rate_or_published_rate(
    as_published: bool, scale: float, rates: list[float], name: str
) -> None:
    config = resolve(name, as_published=as_published)
    # Two nodes of four processes.
    schedule = Schedule(config.schedule, config.optim.lr, scale, config.epochs, processes_per_node=4)
    assert [schedule.lr(epoch) / config.optim.lr for epoch in (0.0, 0.5, 1.0, 5.0)] == pytest.approx(rates)
