"""MixUp and CutMix: torchvision's batches, and the loss and accuracy of shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets, ImageData
from ddp_trainer.data.mixing import build_mixing
from ddp_trainer.data.sources import Batch
from ddp_trainer.errors import UserError
from ddp_trainer.imports import import_torchvision
from ddp_trainer.tasks import Classification


def build_data(classes: int = 3, masks: bool = False) -> Datasets:
    labels = torch.zeros(6, 4, 4, dtype=torch.uint8) if masks else torch.arange(6) % classes
    data = ImageData(torch.zeros(6, 1, 4, 4, dtype=torch.uint8), labels)
    return Datasets(data, data, classes, (0.0,), (1.0,))


def draw_batch() -> Batch:
    images = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return Batch(images, torch.tensor([0, 1, 2, 2, 1, 0]))


def mix(names: tuple[str, ...], seed: int = 5, **more: Any) -> Batch:
    mix_batch = build_mixing(DataConfig(augment=names, **more), build_data(), torch.channels_last)
    assert mix_batch is not None
    torch.manual_seed(seed)
    return mix_batch(draw_batch())


@pytest.mark.parametrize(("name", "kind", "alpha"), [("mixup", "MixUp", 0.2), ("cutmix", "CutMix", 1.0)])
def test_batch_equals_torchvisions(name: str, kind: str, alpha: float) -> None:
    import_torchvision()
    from torchvision.transforms import v2

    mixed = mix((name,))
    torch.manual_seed(5)
    images, shares = getattr(v2, kind)(alpha=alpha, num_classes=3)(draw_batch().inputs, draw_batch().targets)
    assert torch.equal(mixed.inputs, images)
    assert torch.equal(mixed.targets, shares)
    assert mixed.inputs.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(mixed.targets.sum(dim=1), torch.ones(6))


def test_both_alternate_at_random() -> None:
    both = [mix(("mixup", "cutmix"), seed) for seed in range(8)]
    # CutMix copies pixels, MixUp creates new ones.
    pixels = set(draw_batch().inputs.flatten().tolist())
    copied = {set(batch.inputs.flatten().tolist()) <= pixels for batch in both}
    assert copied == {True, False}


def test_no_mixing_without_its_name() -> None:
    assert build_mixing(DataConfig(augment=("crop",)), build_data(), torch.contiguous_format) is None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_of_shares_is_that_of_pairs(smoothing: float) -> None:
    labels = torch.tensor([0, 1, 2, 1])
    partners = labels.roll(1)
    shares = 0.7 * torch.nn.functional.one_hot(labels, 3).float() + 0.3 * torch.nn.functional.one_hot(partners, 3)
    # More outputs than the data has classes.
    outputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    for complete in (True, False):
        task = Classification(smoothing, 3, complete=complete)
        task.check(outputs, shares)
        expected = 0.7 * task.loss(outputs, labels) + 0.3 * task.loss(outputs, partners)
        torch.testing.assert_close(task.loss(outputs, shares), expected)
        assert task.count_elements(shares) is None


def test_accuracy_of_shares_is_share_of_predicted_class() -> None:
    shares = torch.tensor([[0.75, 0.25, 0.0], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    outputs = torch.tensor([[9.0, 0.0, 0.0, 0.0], [0.0, 0.0, 9.0, 0.0], [0.0, 0.0, 0.0, 9.0]])
    assert Classification(0.0, 3).correct(outputs, shares).tolist() == [1.25, 3.0]


def test_masks_are_refused() -> None:
    with pytest.raises(UserError, match=r"data\.augment: mixup, cutmix needs one class per image; omit it"):
        build_mixing(DataConfig(augment=("mixup", "cutmix")), build_data(masks=True), torch.contiguous_format)


def test_shares_do_not_change_labels() -> None:
    batch = draw_batch()
    before: Tensor = batch.targets.clone()
    mix(("mixup",))
    assert torch.equal(batch.targets, before)
