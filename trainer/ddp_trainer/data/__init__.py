"""Datasets by name, and the settings of the path from the data to a batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_trainer.config.options import MAX_SEED, Component, Settings, option
from ddp_trainer.errors import UserError, require
from ddp_trainer.imports import check_name, load_callable

if TYPE_CHECKING:
    from ddp_trainer.data.arrays import Datasets

# In the order in which they are applied, with the settings that they read.
AUGMENTATIONS: Mapping[str, tuple[str, ...]] = {
    "scale": ("data.scale_min", "data.scale_max"),
    "crop": ("data.crop_padding",),
    "flip": (),
    "rotate": ("data.rotation",),
    "affine": ("data.shear", "data.scale_min", "data.scale_max"),
    "jitter": ("data.jitter",),
}
# Where decoded images are held, and what is read there.
CACHES: Mapping[str, tuple[str, ...]] = {
    "auto": ("data.workers",),
    "device": (),
    "host": ("data.workers",),
    "none": ("data.workers",),
}
# What is read of all data that the trainer holds as images, and of those without masks, which are cut otherwise.
MASKED_IMAGES = ("data.cache",)
IMAGES = (*MASKED_IMAGES, "data.crop_padding")
_FILES = ("data.dir", "data.download")

# name -> module:load(config) -> Datasets; beside it, where there is something to fetch, download(config).
DATASETS = {
    "digits": Component(
        "ddp_trainer.data.published:load_digits", (*IMAGES, "data.validation_fraction", "data.split_seed")
    ),
    "cifar10": Component("ddp_trainer.data.published:load_cifar10", (*IMAGES, *_FILES, "data.verify")),
    "fashion-mnist": Component("ddp_trainer.data.published:load_fashion_mnist", (*IMAGES, *_FILES, "data.verify")),
    "voc2012": Component("ddp_trainer.data.published:load_voc2012", (*MASKED_IMAGES, *_FILES, "data.image_size")),
    "python-reference": Component("ddp_trainer.data.text:load", ("data.validation_fraction",)),
    "imagefolder": Component("ddp_trainer.data.image_folder:load", ("data.dir", "data.image_size")),
}


@dataclass(frozen=True)
class DataConfig(Settings, group="data"):
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
        choices=tuple(CACHES),
    )
    workers: int = option(2, "processes a rank that read ahead where images are not held on the device", at_least=0)
    image_size: int | None = option(
        None,
        "side in pixels to which images of varying size are fitted (default: voc2012 480, imagefolder 224)",
        at_least=8,
    )
    batch_size: int = option(32, "samples a rank and step", at_least=1)
    eval_batch_size: int = option(256, "samples a rank and validation batch", at_least=1)
    augment: tuple[str, ...] = option((), "comma-separated list", choices=tuple(AUGMENTATIONS))
    crop_padding: int = option(4, "pixels of black border before a random crop", at_least=0)
    rotation: float = option(10.0, "greatest angle of a random rotation, in degrees", at_least=0, at_most=180)
    shear: float = option(10.0, "greatest angle of a random affine map's shear, in degrees", at_least=0, below=90)
    scale_min: float = option(0.8, "least factor of a random affine map or scaling", above=0)
    scale_max: float = option(1.2, "greatest factor of a random affine map or scaling")
    jitter: float = option(0.2, "most that brightness, contrast and saturation change, a share", at_least=0, at_most=1)
    drop_last: bool = option(False, "leave out the last, smaller batch of an epoch")
    validation_fraction: float = option(
        0.2, "share held out for validation where the data has no split of its own", above=0, below=1
    )
    split_seed: int = option(
        0,
        "which samples are held out; apart from the seed of the run, so that runs compare",
        at_least=0,
        at_most=MAX_SEED,
    )
    validation_as_training: bool = option(
        False, "validate on padded shares without their last, smaller batch, as a document wrote it"
    )
    validation_augment: bool = option(False, "augment validation images as well, as a document wrote it")

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
            not self.download or not (":" in self.name or self.name == "imagefolder"),
            "data.download",
            f"only published datasets can be downloaded, and {self.name} is your own",
            "download the files in that function, or beforehand",
        )


def download(config: DataConfig) -> None:
    """Fetch the dataset's files into ``config.dir`` where they are not there yet.

    Raises :class:`UserError` where that fails. Only one process of a machine may call this at a time.
    """
    if config.name not in ("digits", "python-reference"):
        load_callable(DATASETS[config.name].target.replace(":load", ":download"), "data.name")(config)


def load_datasets(config: DataConfig) -> "Datasets":
    """Read the training and validation data into memory, or, where they are large, open them for reading.

    A user's ``module:function`` is called with ``config`` and returns :class:`ddp_trainer.data.arrays.Datasets`.
    Raises :class:`UserError` where files are missing or unreadable.
    """
    from ddp_trainer.data.arrays import Datasets

    target = DATASETS[config.name].target if config.name in DATASETS else config.name
    datasets = load_callable(target, "data.name")(config)
    if not isinstance(datasets, Datasets):
        raise UserError(
            "data.name", f"{config.name} returned {type(datasets).__name__}", "return ddp_trainer.data.arrays.Datasets"
        )
    return datasets
