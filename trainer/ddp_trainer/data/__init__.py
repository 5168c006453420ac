"""Datasets by name, and the settings of the path from the data to a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_trainer.config.options import option
from ddp_trainer.errors import require
from ddp_trainer.plugins import load_callable

if TYPE_CHECKING:
    from ddp_trainer.data.arrays import Datasets

# In the order in which they are applied.
AUGMENTATIONS = ("scale", "crop", "flip", "rotate", "affine", "jitter")

# name -> module:function(config) -> Datasets
DATASETS = {
    "digits": "ddp_trainer.data.digits:load",
    "cifar10": "ddp_trainer.data.cifar10:load",
    "fashion-mnist": "ddp_trainer.data.fashion_mnist:load",
    "voc2012": "ddp_trainer.data.voc2012:load",
}
# name -> module:function(folder); the others have nothing to download.
DOWNLOADS = {
    "cifar10": "ddp_trainer.data.cifar10:download",
    "fashion-mnist": "ddp_trainer.data.fashion_mnist:download",
    "voc2012": "ddp_trainer.data.voc2012:download",
}


@dataclass(frozen=True)
class DataConfig:
    """Which images, how they are batched and augmented."""

    name: str = option("digits", "a built-in dataset, or module:function of your own", flag="--data")
    dir: str = option("data", "folder with the dataset's files", flag="--data-dir")
    download: bool = option(False, "fetch missing files first, on one process a node", flag="--data-download")
    verify: bool = option(True, "check the files' published checksums when reading", flag="--data-verify")
    cache: str = option(
        "auto",
        "where decoded images are held: device or host memory, or none (read for every batch by --workers); "
        "auto: the first of these where they fit",
        flag="--data-cache",
        choices=("auto", "device", "host", "none"),
    )
    workers: int = option(2, "processes a rank that read ahead where images are not held on the device")
    image_size: int = option(480, "side in pixels to which images of varying size are fitted (voc2012)")
    batch_size: int = option(32, "samples a rank and step")
    eval_batch_size: int = option(256, "samples a rank and validation batch")
    augment: tuple[str, ...] = option((), f"comma-separated list of {', '.join(AUGMENTATIONS)}")
    crop_padding: int = option(4, "pixels of black border before a random crop")
    rotation: float = option(10.0, "greatest angle of a random rotation, in degrees")
    shear: float = option(10.0, "greatest angle of a random affine map's shear, in degrees")
    scale_min: float = option(0.8, "least factor of a random affine map or scaling")
    scale_max: float = option(1.2, "greatest factor of a random affine map or scaling")
    jitter: float = option(0.2, "greatest relative change of brightness, contrast and saturation")
    drop_last: bool = option(False, "leave out the last, smaller batch of an epoch")
    validation_fraction: float = option(0.2, "share held out for validation where the data has no split of its own")
    split_seed: int = option(0, "which samples are held out; apart from the seed of the run, so that runs compare")
    validation_as_training: bool = option(
        False, "validate on padded shares without their last, smaller batch, as a document wrote it"
    )
    validation_augment: bool = option(False, "augment validation images as well, as a document wrote it")

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("eval_batch_size", 1), ("workers", 0), ("image_size", 8)):
            value = getattr(self, name)
            require(value >= least, f"data.{name}", f"{value} is too small", f"give at least {least}")
        require(
            self.crop_padding >= 0,
            "data.crop_padding",
            f"{self.crop_padding} is negative",
            "give pixels, for example 4",
        )
        require(0 <= self.rotation <= 180, "data.rotation", f"{self.rotation} is not an angle", "give 0 to 180 degrees")
        require(0 <= self.shear < 90, "data.shear", f"{self.shear} is not below 90 degrees", "give for example 10")
        require(
            0 < self.scale_min <= self.scale_max,
            "data.scale_min",
            f"{self.scale_min} to {self.scale_max} is no range of factors",
            "give for example 0.8 and 1.2",
        )
        require(0 <= self.jitter <= 1, "data.jitter", f"{self.jitter} is not a share", "give 0 to 1")
        require(
            0.0 < self.validation_fraction < 1.0,
            "data.validation_fraction",
            f"{self.validation_fraction} is not between 0 and 1",
            "give for example 0.2",
        )
        for name in self.augment:
            require(
                name in AUGMENTATIONS,
                "data.augment",
                f"{name!r} is not known",
                f"choose from {', '.join(AUGMENTATIONS)}",
            )
        if ":" not in self.name:
            require(
                self.name in DATASETS,
                "data.name",
                f"{self.name!r} is not known",
                f"choose one of {', '.join(DATASETS)}, or module:function",
            )
        require(
            not self.download or ":" not in self.name,
            "data.download",
            f"{self.name} is not a dataset that is known how to download",
            "fetch it in the function itself, or beforehand",
        )


def download(config: DataConfig) -> None:
    """Fetch the dataset's files into ``config.dir`` where they are not there yet.

    Raises :class:`UserError` where that fails. Only one process of a machine may call this at a time.
    """
    if config.name in DOWNLOADS:
        load_callable(DOWNLOADS[config.name], "data.name")(config)


def load_datasets(config: DataConfig) -> Datasets:
    """Read the training and validation data into memory, or, where they are large, open them for reading.

    A user's ``module:function`` is called with ``config`` and returns :class:`ddp_trainer.data.arrays.Datasets`.
    Raises :class:`UserError` where files are missing or unreadable.
    """
    from ddp_trainer.data.arrays import Datasets

    datasets = load_callable(DATASETS.get(config.name, config.name), "data.name")(config)
    require(
        isinstance(datasets, Datasets),
        "data.name",
        f"{config.name} returned {type(datasets).__name__}",
        "return ddp_trainer.data.arrays.Datasets",
    )
    assert isinstance(datasets, Datasets)
    return datasets
