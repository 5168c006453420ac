"""Published datasets in their own formats: reading, missing or damaged files, and downloads."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from PIL import Image

from ddp_sdk.errors import UserError
from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets, FileData, ImageData
from ddp_trainer.data.datasets import load_datasets
from ddp_trainer.data.published import download
from tests.support.lazy import Lazy
from tests.support.tiny_datasets import VOC_SIZES, pack_cifar10, write_cifar10, write_fashion_mnist, write_voc2012

reference = Lazy("torchvision.datasets")


def read(name: str, root: Path, **settings: object) -> Datasets:
    return load_datasets(DataConfig(name=name, dir=str(root), **settings))  # type: ignore[arg-type]


def read_whole(name: str, root: Path) -> None:
    """Read a dataset including the parts that are otherwise read on demand."""
    train = read(name, root, verify=False).train
    if isinstance(train, FileData):
        train.read_all(threads=2)


def arrays(data: ImageData | FileData) -> ImageData:
    assert isinstance(data, ImageData)
    return data


def test_fashion_mnist_equals_torchvision(tmp_path: Path) -> None:
    datasets = read("fashion-mnist", write_fashion_mnist(tmp_path))
    reader = reference.FashionMNIST(str(tmp_path), train=True)
    train = arrays(datasets.train)
    assert train.image_shape == (1, 28, 28)
    assert torch.equal(train.images[:, 0], reader.data)
    assert torch.equal(train.labels, reader.targets)
    assert len(datasets.validation) == 20
    # ToTensor only: values from 0 to 1.
    assert (datasets.mean, datasets.std) == ((0.0,), (255.0,))


def test_cifar10_equals_torchvision(tmp_path: Path) -> None:
    datasets = read("cifar10", write_cifar10(tmp_path), verify=False)
    train = arrays(datasets.train)
    first = pickle.loads((tmp_path / "cifar-10-batches-py" / "data_batch_1").read_bytes())
    assert torch.equal(train.images[:20].reshape(20, -1), torch.from_numpy(first["data"]))
    assert train.labels[:20].tolist() == first["labels"]
    assert len(train) == 100


def test_voc_is_fitted_into_squares_with_void_around(tmp_path: Path) -> None:
    datasets = read("voc2012", write_voc2012(tmp_path), image_size=48)
    train = datasets.train
    assert isinstance(train, FileData)
    assert (len(train), len(datasets.validation), datasets.num_classes) == (8, 4, 21)
    assert train.masks
    for index, (width, height) in enumerate(VOC_SIZES):
        image, mask = train.reader[index]
        assert (image.shape, image.dtype) == ((3, 48, 48), torch.uint8)
        assert (mask.shape, mask.dtype) == ((48, 48), torch.uint8)
        scale = 48 / max(width, height)
        right = round(width * scale)
        bottom = round(height * scale)
        assert not image[:, bottom:].any()
        assert not image[:, :, right:].any()
        assert (mask[bottom:] == 255).all()
        assert (mask[:, right:] == 255).all()
        assert set(mask[:bottom, :right].unique().tolist()) == {0, 1 + index, 255}
        middle = round(16 * scale)
        assert int(mask[middle, middle]) == 1 + index
        assert int(image[0, middle, middle]) == pytest.approx(90 + 50 * index, abs=6)
    # Without resizing, the mask equals the file's.
    largest = read("voc2012", tmp_path, image_size=60).train
    assert isinstance(largest, FileData)
    reader = reference.VOCSegmentation(str(tmp_path), year="2012", image_set="train")
    assert torch.equal(
        largest.reader[2][1], torch.frombuffer(bytearray(reader[2][1].tobytes()), dtype=torch.uint8).view(60, 60)
    )


def test_voc_read_in_memory_equals_voc_read_by_image(tmp_path: Path) -> None:
    train = read("voc2012", write_voc2012(tmp_path), image_size=32).train
    assert isinstance(train, FileData)
    whole = train.read_all(threads=3)
    assert whole.nbytes == train.nbytes
    for index in range(len(train)):
        image, mask = train.reader[index]
        assert torch.equal(whole.images[index], image)
        assert torch.equal(whole.labels[index], mask)


WRITERS: dict[str, Callable[[Path], Path]] = {
    "cifar10": write_cifar10,
    "fashion-mnist": write_fashion_mnist,
    "voc2012": write_voc2012,
}
PLACES = {
    "cifar10": ("cifar-10-batches-py", "data_batch_2"),
    "fashion-mnist": ("FashionMNIST/raw", "t10k-labels-idx1-ubyte"),
    "voc2012": ("VOCdevkit/VOC2012", "SegmentationClass/2012_000003.png"),
}


@pytest.mark.parametrize("name", list(WRITERS))
def test_missing_file_is_named_with_folder_and_remedies(name: str, tmp_path: Path) -> None:
    folder, file = PLACES[name]
    with pytest.raises(UserError) as caught:
        read(name, tmp_path)
    assert str(tmp_path / folder) in str(caught.value)
    WRITERS[name](tmp_path)
    (tmp_path / folder / file).unlink()
    with pytest.raises(UserError) as caught:
        read(name, tmp_path, verify=False)
    message = str(caught.value)
    assert str(tmp_path / folder) in message
    assert f"{file} missing" in message
    assert "--data-dir" in message
    assert "--data-download" in message


@pytest.mark.parametrize("name", list(WRITERS))
@pytest.mark.parametrize("content", [b"", b"nonsense that is neither IDX nor pickle nor a picture"])
def test_damaged_file_is_user_error(name: str, content: bytes, tmp_path: Path) -> None:
    folder, file = PLACES[name]
    WRITERS[name](tmp_path)
    (tmp_path / folder / file).write_bytes(content)
    with pytest.raises(UserError, match=r"can't be read|damaged"):
        read_whole(name, tmp_path)


def test_published_checksums_are_verified_on_request(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    write_fashion_mnist(tmp_path, packed=True)
    for name in ("cifar10", "fashion-mnist"):
        with pytest.raises(UserError, match=r"not the published one.*--data-verify false"):
            read(name, tmp_path)
        read(name, tmp_path, verify=False)


def test_mask_without_palette_is_user_error(tmp_path: Path) -> None:
    write_voc2012(tmp_path)
    path = tmp_path / "VOCdevkit" / "VOC2012" / "SegmentationClass" / "2012_000000.png"
    with Image.open(path) as mask:
        mask.convert("RGB").save(path)
    train = read("voc2012", tmp_path).train
    assert isinstance(train, FileData)
    with pytest.raises(UserError, match=r"mode RGB.*palette PNG"):
        train.reader[0]


# Fetching


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """A web server for the files of ``tmp_path``."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_download_unpacks_published_archive(tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / reference.CIFAR10.filename
    monkeypatch.setattr(reference.CIFAR10, "tgz_md5", pack_cifar10(write_cifar10(tmp_path / "origin"), archive))
    monkeypatch.setattr(reference.CIFAR10, "url", f"{site}/{archive.name}")
    for name in ("train_list", "test_list"):
        monkeypatch.setattr(reference.CIFAR10, name, [(file, None) for file, _ in getattr(reference.CIFAR10, name)])
    monkeypatch.setattr(reference.CIFAR10, "meta", reference.CIFAR10.meta | {"md5": None})
    config = DataConfig(name="cifar10", dir=str(tmp_path / "new"))
    download(config)
    assert len(load_datasets(config).train) == 100
    # Existing files are not downloaded again.
    archive.unlink()
    (tmp_path / "new" / reference.CIFAR10.filename).unlink()
    download(config)


def test_failed_download_names_folder_and_alternative(
    tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference.CIFAR10, "url", f"{site}/nowhere.tar.gz")
    with pytest.raises(UserError) as caught:
        download(DataConfig(name="cifar10", dir=str(tmp_path / "new")))
    assert caught.value.field == "data.download"
    assert str(tmp_path / "new") in str(caught.value)
    assert "copy the files there" in str(caught.value)


def test_digits_need_no_download() -> None:
    download(DataConfig(name="digits"))


def test_user_dataset_is_not_downloaded() -> None:
    with pytest.raises(UserError, match=r"data\.download"):
        DataConfig(name="mine:load", download=True)
