"""scikit-learn's handwritten digits: 1,797 real 8x8 grey images with values 0 to 16, shipped inside the package.

The file is read as ``sklearn.datasets.load_digits`` reads it, but without importing scikit-learn, which takes longer
than training on the digits for an epoch.
"""

import importlib.util
from pathlib import Path

import numpy as np
import torch

from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets, ImageData
from ddp_trainer.errors import UserError

CSV = Path("datasets/data/digits.csv.gz")


def load_arrays() -> tuple[torch.Tensor, torch.Tensor]:
    """All images, uint8 (1797, 1, 8, 8), and their labels, int64 (1797,), in the file's order.

    Raises :class:`UserError` where scikit-learn or its file is missing.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise UserError(
            "data.name",
            "digits come with scikit-learn, which is not installed",
            "pip install scikit-learn, or choose another preset",
        )
    path = Path(spec.origin).parent / CSV
    try:
        table = np.loadtxt(path, delimiter=",")
    except (OSError, EOFError, ValueError) as error:
        raise UserError("data.name", f"digits: {path} can't be read: {error}", "reinstall scikit-learn") from error
    images = torch.from_numpy(table[:, :64].astype(np.uint8)).reshape(-1, 1, 8, 8)
    return images, torch.from_numpy(table[:, 64].astype(np.int64))


def load(config: DataConfig) -> Datasets:
    """The digits, split once and for all by ``config.split_seed``."""
    images, labels = load_arrays()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(config.split_seed))
    held_out = max(1, round(len(labels) * config.validation_fraction))
    validation, train = order[:held_out], order[held_out:]
    return Datasets(
        train=ImageData(images[train], labels[train]),
        validation=ImageData(images[validation], labels[validation]),
        num_classes=10,
        # Mean and standard deviation of all pixels of the file.
        mean=(4.884,),
        std=(6.017,),
    )
