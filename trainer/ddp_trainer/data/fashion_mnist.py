"""Fashion-MNIST in torchvision's on-disk format: 70,000 grey images of 28x28 pixels in IDX files."""

import hashlib
from pathlib import Path

from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets, ImageData
from ddp_trainer.data.files import fetch, readable, require_files
from ddp_trainer.errors import UserError
from ddp_trainer.torchvision_compat import import_torchvision

FOLDER = "FashionMNIST/raw"
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def download(config: DataConfig) -> None:
    """Fetch and unpack the files into ``config.dir``, unless they are there already."""
    fetch("Fashion-MNIST", Path(config.dir), [f"{FOLDER}/{name}" for name in FILES], "FashionMNIST")


def load(config: DataConfig) -> Datasets:
    """Read Fashion-MNIST below ``config.dir`` with torchvision's reader.

    ``config.verify`` checks the checksums of the published archives (``*.gz``) where they lie beside the files, as they
    do after a download; the reader itself checks none.
    Raises :class:`UserError` naming the folder and the files expected in it.
    """
    folder = Path(config.dir) / FOLDER
    remedy = f"put the four files of Fashion-MNIST there, unpacked from their .gz ({', '.join(FILES)})"
    require_files("Fashion-MNIST", folder, FILES, remedy)
    import_torchvision()
    from torchvision.datasets import FashionMNIST

    if config.verify:
        _verify(folder, {Path(url).name: md5 for url, md5 in FashionMNIST.resources})
    parts = []
    for train in (True, False):
        with readable("Fashion-MNIST", folder, "fetch the files"):
            data = FashionMNIST(config.dir, train=train, download=False)
            parts.append(ImageData(data.data.unsqueeze(1).contiguous(), data.targets.long()))
    # The document scales to 0...1 and does no more.
    return Datasets(parts[0], parts[1], num_classes=10, mean=(0.0,), std=(255.0,))


def _verify(folder: Path, published: dict[str, str]) -> None:
    for name, expected in published.items():
        path = folder / name
        if path.is_file() and hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() != expected:
            raise UserError(
                "data.dir",
                f"{path.resolve()} is damaged or not the published one",
                "fetch it again, or read the data as they are with --data-verify false",
            )
