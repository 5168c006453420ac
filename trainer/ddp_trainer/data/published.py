"""The published datasets in torchvision's on-disk formats, and scikit-learn's digits.

CIFAR-10 has 60,000 color images of 32x32 pixels in pickled batches, Fashion-MNIST 70,000 gray images of 28x28 in IDX
files. PASCAL VOC 2012's segmentation has 2,913 photographs of varying size with a class number for every pixel, of 21
classes and void. Each is resized to ``image_size`` pixels on its longer side and put into the top left corner of a
black square, its mask into a square of void, so that they can be batched.
"""

import contextlib
import hashlib
import importlib.util
import pickle
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import numpy as np
import torch
from torch import Tensor

from ddp_sdk.errors import UserError
from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import VOID, Datasets, FileData, ImageData
from ddp_trainer.imports import import_torchvision

# Statistics of ImageNet in units of pixel values, the usual choice for photographs.
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)
_VOC_SIZE = 480
_DIGITS_FILE = Path("datasets/data/digits.csv.gz")
_CIFAR10_FOLDER = "cifar-10-batches-py"
_CIFAR10_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
_FASHION_FOLDER = "FashionMNIST/raw"
_IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_VOC_FOLDER = "VOCdevkit/VOC2012"
_VOC_LISTS = ("ImageSets/Segmentation/train.txt", "ImageSets/Segmentation/val.txt")
# Name in messages, folder, files, and torchvision's class with its arguments.
_DOWNLOADS: dict[str, tuple[str, str, Sequence[str], str, dict[str, str]]] = {
    "cifar10": ("CIFAR-10", _CIFAR10_FOLDER, _CIFAR10_FILES, "CIFAR10", {}),
    "fashion-mnist": ("Fashion-MNIST", _FASHION_FOLDER, _IDX_FILES, "FashionMNIST", {}),
    "voc2012": ("VOC 2012", _VOC_FOLDER, _VOC_LISTS, "VOCSegmentation", {"year": "2012"}),
}


def require_files(what: str, folder: Path, names: Sequence[str], remedy: str) -> None:
    """Raise :class:`UserError` if files of ``names`` are missing in ``folder``; it lists them."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise UserError(
            "data.dir",
            f"{what} is not complete in {folder.resolve()}: {listed} missing",
            f"{remedy}, give --data-dir, or download it with --data-download",
        )


@contextlib.contextmanager
def readable(what: str, folder: Path, remedy: str) -> Iterator[None]:
    """Raise the exceptions of a reader of damaged or wrong files as :class:`UserError`."""
    try:
        yield
    except UserError:
        raise
    except RuntimeError as error:  # torchvision raises it for a wrong checksum
        raise UserError(
            "data.dir",
            f"files in {folder.resolve()} are damaged or not the published ones ({error})",
            f"{remedy} again, or skip the check with --data-verify false",
        ) from error
    except (
        pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError, AssertionError, IndexError, OSError,
        struct.error,
    ) as error:  # fmt: skip
        raise UserError(
            "data.dir",
            f"{what} in {folder.resolve()} can't be read: {type(error).__name__}: {error}",
            f"{remedy} again",
        ) from error


def download(config: DataConfig) -> None:
    """Download and unpack torchvision's dataset ``config.name`` into ``config.dir``, unless its files exist.

    Nothing is downloaded for the other datasets. Raises :class:`UserError` if the download fails. Only one process of a
    machine may call this at a time.
    """
    if config.name not in _DOWNLOADS:
        return
    what, within, names, dataset, arguments = _DOWNLOADS[config.name]
    folder = Path(config.dir)
    if all((folder / within / name).is_file() for name in names):
        return
    import_torchvision()
    from torchvision import datasets

    try:
        folder.mkdir(parents=True, exist_ok=True)
        getattr(datasets, dataset)(str(folder), download=True, **arguments)
    except (URLError, OSError, RuntimeError, EOFError) as error:
        if isinstance(error, HTTPError):
            error.close()  # the exception is also the response, and holds the connection
        raise UserError(
            "data.download",
            f"{what} can't be downloaded into {folder.resolve()}: {' '.join(str(error).split())[:200]}",
            "check the network and the disk, or copy the files there and omit --data-download",
        ) from error


def find_reader(*, verify: bool) -> Any:
    """Return torchvision's class for CIFAR-10; with ``verify`` it accepts only the published files."""
    import_torchvision()
    from torchvision.datasets import CIFAR10

    class Unverified(CIFAR10):  # type: ignore[misc]
        """CIFAR10 without checksums."""

        train_list = [(name, None) for name, _ in CIFAR10.train_list]
        test_list = [(name, None) for name, _ in CIFAR10.test_list]
        meta = CIFAR10.meta | {"md5": None}

    return CIFAR10 if verify else Unverified


def load_cifar10(config: DataConfig) -> Datasets:
    """Read CIFAR-10 below ``config.dir`` with torchvision's reader; ``config.verify`` checks its published checksums.

    Raises :class:`UserError` with the folder and the expected files.
    """
    folder = Path(config.dir) / _CIFAR10_FOLDER
    unpack = "unpack cifar-10-python.tar.gz"
    remedy = f"{unpack} there (it holds {_CIFAR10_FOLDER}/ with {', '.join(_CIFAR10_FILES)})"
    require_files("CIFAR-10", folder, _CIFAR10_FILES, remedy)
    reader = find_reader(verify=config.verify)
    parts = []
    for train in (True, False):
        with readable("CIFAR-10", folder, unpack):
            data = reader(config.dir, train=train, download=False)
            # The reader returns (N, H, W, C).
            images = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
            parts.append(ImageData(images, torch.tensor(data.targets, dtype=torch.int64)))
    # The documents normalize with a mean and a standard deviation of half the range.
    return Datasets(parts[0], parts[1], num_classes=10, mean=(127.5,), std=(127.5,))


