"""Tiny datasets in the real on-disk formats."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def write_cifar10(root: Path, per_file: int = 20) -> Path:
    """CIFAR-10's pickled batches with ``per_file`` images each; every class has another brightness."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        labels = [index % 10 for index in range(per_file)]
        noise = random.integers(0, 10, (per_file, 3072))
        data = (np.array(labels)[:, None] * 24 + noise).astype(np.uint8)
        batch = {"batch_label": name, "labels": labels, "data": data, "filenames": [f"{name}_{i}.png" for i in labels]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    meta = {"num_cases_per_batch": per_file, "label_names": names, "num_vis": 3072}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    return root


def pack_cifar10(root: Path, archive: Path) -> str:
    """The archive in which :func:`write_cifar10`'s folder would be published. Returns its MD5."""
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(root / "cifar-10-batches-py", "cifar-10-batches-py")
    return hashlib.md5(archive.read_bytes()).hexdigest()


def write_fashion_mnist(root: Path, train: int = 60, test: int = 20, *, packed: bool = False) -> Path:
    """Fashion-MNIST's big-endian IDX files in torchvision's folder; ``packed`` also leaves the .gz."""
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for prefix, count in (("train", train), ("t10k", test)):
        labels = np.arange(count) % 10
        images = labels[:, None, None] * 24 + random.integers(0, 10, (count, 28, 28))
        files = {
            f"{prefix}-images-idx3-ubyte": struct.pack(">IIII", 0x803, count, 28, 28)
            + images.astype(np.uint8).tobytes(),
            f"{prefix}-labels-idx1-ubyte": struct.pack(">II", 0x801, count) + labels.astype(np.uint8).tobytes(),
        }
        for name, content in files.items():
            (folder / name).write_bytes(content)
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    return root


# Photographs in VOC are wider than high, or higher than wide.
VOC_SIZES = ((50, 40), (30, 45), (60, 60))


def write_voc2012(root: Path, train: int = 8, validation: int = 4) -> Path:
    """VOC 2012's JPEG photographs, palette PNG masks and lists: a square on background, with a void edge."""
    folder = root / "VOCdevkit" / "VOC2012"
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / name).mkdir(parents=True)
    # The first colours of VOC's own palette; it must have all 256, because index 255 is void.
    palette = [0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0] + [224, 224, 192] * 252
    for split, count, first in (("train", train, 0), ("val", validation, train)):
        names = [f"2012_{number:06d}" for number in range(first, first + count)]
        (folder / "ImageSets" / "Segmentation" / f"{split}.txt").write_text("\n".join(names) + "\n")
        for number, name in enumerate(names):
            width, height = VOC_SIZES[number % len(VOC_SIZES)]
            mask = np.zeros((height, width), np.uint8)
            mask[8:24, 8:24] = 255
            mask[10:22, 10:22] = 1 + number % 3
            photograph = np.full((height, width, 3), 30, np.uint8)
            photograph[8:24, 8:24] = 90 + 50 * (number % 3)
            Image.fromarray(photograph).save(folder / "JPEGImages" / f"{name}.jpg", quality=95)
            png = Image.fromarray(mask, mode=None).convert("L")
            png.putpalette(palette)
            png.save(folder / "SegmentationClass" / f"{name}.png")
    return root
