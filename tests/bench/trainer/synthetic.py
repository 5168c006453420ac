"""Noise in the true on-disk formats and sizes of the datasets, for machines without the real ones."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The number of training samples of the real datasets, and so the length of an epoch.
EPOCH = {"cifar10": 50_000, "fashion-mnist": 60_000, "voc2012": 1_464}


def is_there(name: str, folder: Path) -> bool:
    """Whether the dataset ``name`` exists in ``folder``; its reader reports whether it is complete."""
    return (folder / _MARKS[name]).exists()


def write(name: str, folder: Path, samples: int) -> int:
    """Write ``samples`` training samples of ``name`` (the whole set at most) and a few for validation.

    Returns the number of samples.
    """
    samples = max(10, min(samples, EPOCH[name]))
    return _WRITERS[name](folder, samples, np.random.default_rng(0))


def _write_cifar10(folder: Path, samples: int, random: np.random.Generator) -> int:
    home = folder / "cifar-10-batches-py"
    home.mkdir(parents=True)
    per_file = -(-samples // 5)
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        count = per_file if name != "test_batch" else min(per_file, 1000)
        pixels = random.integers(0, 256, (count, 3072), np.uint8)
        labels = random.integers(0, 10, count).tolist()
        content = {
            "batch_label": name,
            "labels": labels,
            "data": pixels,
            "filenames": [f"{i}.png" for i in range(count)],
        }
        (home / name).write_bytes(pickle.dumps(content, protocol=2))
    meta = {"num_cases_per_batch": per_file, "label_names": [str(number) for number in range(10)], "num_vis": 3072}
    (home / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    return 5 * per_file


def _write_fashion_mnist(folder: Path, samples: int, random: np.random.Generator) -> int:
    home = folder / "FashionMNIST" / "raw"
    home.mkdir(parents=True)
    for prefix, count in (("train", samples), ("t10k", min(samples, 1000))):
        images = random.integers(0, 256, (count, 28, 28), np.uint8)
        labels = random.integers(0, 10, count, np.uint8)
        # IDX: two zero bytes, the type (8: unsigned byte), the number of dimensions; then each of them, big-endian.
        (home / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, count, 28, 28) + images.tobytes())
        (home / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, count) + labels.tobytes())
    return samples


def _write_voc2012(folder: Path, samples: int, random: np.random.Generator) -> int:
    from PIL import Image

    home = folder / "VOCdevkit" / "VOC2012"
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (home / name).mkdir(parents=True)
    palette: Any = random.integers(0, 256, 768, np.uint8).tolist()
    # Twelve photographs of the usual size under many names: decoding takes the same time for all.
    for number in range(12):
        photograph = _smooth(random, (375, 500, 3))
        Image.fromarray(photograph).save(home / "JPEGImages" / f"of-{number}.jpg", quality=90)
        classes = _smooth(random, (375, 500)) // 12 % 21
        classes[:4] = 255
        mask = Image.fromarray(classes.astype(np.uint8))
        mask.putpalette(palette)  # makes it mode P, the pixels as they are
        mask.save(home / "SegmentationClass" / f"of-{number}.png")
    for split, count in (("train", samples), ("val", min(samples, 24))):
        names = [f"{split}_{number:06d}" for number in range(count)]
        for number, name in enumerate(names):
            for kind, suffix in (("JPEGImages", "jpg"), ("SegmentationClass", "png")):
                (home / kind / f"{name}.{suffix}").hardlink_to(home / kind / f"of-{number % 12}.{suffix}")
        (home / "ImageSets" / "Segmentation" / f"{split}.txt").write_text("\n".join(names) + "\n")
    return samples


def _smooth(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Enlarged coarse noise: JPEG and PNG need about as much time for it as for a photograph."""
    coarse = random.integers(0, 256, (-(-shape[0] // 8), -(-shape[1] // 8), *shape[2:]), np.uint8)
    return coarse.repeat(8, axis=0).repeat(8, axis=1)[: shape[0], : shape[1]].copy()


_WRITERS: Mapping[str, Callable[[Path, int, np.random.Generator], int]] = {
    "cifar10": _write_cifar10,
    "fashion-mnist": _write_fashion_mnist,
    "voc2012": _write_voc2012,
}
_MARKS = {"cifar10": "cifar-10-batches-py", "fashion-mnist": "FashionMNIST/raw", "voc2012": "VOCdevkit/VOC2012"}
