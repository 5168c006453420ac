"""Datasets by name, and the settings of loading, augmenting and batching."""

from collections.abc import Mapping
from dataclasses import dataclass

from ddp_sdk.errors import require
from ddp_trainer.imports import check_name
from ddp_trainer.options import SettingsGroup, option

# In the order of application.
AUGMENTATIONS = ("scale", "crop", "flip", "rotate", "affine", "jitter")
# Name -> module:load(config) -> Datasets. Those in ``_FILES`` can be downloaded.
DATASETS: Mapping[str, str] = {
    "digits": "ddp_trainer.data.published:load_digits",
    "cifar10": "ddp_trainer.data.published:load_cifar10",
    "fashion-mnist": "ddp_trainer.data.published:load_fashion_mnist",
    "voc2012": "ddp_trainer.data.published:load_voc2012",
    "python-reference": "ddp_trainer.data.text:load",
}
_FILES = ("cifar10", "fashion-mnist", "voc2012")


@dataclass(frozen=True)
class DataConfig(SettingsGroup, group="data"):
    """The dataset, its augmentation and the size of batches."""

    name: str = option("digits", "a built-in dataset, or your own module:function", flag="--data")
    dir: str = option("data", "folder with the dataset's files", flag="--data-dir", only={"data.name": _FILES})
    download: bool = option(
        False,
        "download missing files first, by one process per node",
        flag="--data-download",
        only={"data.name": _FILES},
    )
    verify: bool = option(
        True,
        "check the files' published checksums when reading",
        flag="--data-verify",
        only={"data.name": ("cifar10", "fashion-mnist")},
    )
    cache: str = option(
        "auto",
        "hold decoded images on the device, or otherwise in host memory, if they fit (auto), or let --workers read "
        "them for every batch (none)",
        flag="--data-cache",
        choices=("auto", "none"),
        only={"data.name": ("digits", *_FILES)},
    )
    workers: int = option(2, "processes per rank that read ahead, if images are not held on the device", at_least=0)
    image_size: int | None = option(
        None,
        "side in pixels to which images of varying size are resized (default: 480)",
        only={"data.name": ("voc2012",)},
        at_least=8,
    )
    batch_size: int = option(32, "samples per rank and step", at_least=1)
    eval_batch_size: int = option(256, "samples per rank and validation batch", at_least=1)
    augment: tuple[str, ...] = option((), "comma-separated list", choices=AUGMENTATIONS)
    crop_padding: int = option(
        4,
        "pixels of black border before a random crop, without masks",
        only={"data.augment": ("crop",), "data.name": ("digits", "cifar10", "fashion-mnist")},
        at_least=0,
    )
    rotation: float = option(
        10.0,
        "maximum angle of a random rotation, in degrees",
        only={"data.augment": ("rotate",)},
        at_least=0,
        at_most=180,
    )
    shear: float = option(
        10.0, "maximum angle of a random shear, in degrees", only={"data.augment": ("affine",)}, at_least=0, below=90
    )
    scale_min: float = option(
        0.8, "minimum factor of random scaling", only={"data.augment": ("scale", "affine")}, above=0
    )
    scale_max: float = option(1.2, "maximum factor of random scaling", only={"data.augment": ("scale", "affine")})
    jitter: float = option(
        0.2,
        "maximum relative change of brightness, contrast and saturation",
        only={"data.augment": ("jitter",)},
        at_least=0,
        at_most=1,
    )
    drop_last: bool = option(False, "drop the last, smaller batch of an epoch")
    validation_fraction: float = option(
        0.2,
        "share held out for validation, if the data has no validation split",
        only={"data.name": ("digits", "python-reference")},
        above=0,
        below=1,
    )
    validation_as_training: bool = option(
        False, "validate on padded shares without their last, smaller batch, as a document does"
    )
    validation_augment: bool = option(
        False, "augment validation images too, as a document does", only={"data.augment": ()}
    )

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
