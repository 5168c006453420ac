"""Batched augmentation against torchvision's: the same pixels for the same parameters, and the same distribution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ddp_sdk.errors import UserError
from ddp_trainer.data import DataConfig
from ddp_trainer.data.augment import DRAWS, ORDERS, Augmentation, jitter
from ddp_trainer.data.geometry import PixelMap, between, offsets, zoomed_crops
from ddp_trainer.data.sampling import uniforms
from tests.support.lazy import Lazy

transforms = Lazy("torchvision.transforms")
vision = Lazy("torchvision.transforms.functional")

# CIFAR-10's preset, and the document's transforms.
FULL = Augmentation(flip=True, rotation=10.0, shear=10.0, scale=(0.8, 1.2), jitter=0.2)
NAMES = ["brightness", "contrast", "saturation"]


def noise(count: int, channels: int = 3, height: int = 32, width: int = 32) -> Tensor:
    """Smooth images, whose neighbouring pixels differ little as in photographs, but sharp enough to compare."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, channels, 5, 5, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic", align_corners=False)
    grain = torch.rand(count, channels, height, width, generator=generator)
    return (255 * (0.8 * smooth + 0.2 * grain)).clamp(0, 255).to(torch.uint8)


def pil(image: Tensor) -> Image.Image:
    picture: Image.Image = vision.to_pil_image(image)
    return picture


def pixels(picture: Image.Image) -> Tensor:
    tensor: Tensor = vision.pil_to_tensor(picture)
    return tensor


def mapped(images: Tensor, change: Callable[[PixelMap], None]) -> Tensor:
    pixel_map = PixelMap(images.shape[2], images.shape[3], images.device)
    change(pixel_map)
    return pixel_map.gather(images)


def share_equal(ours: Tensor, theirs: Tensor) -> float:
    return float((ours == theirs).float().mean())


# The same pixels from the same parameters


@pytest.mark.parametrize(("height", "width"), [(32, 32), (21, 34)])
def test_rotations_are_pillows(height: int, width: int) -> None:
    images = noise(12, 3, height, width)
    angles = torch.linspace(-170, 170, 12)
    ours = mapped(images, lambda item: item.rotate(angles))
    theirs = torch.stack([pixels(vision.rotate(pil(i), float(a))) for i, a in zip(images, angles, strict=True)])
    # Pillow rounds to 1/65536 of a pixel: at an edge of two pixels it may choose the other one.
    assert share_equal(ours, theirs) > 0.999


@pytest.mark.parametrize(("height", "width"), [(32, 32), (21, 34)])
def test_shear_and_scale_are_pillows(height: int, width: int) -> None:
    images = noise(12, 3, height, width)
    shear = torch.linspace(-10, 10, 12)
    scale = torch.linspace(0.8, 1.25, 12)
    ours = mapped(images, lambda item: item.shear_and_scale(shear, scale))
    theirs = [
        pixels(vision.affine(pil(image), 0.0, [0, 0], float(s), [float(h), 0.0]))
        for image, h, s in zip(images, shear, scale, strict=True)
    ]
    assert share_equal(ours, torch.stack(theirs)) > 0.999


def test_combined_geometric_maps_equal_successive_ones() -> None:
    images = noise(16)
    flips = torch.arange(16) % 2 == 0
    angles = torch.linspace(-30, 30, 16)
    shear = torch.linspace(-10, 10, 16)
    scale = torch.linspace(0.7, 1.3, 16)
    down = torch.arange(16) % 9 - 4
    right = torch.arange(16) % 7 - 3

    def all_of_them(one: PixelMap) -> None:
        one.shear_and_scale(shear, scale)
        one.rotate(angles)
        one.flip(flips)
        one.shift(down, right)

    step = mapped(images, lambda item: item.shift(down, right))
    step = mapped(step, lambda entry: entry.flip(flips))
    step = mapped(step, lambda element: element.rotate(angles))
    step = mapped(step, lambda first: first.shear_and_scale(shear, scale))
    assert torch.equal(mapped(images, all_of_them), step)
    assert not torch.equal(step, images)


@pytest.mark.parametrize("order", range(len(ORDERS)))
def test_jitter_is_pillows_in_every_order(order: int) -> None:
    images = noise(8)
    factors = torch.rand(8, 3, generator=torch.Generator().manual_seed(order)) * 0.8 + 0.6
    ours = jitter(images.float(), factors, torch.full((8,), order))
    for image, own, result in zip(images, factors, ours, strict=True):
        picture = pil(image)
        for kind in ORDERS[order]:
            picture = getattr(vision, f"adjust_{NAMES[kind]}")(picture, float(own[kind]))
        difference = (result - pixels(picture).float()).abs()
        # A product that is a whole number may be truncated to the next lower one.
        assert float(difference.max()) <= 1.0
        assert float((difference > 0).float().mean()) < 0.002


