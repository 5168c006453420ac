"""Folders of photographs in common formats and shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ddp_trainer import DataConfig, UserError
from ddp_trainer.cli import main
from ddp_trainer.data import load_datasets
from ddp_trainer.data.image_folder import read_image
from ddp_trainer.data.loader import TrainLoader, ValidationLoader
from ddp_trainer.data.sources import Place
from ddp_trainer.errors import DataError

SIZES = [(40, 30), (30, 50), (64, 64)]  # width, height

PLACE = Place(0, 1, torch.device("cpu"))


def write(root: Path, per_class: int = 6) -> Path:
    """Noise around the colour of the class: JPEG, PNG, grey, with a palette and with transparency."""
    random = np.random.default_rng(0)
    forms = [("RGB", "jpg"), ("RGB", "png"), ("L", "JPEG"), ("P", "png"), ("RGBA", "png"), ("CMYK", "jpeg")]
    for split, count in (("train", per_class), ("val", 3)):
        for number, name in enumerate(("cat", "dog")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                width, height = SIZES[index % len(SIZES)]
                pixels = random.integers(0, 90, (height, width, 3)) + np.array([150, 0, 0] if number else [0, 0, 150])
                mode, ending = forms[index % len(forms)]
                Image.fromarray(pixels.astype(np.uint8)).convert(mode).save(folder / f"{index}.{ending}")
    return root


def loader(root: Path, workers: int, augment: tuple[str, ...] = ("crop", "flip")) -> TrainLoader:
    config = DataConfig(
        name="imagefolder", dir=str(root), image_size=16, batch_size=5, workers=workers, augment=augment
    )
    return TrainLoader(load_datasets(config), config, PLACE, samples_per_step=5, seed=3)


def images(one: TrainLoader, epoch: int, consumed: int = 0) -> Tensor:
    return torch.cat([batch.inputs for batch in one.epoch(epoch, consumed)])


def test_random_crops_are_of_seed_epoch_and_sample(tmp_path: Path) -> None:
    batches = loader(write(tmp_path), 0)
    first = images(batches, 0)
    assert first.shape == (12, 3, 16, 16)
    assert first.dtype == torch.float32
    assert torch.equal(images(loader(tmp_path, 2), 0), first)
    assert torch.equal(images(batches, 0, consumed=5), first[5:])
    labels = torch.cat([batch.targets for batch in batches.epoch(0)])
    assert labels.dtype == torch.int64
    assert sorted(labels.tolist()) == [0] * 6 + [1] * 6
    # Both epochs contain every image, in different orders and with different crops.
    assert not torch.equal(images(batches, 1).sort(0).values, first.sort(0).values)
    # Without augmentation every epoch has the same images.
    plain = loader(tmp_path, 0, ())
    assert torch.equal(
        images(plain, 1).flatten(1).sum(1).sort().values, images(plain, 0).flatten(1).sum(1).sort().values
    )


def test_validation_images_are_shrunk_and_cut_out_of_their_middle(tmp_path: Path) -> None:
    config = DataConfig(name="imagefolder", dir=str(write(tmp_path)), image_size=28, workers=0, augment=("crop",))
    datasets = load_datasets(config)
    (batch,) = ValidationLoader(datasets, config, PLACE)
    assert batch.targets.tolist() == [0, 0, 0, 1, 1, 1]
    with Image.open(tmp_path / "val" / "cat" / "1.png") as photograph:  # 30 x 50: the shorter side to 32
        whole = photograph.convert("RGB").resize((32, 53), Image.Resampling.BILINEAR)
    expected = torch.from_numpy(np.array(whole)).permute(2, 0, 1)[:, 12:40, 2:30].float()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (datasets.mean, datasets.std))
    torch.testing.assert_close(batch.inputs[1] * std + mean, expected, atol=1e-3, rtol=0)


def test_folder_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DDP_METRICS_PORT", "0")
    folder = ["--data", "imagefolder", "--data-dir", str(write(tmp_path, 18)), "--image-size", "16", "--device", "cpu"]
    more = ["--augment", "crop,flip", "--model-width", "4", "--batch-size", "12", "--epochs", "6", "--workers", "0"]
    assert main([*folder, *more, "--model-norm", "group", "--lr", "0.05"]) == 0
    assert "(best 1.0000)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nothing", r"data\.dir: no images in .*train: .*; give --data-dir with train/CLASS/ and val/CLASS/"),
        ("other", r"data\.dir: train and val in .* differ in the classes dog, wolf; give both the same folders"),
        ("jitter", r"data\.augment: imagefolder does not support jitter; use crop and flip"),
    ],
)
def test_mistakes_are_named(change: str, message: str, tmp_path: Path) -> None:
    if change != "nothing":
        write(tmp_path)
    if change == "other":
        (tmp_path / "val" / "dog").rename(tmp_path / "val" / "wolf")
    augment = ("jitter",) if change == "jitter" else ()
    with pytest.raises(UserError, match=message):
        load_datasets(DataConfig(name="imagefolder", dir=str(tmp_path), augment=augment))


def test_damaged_image_is_named(tmp_path: Path) -> None:
    (write(tmp_path) / "train" / "dog" / "2.JPEG").write_bytes(b"no picture")
    with pytest.raises(Exception, match=r"2\.JPEG") as raised:
        images(loader(tmp_path, 0), 0)
    assert "sample 8 of the data" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["junk", "truncated"])
def test_damaged_image_is_error_with_path_reason_and_remedy(damage: str, workers: int, tmp_path: Path) -> None:
    path = write(tmp_path) / "train" / "dog" / "2.JPEG"
    path.write_bytes(b"no picture" if damage == "junk" else path.read_bytes()[:-200])
    reason = "cannot identify image file" if damage == "junk" else "image file is truncated"
    pattern = rf"^data\.dir: {path} can't be decoded: {reason}.*; replace or delete the file"
    with pytest.raises(DataError, match=pattern) as raised:
        images(loader(tmp_path, workers), 0)
    assert "(sample 8 of the data)" in raised.value.__notes__


def test_damaged_image_ends_run_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, 9) / "train" / "dog" / "7.png"
    path.write_bytes(path.read_bytes()[:400])
    folder = ["--data", "imagefolder", "--data-dir", str(tmp_path), "--image-size", "16", "--device", "cpu"]
    assert main([*folder, "--model-width", "4", "--batch-size", "6", "--workers", "1", "--metrics-port", "0"]) == 81
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith(f"ddp_trainer: error: data.dir: {path} can't be decoded: ")


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_16_bit_grey_image_is_scaled_to_8_bits(ending: str, tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    Image.fromarray(values).save(tmp_path / f"deep.{ending}")
    image = read_image(str(tmp_path / f"deep.{ending}"))
    assert image.mode == "RGB"
    assert np.array(image)[..., 0].flatten().tolist() == list(range(256))


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_32_bit_image_is_refused(kind: type, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((4, 4), kind)).save(tmp_path / "wide.tif")
    with pytest.raises(UserError, match=r"wide\.tif has 32-bit pixels .*; convert it to 8 or 16 bits"):
        read_image(str(tmp_path / "wide.tif"))
