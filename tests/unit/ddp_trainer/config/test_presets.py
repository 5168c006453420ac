"""The presets against the documents' values (docs/trainer.md has their texts)."""

from __future__ import annotations

import re

import pytest

from ddp_trainer.config.presets import PRESETS
from ddp_trainer.config.run import RunConfig, resolve
from ddp_trainer.optim import Schedule
from tests.support import ROOT

DOCUMENT = (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")


def meant(name: str) -> RunConfig:
    return resolve(name, None, {})


def written(name: str) -> RunConfig:
    return resolve(name, None, {}, as_published=True)


@pytest.mark.parametrize(
    ("name", "data", "model", "batch", "epochs", "lr", "optimizer"),
    [
        ("cifar10-resnet50", "cifar10", "resnet50", 256, 1, 0.001, "sgd"),
        ("cifar10-resnet18", "cifar10", "resnet18", 64, 2, 0.01, "sgd"),
        ("fashion-mnist-wideresnet", "fashion-mnist", "wide-resnet", 32, 40, 0.01, "sgd"),
        ("fashion-mnist-wideresnet-large-batch", "fashion-mnist", "wide-resnet", 32, 40, 0.01, "novograd"),
        ("cifar10-wideresnet", "cifar10", "wide-resnet", 256, 40, 0.15, "novograd"),
        ("voc2012-deeplabv3-resnet101", "voc2012", "deeplabv3_resnet101", 8, 20, 0.01, "sgd"),
    ],
)
def test_document_values_equal_presets(
    name: str, data: str, model: str, batch: int, epochs: int, lr: float, optimizer: str
) -> None:
    for config in (meant(name), written(name)):
        assert (config.data.name, config.model.name) == (data, model)
        assert (config.data.batch_size, config.epochs) == (batch, epochs)
        assert (config.optim.lr, config.optim.name) == (lr, optimizer)
        row = re.search(rf"^\| `{name}` \|.*$", DOCUMENT, re.MULTILINE)
        assert row is not None, "docs/trainer.md has a row for every preset"
        assert f" {batch} " in row[0]
        assert f" {lr:g} " in row[0]


def test_every_preset_is_in_document_and_every_row_is_preset() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|(?:[^|\n]+\|){6}$", DOCUMENT, re.MULTILINE)
    assert set(rows) == set(PRESETS)


def test_crop_without_border_is_only_as_published() -> None:
    assert meant("cifar10-resnet50").data.crop_padding == 4
    config = written("cifar10-resnet50")
    assert (config.data.crop_padding, config.data.validation_augment, config.model.num_outputs) == (0, True, 1000)


@pytest.mark.parametrize("name", ["fashion-mnist-wideresnet-large-batch", "cifar10-wideresnet"])
def test_warm_up_reaches_scaled_rate_or_published_rate(name: str) -> None:
    def rates(config: RunConfig, scale: float) -> list[float]:
        # Two nodes of four processes.
        schedule = Schedule(config.schedule, config.optim.lr, scale, config.epochs, processes_per_node=4)
        return [schedule.lr(epoch) / config.optim.lr for epoch in (0.0, 0.5, 1.0, 5.0)]

    config = meant(name)
    assert config.optim.lr_scaling == "linear"
    assert rates(config, 8.0) == pytest.approx([1.0, 1.7, 2.4, 8.0])
    config = written(name)
    assert config.optim.lr_scaling == "none"
    assert rates(config, 1.0) == pytest.approx([0.25, 0.25, 0.4, 1.0])


@pytest.mark.parametrize(
    "name", ["fashion-mnist-wideresnet", "fashion-mnist-wideresnet-large-batch", "cifar10-wideresnet"]
)
def test_wide_resnets_stop_at_85_percent_twice_and_validate_on_everything(name: str) -> None:
    config = meant(name)
    assert (config.early_stop.target_accuracy, config.early_stop.patience) == (0.85, 2)
    assert not config.data.validation_as_training
    assert written(name).data.validation_as_training
    assert written(name).data.eval_batch_size == config.data.batch_size
    assert config.model.dropout == 0.01


def test_novograd_averages_gradients_and_forgets_squares_only_as_published() -> None:
    for name in ("fashion-mnist-wideresnet-large-batch", "cifar10-wideresnet"):
        assert meant(name).optim.grad_averaging
        assert meant(name).optim.betas == (0.95, 0.98)
        assert written(name).optim.betas == (0.95, 0.0)


def test_drop_last_follows_documents() -> None:
    dropping = {name for name in PRESETS if written(name).data.drop_last}
    assert dropping == {name for name in PRESETS if "wideresnet" in name}
    assert meant("voc2012-deeplabv3-resnet101").data.drop_last


def test_assessment_has_all_its_augmentation() -> None:
    config = meant("cifar10-wideresnet")
    data = config.data
    assert data.augment == ("flip", "rotate", "affine", "jitter")
    assert (data.rotation, data.shear, data.scale_min, data.scale_max, data.jitter) == (10, 10, 0.8, 1.2, 0.2)
    assert config.model.sync_batchnorm
    assert config.train_accuracy
    assert (config.model.pool, written("cifar10-wideresnet").model.pool) == (None, 7)


def test_as_published_uses_torch_defaults() -> None:
    assert {written(name).precision.name for name in set(PRESETS) - {"digits-resnet", "python-reference-gpt"}} == {
        "torch"
    }
