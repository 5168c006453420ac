"""Datasets by name, and the settings of loading, augmenting and batching."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_trainer.config.options import MAX_SEED, Component, SettingsGroup, option
from ddp_trainer.errors import UserError, require
from ddp_trainer.imports import check_name, load_callable

if TYPE_CHECKING:
    from ddp_trainer.data.arrays import Datasets

# Name of an augmentation, in the order of application -> the settings that it reads.
AUGMENTATIONS: Mapping[str, tuple[str, ...]] = {
    "scale": ("data.scale_min", "data.scale_max"),
    "crop": ("data.crop_padding",),
    "flip": (),
    "rotate": ("data.rotation",),
    "affine": ("data.shear", "data.scale_min", "data.scale_max"),
    "jitter": ("data.jitter",),
}
# Where decoded images are held -> the settings that are read then.
CACHES: Mapping[str, tuple[str, ...]] = {
    "auto": ("data.workers",),
    "device": (),
    "host": ("data.workers",),
    "none": ("data.workers",),
}
# Settings that are read for images that the trainer holds: with masks, and without, where the crop differs.
MASKED_IMAGES = ("data.cache",)
IMAGES = (*MASKED_IMAGES, "data.crop_padding")
_FILES = ("data.dir", "data.download")

# Name -> module:load(config) -> Datasets. Datasets with files also have module:download(config).
DATASETS = {
    "digits": Component(
        "ddp_trainer.data.published:load_digits", (*IMAGES, "data.validation_fraction", "data.split_seed")
    ),
    "cifar10": Component("ddp_trainer.data.published:load_cifar10", (*IMAGES, *_FILES, "data.verify")),
    "fashion-mnist": Component("ddp_trainer.data.published:load_fashion_mnist", (*IMAGES, *_FILES, "data.verify")),
    "voc2012": Component("ddp_trainer.data.published:load_voc2012", (*MASKED_IMAGES, *_FILES, "data.image_size")),
    "python-reference": Component("ddp_trainer.data.text:load", ("data.validation_fraction",)),
}


@dataclass(frozen=True)
class DataConfig(SettingsGroup, group="data"):
    """The dataset, its augmentation and the size of batches."""

    name: str = option("digits", "a built-in dataset, or your own module:function", flag="--data")
    dir: str = option("data", "folder with the dataset's files", flag="--data-dir")
    download: bool = option(False, "download missing files first, by one process per node", flag="--data-download")
    verify: bool = option(True, "check the files' published checksums when reading", flag="--data-verify")
    cache: str = option(
        "auto",
        "where decoded images are held: device or host memory, or none (--workers read them for every batch); "
        "auto: the first of these in which they fit",
        flag="--data-cache",
        choices=tuple(CACHES),
    )
    workers: int = option(2, "processes per rank that read ahead, if images are not held on the device", at_least=0)
    image_size: int | None = option(
        None,
        "side in pixels to which images of varying size are resized (default: 480)",
        at_least=8,
    )
    batch_size: int = option(32, "samples per rank and step", at_least=1)
    eval_batch_size: int = option(256, "samples per rank and validation batch", at_least=1)
    augment: tuple[str, ...] = option((), "comma-separated list", choices=tuple(AUGMENTATIONS))
    crop_padding: int = option(4, "pixels of black border before a random crop", at_least=0)
    rotation: float = option(10.0, "maximum angle of a random rotation, in degrees", at_least=0, at_most=180)
    shear: float = option(10.0, "maximum angle of a random shear, in degrees", at_least=0, below=90)
    scale_min: float = option(0.8, "minimum factor of random scaling", above=0)
    scale_max: float = option(1.2, "maximum factor of random scaling")
    jitter: float = option(0.2, "maximum relative change of brightness, contrast and saturation", at_least=0, at_most=1)
    drop_last: bool = option(False, "drop the last, smaller batch of an epoch")
    validation_fraction: float = option(
        0.2, "share held out for validation, if the data has no validation split", above=0, below=1
    )
    split_seed: int = option(
        0,
        "seed of the validation split; independent of the run's seed, so that runs are comparable",
        at_least=0,
        at_most=MAX_SEED,
    )
    validation_as_training: bool = option(
        False, "validate on padded shares without their last, smaller batch, as a document does"
    )
    validation_augment: bool = option(False, "augment validation images too, as a document does")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.scale_min <= self.scale_max,
            "data.scale_min",
            f"{self.scale_min} is above scale_max, {self.scale_max}",
            "give for example 0.8 and 1.2",
        )
        check_name(self.name, DATASETS, "data.name")
        require(
            not self.download or ":" not in self.name,
            "data.download",
            f"only published datasets can be downloaded, not your own {self.name}",
            "download the files in that function, or before the run",
        )


def download(config: DataConfig) -> None:
    """Download the dataset's missing files into ``config.dir``.

    Raises :class:`UserError` if that fails. Only one process of a machine may call this at a time.
    """
    if config.name not in ("digits", "python-reference"):
        load_callable(DATASETS[config.name].target.replace(":load", ":download"), "data.name")(config)


def load_datasets(config: DataConfig) -> "Datasets":
    """Load the training and validation data into memory, or open large ones for reading.

    A user's ``module:function`` is called with ``config`` and returns :class:`ddp_trainer.data.arrays.Datasets`.
    Raises :class:`UserError` if files are missing or unreadable.
    """
    from ddp_trainer.data.arrays import Datasets

    target = DATASETS[config.name].target if config.name in DATASETS else config.name
    datasets = load_callable(target, "data.name")(config)
    if not isinstance(datasets, Datasets):
        raise UserError(
            "data.name", f"{config.name} returned {type(datasets).__name__}", "return ddp_trainer.data.arrays.Datasets"
        )
    return datasets