def test_jitter_of_grey_images_skips_saturation() -> None:
    images = noise(4, channels=1).float()
    factors = torch.tensor([[1.0, 1.0, 0.1]]).expand(4, 3)
    assert torch.equal(jitter(images.clone(), factors, torch.arange(4)), images)


def test_zoomed_crops_are_torchvisions_resize_pad_and_crop() -> None:
    # Scales with a whole enlarged side, and without a position exactly between two pixels.
    side = 24
    images = noise(4, 3, side, side)
    masks = (noise(4, 1, side, side)[:, 0] // 32).to(torch.uint8)
    masks[:, :2] = 255
    scale = torch.tensor([0.5, 1.0, 4 / 3, 2.0])
    down = torch.tensor([0.3, 0.6, 0.5, 0.75])
    right = torch.tensor([0.9, 0.1, 0.25, 0.5])
    flip = torch.tensor([False, True, False, True])
    ours, classes = zoomed_crops(images.float(), masks, scale, down, right, flip)
    assert classes.dtype == torch.uint8
    for n in range(4):
        size = round(side * float(scale[n]))
        image = vision.resize(images[n].float(), [size, size], antialias=False)
        mask = vision.resize(masks[n : n + 1], [size, size], vision.InterpolationMode.NEAREST_EXACT)
        if flip[n]:
            image = vision.hflip(image)
            mask = vision.hflip(mask)
        border = max(0, side - size)
        image = vision.pad(image, [0, 0, border, border], fill=0)
        mask = vision.pad(mask, [0, 0, border, border], fill=255)
        top, left = (float(place[n]) * max(0, size - side) for place in (down, right))
        assert top == pytest.approx(round(top), abs=1e-5)
        assert left == pytest.approx(round(left), abs=1e-5)
        image = vision.crop(image, round(top), round(left), side, side)
        mask = vision.crop(mask, round(top), round(left), side, side)
        inner = slice(0, min(side, size) - 1)
        torch.testing.assert_close(ours[n][:, inner, inner], image[:, inner, inner], atol=0.01, rtol=0)
        if size >= side:
            assert torch.equal(classes[n], mask[0])
        else:
            # At half size, positions are exactly between pixels, and rounding decides which of two is used.
            assert torch.equal(classes[n][size:], mask[0][size:])


@pytest.mark.parametrize("seed", range(3))
def test_image_and_mask_are_transformed_together(seed: int) -> None:
    # The mask is written into the image, so both must agree after every shift.
    side = 32
    masks = torch.arange(4, dtype=torch.uint8).repeat_interleave(8).view(1, 1, side).expand(6, side, side).contiguous()
    images = (masks.unsqueeze(1) * 50 + 20).expand(6, 3, side, side).contiguous()
    augmentation = Augmentation(flip=True, scale=(0.5, 2.0), zoom=True, crop=True)
    draws = torch.from_numpy(uniforms(np.arange(6), DRAWS, seed))
    moved, classes = augmentation.batch(images, masks, draws)
    known = classes != 255
    expected = torch.where(known, classes * 50 + 20, 0).float()
    # Between two stripes, and at the black border, images are interpolated.
    near = (moved[:, 0] - expected).abs() < 1.0
    assert float(near.float().mean()) > 0.8
    assert classes.dtype == torch.int64
    assert set(classes.unique().tolist()) <= {0, 1, 2, 3, 255}
    # Half of the images are mirrored: their stripes go down from left to right.
    fallen = [bool((row[row != 255].diff() < 0).any()) for row in classes[:, 0]]
    assert fallen == [bool(draw < 0.5) for draw in draws[:, 2]]


# The same parameters: their distribution is torchvision's


def kolmogorov_smirnov(one: np.ndarray, other: np.ndarray) -> float:
    """Return the Kolmogorov-Smirnov distance of two samples, divided by the value that one in a thousand exceeds."""
    values = np.sort(np.concatenate([one, other]))
    distance = np.abs(
        np.searchsorted(np.sort(one), values, side="right") / len(one)
        - np.searchsorted(np.sort(other), values, side="right") / len(other)
    ).max()
    critical = 1.95 * np.sqrt((len(one) + len(other)) / (len(one) * len(other)))
    return float(distance / critical)


DRAWN = 8_000


def test_parameters_are_distributed_like_torchvisions() -> None:
    draws = torch.from_numpy(uniforms(np.arange(DRAWN), DRAWS, 7, 1, 0))
    torch.manual_seed(7)
    size = [32, 32]
    angle = [transforms.RandomRotation.get_params([-10.0, 10.0]) for _ in range(DRAWN)]
    affine = [
        transforms.RandomAffine.get_params((0.0, 0.0), None, (0.8, 1.2), [-10.0, 10.0], size) for _ in range(DRAWN)
    ]
    colour = [transforms.ColorJitter.get_params([0.8, 1.2], [0.8, 1.2], [0.8, 1.2], None) for _ in range(DRAWN)]
    pairs = {
        "angle": (between(draws[:, 3], -10, 10), angle),
        "shear": (between(draws[:, 4], -10, 10), [item[3][0] for item in affine]),
        "scale": (between(draws[:, 5], 0.8, 1.2), [item[2] for item in affine]),
        "brightness": (between(draws[:, 6], 0.8, 1.2), [item[1] for item in colour]),
        "contrast": (between(draws[:, 7], 0.8, 1.2), [item[2] for item in colour]),
        "saturation": (between(draws[:, 8], 0.8, 1.2), [item[3] for item in colour]),
    }
    for name, (ours, theirs) in pairs.items():
        assert kolmogorov_smirnov(ours.numpy(), np.array(theirs)) < 1.0, name
    # torchvision shuffles four changes; hue is the identity here.
    theirs_order = [ORDERS.index(tuple(int(k) for k in item[0] if int(k) < 3)) for item in colour]
    both = [offsets(draws[:, 9], 6).numpy(), np.array(theirs_order)]
    counts = np.stack([np.bincount(order, minlength=6) for order in both])
    # Chi-squared with 5 degrees of freedom exceeds 20.5 once in a thousand times; the seeds are fixed.
    assert (((counts - DRAWN / 6) ** 2 / (DRAWN / 6)).sum(axis=1) < 20.5).all()
    assert abs(float((draws[:, 2] < 0.5).float().mean()) - 0.5) < 0.02


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (FULL, lambda: [transforms.RandomHorizontalFlip(), transforms.RandomRotation(10),
                transforms.RandomAffine(0, shear=10, scale=(0.8, 1.2)),
                transforms.ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2)]),
        (Augmentation(padding=4, flip=True),
         lambda: [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]),
    ],
    ids=["full", "crop-flip"],
)  # fmt: skip
def test_augmented_images_are_distributed_like_documents(
    ours: Augmentation, theirs: Callable[[], list[object]]
) -> None:
    """Augment one image very often: mean and spread of every pixel, and the whole distribution of a few features."""
    count = 2000
    image = noise(1)
    draws = torch.from_numpy(uniforms(np.arange(count), DRAWS, 3))
    mine, _ = ours.batch(image.expand(count, -1, -1, -1), torch.zeros(count, dtype=torch.int64), draws)
    torch.manual_seed(3)
    one_by_one = transforms.Compose(theirs())
    second = torch.stack([pixels(one_by_one(pil(image[0]))) for _ in range(count)])
    mine = mine.double()
    second = second.double()
    error = ((mine.var(0) + second.var(0)) / count).sqrt().clamp(min=0.05)
    # The greatest of 3,072 normal deviations is below 4.7 in 99 of 100 runs; the seeds are fixed.
    assert float(((mine.mean(0) - second.mean(0)).abs() / error).max()) < 4.7
    torch.testing.assert_close(mine.std(0).mean(), second.std(0).mean(), rtol=0.02, atol=0)
    features = {
        "mean": lambda x: x.mean((1, 2, 3)),
        "corner": lambda x: x[:, 0, :4, :4].mean((1, 2)),
        "left": lambda x: x[:, :, :, :8].mean((1, 2, 3)) - x[:, :, :, -8:].mean((1, 2, 3)),
        "colour": lambda x: (x[:, 0] - x[:, 2]).abs().mean((1, 2)),
        "contrast": lambda x: x.std((1, 2, 3)),
    }
    for name, feature in features.items():
        assert kolmogorov_smirnov(feature(mine).numpy(), feature(second).numpy()) < 1.0, name


# Settings


@pytest.mark.parametrize(
    ("config", "channels", "masks", "message"),
    [
        (DataConfig(augment=("rotate",)), 3, True, "rotate can't be combined with scale or with masks"),
        (DataConfig(augment=("affine", "scale")), 3, False, "affine can't be combined with"),
        (DataConfig(augment=("scale",)), 3, False, "scale needs data with masks"),
        (DataConfig(augment=("jitter",)), 4, False, "not 4; omit"),
    ],
)
def test_incompatible_augmentations_are_rejected(config: DataConfig, channels: int, masks: bool, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Augmentation.from_config(config, channels=channels, masks=masks)


def test_scaling_without_crop_is_centred() -> None:
    config = DataConfig(augment=("scale",), scale_min=2.0, scale_max=2.0)
    augmentation = Augmentation.from_config(config, channels=3, masks=True)
    masks = torch.zeros(1, 8, 8, dtype=torch.uint8)
    masks[0, 2:6, 2:6] = 7
    images = masks.unsqueeze(1).expand(1, 3, 8, 8).contiguous()
    _, classes = augmentation.batch(images, masks, torch.full((1, 10), 0.9))
    assert (classes == 7).all()
