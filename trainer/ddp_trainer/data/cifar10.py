"""CIFAR-10 in torchvision's on-disk format: 60,000 colour images of 32x32 pixels in pickled batches."""

from pathlib import Path
from typing import Any

import torch

from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets, ImageData
from ddp_trainer.data.files import fetch, readable, require_files
from ddp_trainer.torchvision_compat import import_torchvision

FOLDER = "cifar-10-batches-py"
FILES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch", "batches.meta")


def download(config: DataConfig) -> None:
    """Fetch and unpack the archive into ``config.dir``, unless its files are there already."""
    fetch("CIFAR-10", Path(config.dir), [f"{FOLDER}/{name}" for name in FILES], "CIFAR10")


def find_reader(*, verify: bool) -> Any:
    """torchvision's class for CIFAR-10, which refuses other files than the published ones only if ``verify``."""
    import_torchvision()
    from torchvision.datasets import CIFAR10

    class Unverified(CIFAR10):  # type: ignore[misc]
        """The same without checksums."""

        train_list = [(name, None) for name, _ in CIFAR10.train_list]
        test_list = [(name, None) for name, _ in CIFAR10.test_list]
        meta = CIFAR10.meta | {"md5": None}

    return CIFAR10 if verify else Unverified


def load(config: DataConfig) -> Datasets:
    """Read CIFAR-10 below ``config.dir`` with torchvision's reader; ``config.verify`` checks its published checksums.

    Raises :class:`UserError` naming the folder and the files expected in it.
    """
    folder = Path(config.dir) / FOLDER
    unpack = "unpack cifar-10-python.tar.gz"
    require_files("CIFAR-10", folder, FILES, f"{unpack} there (it holds {FOLDER}/ with {', '.join(FILES)})")
    reader = find_reader(verify=config.verify)
    parts = []
    for train in (True, False):
        with readable("CIFAR-10", folder, unpack):
            data = reader(config.dir, train=train, download=False)
            # The reader gives (N, H, W, C).
            images = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
            parts.append(ImageData(images, torch.tensor(data.targets, dtype=torch.int64)))
    # Normalised with mean and standard deviation 0.5 of the range, as in the documents.
    return Datasets(parts[0], parts[1], num_classes=10, mean=(127.5,), std=(127.5,))