def load_fashion_mnist(config: DataConfig) -> Datasets:
    """Read Fashion-MNIST below ``config.dir`` with torchvision's reader.

    ``config.verify`` checks the checksums of the published archives (``*.gz``) if they exist next to the files, as
    after a download; the reader checks none. Raises :class:`UserError` with the folder and the expected files.
    """
    folder = Path(config.dir) / _FASHION_FOLDER
    remedy = f"put the four files of Fashion-MNIST there, unpacked from their .gz ({', '.join(_IDX_FILES)})"
    require_files("Fashion-MNIST", folder, _IDX_FILES, remedy)
    import_torchvision()
    from torchvision.datasets import FashionMNIST

    for url, expected in FashionMNIST.resources if config.verify else ():
        path = folder / Path(url).name
        if path.is_file() and hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() != expected:
            raise UserError(
                "data.dir",
                f"{path.resolve()} is damaged or not the published one",
                "download it again, or skip the check with --data-verify false",
            )
    parts = []
    for train in (True, False):
        with readable("Fashion-MNIST", folder, "download the files"):
            data = FashionMNIST(config.dir, train=train, download=False)
            parts.append(ImageData(data.data.unsqueeze(1).contiguous(), data.targets.long()))
    # The document only scales to 0...1.
    return Datasets(parts[0], parts[1], num_classes=10, mean=(0.0,), std=(255.0,))


class VocReader:
    """Decodes the photographs of one list, which torchvision's dataset provides, and fits them into squares."""

    def __init__(self, dataset: Any, size: int) -> None:
        # Only paths: the dataset refers to the module that declares torchvision's operators, which can't be pickled.
        self.images: list[str] = list(dataset.images)
        self.masks: list[str] = list(dataset.masks)
        self.size = size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return image, uint8 (3, size, size), and mask, uint8 (size, size).

        Raises :class:`UserError` for a damaged file.
        """
        from PIL import Image

        with readable("VOC 2012", Path(self.images[index]), "unpack VOCtrainval_11-May-2012.tar"):
            with Image.open(self.images[index]) as opened:
                photograph = opened.convert("RGB")
            with Image.open(self.masks[index]) as mask:
                if mask.mode != "P" or mask.size != photograph.size:
                    raise UserError(
                        "data.dir",
                        f"{self.masks[index]} has mode {mask.mode} and size {mask.size}, its photograph "
                        f"{photograph.size}",
                        "give a palette PNG of the photograph's size",
                    )
                mask.load()
                scale = self.size / max(photograph.size)
                width, height = (max(1, min(self.size, round(side * scale))) for side in photograph.size)
                small = mask.resize((width, height), Image.Resampling.NEAREST)
        image = torch.zeros(3, self.size, self.size, dtype=torch.uint8)
        pixels = np.array(photograph.resize((width, height), Image.Resampling.BILINEAR))
        image[:, :height, :width] = torch.from_numpy(pixels).permute(2, 0, 1)
        classes = torch.full((self.size, self.size), VOID, dtype=torch.uint8)
        classes[:height, :width] = torch.from_numpy(np.array(small))
        return image, classes


def load_voc2012(config: DataConfig) -> Datasets:
    """Open VOC 2012 below ``config.dir`` by torchvision's dataset, which resolves the files of the two lists.

    Raises :class:`UserError` with the folder and the expected files.
    """
    folder = Path(config.dir) / _VOC_FOLDER
    remedy = f"unpack VOCtrainval_11-May-2012.tar into {Path(config.dir).resolve()} (it holds {_VOC_FOLDER}/)"
    require_files("VOC 2012", folder, _VOC_LISTS, remedy)
    import_torchvision()
    from torchvision.datasets import VOCSegmentation

    parts = []
    size = config.image_size or _VOC_SIZE
    for split in ("train", "val"):
        with readable("VOC 2012", folder, remedy):
            reader = VocReader(VOCSegmentation(config.dir, year="2012", image_set=split), size)
        names = [str(Path(path).relative_to(folder)) for path in [*reader.images, *reader.masks]]
        require_files("VOC 2012", folder, names, remedy)
        parts.append(FileData(reader, (3, size, size), masks=True))
    return Datasets(parts[0], parts[1], num_classes=21, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Read scikit-learn's digits: images, uint8 (1797, 1, 8, 8) of 0 to 16, and labels, int64 (1797,), in file order.

    Does not import scikit-learn, which takes longer than an epoch of training on the digits.

    Raises :class:`UserError` if scikit-learn or its file is missing.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise UserError(
            "data.name",
            "digits come with scikit-learn, which is not installed",
            "pip install scikit-learn, or choose another preset",
        )
    path = Path(spec.origin).parent / _DIGITS_FILE
    try:
        table = np.loadtxt(path, delimiter=",")
    except (OSError, EOFError, ValueError) as error:
        raise UserError("data.name", f"digits: {path} can't be read: {error}", "reinstall scikit-learn") from error
    images = torch.from_numpy(table[:, :64].astype(np.uint8)).reshape(-1, 1, 8, 8)
    return images, torch.from_numpy(table[:, 64].astype(np.int64))


def load_digits(config: DataConfig) -> Datasets:
    """Read the digits and hold out ``config.validation_fraction``, the same samples in all runs."""
    images, labels = read_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out = max(1, round(len(labels) * config.validation_fraction))
    validation = order[:held_out]
    train = order[held_out:]
    return Datasets(
        train=ImageData(images[train], labels[train]),
        validation=ImageData(images[validation], labels[validation]),
        num_classes=10,
        # Mean and standard deviation of all pixels of the file.
        mean=(4.884,),
        std=(6.017,),
    )
