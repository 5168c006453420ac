"""RandAugment of batches against torchvision's of single images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_trainer.config.run import resolve
from ddp_trainer.data import DataConfig
from ddp_trainer.data.augment import Augmentation
from ddp_trainer.data.rand_augment import DRAWS, RandAugment
from ddp_trainer.data.sampling import uniforms
from ddp_trainer.errors import UserError
from ddp_trainer.imports import import_torchvision
from tests.unit.ddp_trainer.data.test_augment import noise


def build_reference(magnitude: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """torchvision's RandAugment of one operation, which ``choose`` sets."""
    import_torchvision()
    from torchvision.transforms import v2

    class OneOperation(v2.RandAugment):  # type: ignore[misc]
        def choose(self, number: int, positive: bool) -> None:
            self.number = number
            monkeypatch.setattr(torch, "rand", lambda size: torch.tensor(0.9 if positive else 0.1))

        def _get_random_item(self, space: dict[str, Any]) -> tuple[str, Any]:
            name = list(space)[self.number]
            return name, space[name]

    return OneOperation(num_ops=1, magnitude=magnitude)


@pytest.mark.parametrize("magnitude", [0, 9, 30])
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 32, 32), (1, 21, 34)])
def test_each_operation_equals_torchvisions(
    magnitude: int, channels: int, height: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = noise(4, channels, height, width)
    ours = RandAugment(magnitude, height, width)
    reference = build_reference(magnitude, monkeypatch)
    for number, operation in enumerate(ours.operations):
        for positive in (True, False):
            apply = operation.apply if positive or operation.opposite is None else operation.opposite
            reference.choose(number, positive)
            expected = torch.stack([reference(image) for image in images])
            assert torch.equal(apply(images.clone()), expected), (operation.name, positive)


def test_names_and_order_are_torchvisions(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [operation.name for operation in RandAugment(9, 8, 8).operations]
    space = build_reference(9, monkeypatch)._AUGMENTATION_SPACE
    assert names == list(space)
    signed = [name for name, (_, is_signed) in space.items() if is_signed]
    assert [operation.name for operation in RandAugment(9, 8, 8).operations if operation.opposite] == signed


def draw(count: int) -> Tensor:
    return torch.from_numpy(uniforms(torch.arange(count).numpy(), DRAWS, 0))


def test_each_image_has_two_operations_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    images = noise(40)
    draws = draw(40)
    reference = build_reference(9, monkeypatch)
    expected = []
    for image, numbers in zip(images, draws.tolist(), strict=True):
        for layer in range(2):
            reference.choose(int(numbers[2 * layer] * 14), numbers[2 * layer + 1] > 0.5)
            image = reference(image)
        expected.append(image)
    assert torch.equal(RandAugment(9, 32, 32)(images.clone(), draws), torch.stack(expected))


def test_operations_are_drawn_with_equal_probability() -> None:
    augment = RandAugment(9, 2, 2)
    counts: dict[str, int] = {}
    counting = []
    for operation in augment.operations:

        def count(images: Tensor, name: str = operation.name) -> Tensor:
            counts[name] = counts.get(name, 0) + len(images)
            return images

        counting.append(operation._replace(apply=count, opposite=None))
    augment.operations = counting
    augment(torch.zeros(7000, 1, 2, 2, dtype=torch.uint8), draw(7000))
    assert sum(counts.values()) == 14_000
    assert min(counts.values()) > 880
    assert max(counts.values()) < 1120


def test_result_of_image_does_not_depend_on_batch() -> None:
    cache = noise(8)
    labels = torch.arange(8)
    augmentation = Augmentation.from_config(
        DataConfig(augment=("crop", "flip", "randaugment", "jitter")), channels=3, masks=False
    )
    draws = torch.from_numpy(uniforms(labels.numpy(), augmentation.draws, 0))
    prepared = augmentation.prepare(cache)
    whole, _ = augmentation.batch(prepared, labels, labels, draws)
    for index in range(8):
        alone, _ = augmentation.batch(prepared, labels, labels[index : index + 1], draws[index : index + 1])
        assert torch.equal(alone[0], whole[index])


@pytest.mark.parametrize(
    ("channels", "masks", "message"),
    [(2, False, "randaugment needs 1 or 3 channels, not 2"), (3, True, "randaugment can't be combined with scale")],
)
def test_data_that_operations_do_not_support_are_refused(channels: int, masks: bool, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Augmentation.from_config(DataConfig(augment=("randaugment",)), channels=channels, masks=masks)


def test_magnitude_beyond_bins_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.randaugment_magnitude: 31 is out of range; it must be at least 0 and"):
        resolve(None, None, {"data": {"augment": ["randaugment"], "randaugment_magnitude": 31}})
