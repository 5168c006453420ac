"""The documents' systems, each from files in its true format, on two ranks, with reduced networks."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch

from tests.support.tiny_datasets import pack_cifar10, write_cifar10, write_fashion_mnist, write_voc2012
from tests.support.trainer_ranks import run_script, start, train

from .test_trainer_exactness import same, weights

pytestmark = pytest.mark.process

# Replaces DeepLab, which takes seconds to build.
SEGMENTATION = """
from torch import nn
def build(config, in_channels, num_classes):
    first = nn.Conv2d(in_channels, 8, 3, padding=1)
    return nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, num_classes, 1))
"""
NARROW = ["--model-widen", "1", "--batch-size", "10"]
SYSTEMS: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "cifar10-resnet50": (write_cifar10, ["--batch-size", "4"]),
    "fashion-mnist-wideresnet": (write_fashion_mnist, NARROW),
    "fashion-mnist-wideresnet-large-batch": (write_fashion_mnist, NARROW),
    "cifar10-wideresnet": (write_cifar10, NARROW),
    "voc2012-deeplabv3-resnet101": (
        write_voc2012,
        ["--model", "tiny_segmentation:build", "--image-size", "32", "--batch-size", "2", "--data-cache", "none",
         "--workers", "1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(SYSTEMS))
def test_documents_system_trains_on_two_ranks(name: str, tmp_path: Path) -> None:
    write, cut = SYSTEMS[name]
    write(tmp_path / "data")
    (tmp_path / "tiny_segmentation.py").write_text(SEGMENTATION)
    arguments = ["--preset", name, *cut, "--epochs", "1", "--max-steps", "2", "--log-every", "1"]
    arguments += ["--data-dir", str(tmp_path / "data")]
    if write is not write_voc2012:
        arguments += ["--data-verify", "false"]
    if "large-batch" in name:
        arguments += ["--csv-dir", str(tmp_path / "csv")]
    output = train(tmp_path, arguments, 2, {"PYTHONPATH": str(tmp_path)}).output(0)
    losses = [float(loss) for loss in re.findall(r"step \d+/\d+ loss (\S+) ", output)]
    assert len(losses) == 2
    assert all(0 < loss < 20 for loss in losses)
    assert f"config: preset={name} " in output
    if "voc" in name:
        score = re.search(r"validation: loss \S+ accuracy (\S+) mean_iou (\S+)", output)
        assert score is not None
        assert 0 <= float(score[2]) <= float(score[1]) <= 1
    if name == "cifar10-wideresnet":
        assert re.search(r"training accuracy 0\.\d{4}", output)
    if "large-batch" in name:
        rows = (tmp_path / "csv" / "2ranks-10bs-0.01lr-0.9m-5w.csv").read_text().split()
        assert rows[:2] == ["time,val_accuracy", "0.0,0.0"]
        assert len(rows) == 3


def test_published_form_trains_too(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "data")
    arguments = ["--preset", "cifar10-wideresnet", "--as-published", *NARROW, "--eval-batch-size", "5", "--data-verify"]
    arguments += ["false", "--data-dir", str(tmp_path / "data"), "--epochs", "1", "--max-steps", "2"]
    output = train(tmp_path, arguments, 2).output(0)
    assert "precision" in output
    assert "validation: loss" in output
    assert output.split("precision:")[1].split()[0] == "name=fp32"


def test_run_ends_on_all_ranks_when_its_target_is_reached(tmp_path: Path) -> None:
    arguments = ["--preset", "digits-resnet", "--model-width", "8", "--epochs", "20", "--target-accuracy", "0.5"]
    arguments += ["--checkpoint-dir", str(tmp_path / "ckpt"), "--patience", "2"]
    output = train(tmp_path, arguments, 2).output(0)
    accuracies = [float(item) for item in re.findall(r"validation: loss \S+ accuracy (\S+)", output)]
    assert accuracies[-2] >= 0.5
    assert accuracies[-1] >= 0.5
    assert len(accuracies) < 20
    assert not any(a >= 0.5 and b >= 0.5 for a, b in pairwise(accuracies[:-1]))
    assert "target reached in 2 validations in a row" in output
    assert (tmp_path / "ckpt" / "model.pt").exists()
    # After another start it has nothing to train.
    again = train(tmp_path, arguments, 2).output(0)
    assert "validation:" not in again
    assert "done:" in again


# Everything that has a state or draws numbers, at once; worker processes read the images.
EVERYTHING = [
    "--preset", "digits-resnet", "--model", "wide-resnet", "--model-widen", "1", "--dropout", "0.1", "--sync-batchnorm",
    "--optimizer", "novograd", "--lr", "0.02", "--clip-norm", "1.0", "--batch-size", "128", "--precision", "bf16",
    "--channels-last",
    "--augment", "crop,flip,rotate,affine,jitter", "--data-cache", "none", "--workers", "1", "--train-accuracy",
    "--epochs", "2", "--log-every", "1", "--schedule", "constant",
]  # fmt: skip


def test_run_with_all_features_resumes_bitwise(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    train(whole, [*EVERYTHING, "--checkpoint-dir", str(whole)], 2)
    # In the middle of the second epoch of 6 steps.
    train(parts, [*EVERYTHING, "--checkpoint-dir", str(parts), "--max-steps", "8"], 2)
    first = torch.load(max(parts.glob("step-*.pt")), weights_only=True)
    assert (first["position"]["step"], first["position"]["epoch"]) == (8, 1)
    train(parts, [*EVERYTHING, "--checkpoint-dir", str(parts)], 2)
    item, second = (torch.load(max(folder.glob("step-*.pt")), weights_only=True)["engine"] for folder in (parts, whole))
    assert same(item, second)
    assert same(weights(parts), weights(whole))
    assert same(weights(parts), item["model"])


def test_readers_outlive_signal_to_whole_process_group_until_rank_has_saved(tmp_path: Path) -> None:
    # torchrun signals process groups, of which the readers are part.
    arguments = ["--preset", "digits-resnet", "--model-width", "4", "--data-cache", "none", "--workers", "2"]
    arguments += ["--epochs", "200", "--log-every", "1", "--checkpoint-dir", str(tmp_path / "ckpt")]
    with start(tmp_path, arguments) as ranks:
        ranks.wait_for("step 5/")
        readers = psutil.Process(ranks.pid(0)).children()
        assert len(readers) == 2
        for reader in readers:
            reader.terminate()
        steps = ranks.output(0).count(" loss ")
        ranks.wait_for(f"step {steps + 30}/")
        assert all(reader.is_running() for reader in readers)
        ranks.processes[0].terminate()
        for reader in readers:
            reader.terminate()
        assert ranks.codes() == [85]
    assert "checkpoint saved" in ranks.output(0)
    assert psutil.wait_procs(readers, timeout=300)[1] == []


def test_two_ranks_with_synchronised_batch_norm_equal_one_process_on_global_batch(tmp_path: Path) -> None:
    common = ["--preset", "digits-resnet", "--model-width", "8", "--max-steps", "8", "--lr", "0.02"]
    train(tmp_path / "1", [*common, "--batch-size", "32", "--output-dir", str(tmp_path / "1")])
    two = [*common, "--batch-size", "16", "--sync-batchnorm", "--output-dir", str(tmp_path / "2")]
    train(tmp_path / "2", two, 2)
    alone = weights(tmp_path / "1")
    for name, value in weights(tmp_path / "2").items():
        torch.testing.assert_close(value, alone[name], atol=5e-5, rtol=5e-4)


# One process of the node downloads, from the test's own counting web server.
FETCH = """
import collections, functools, http.server, pathlib, threading
from ddp_trainer.assembly import fetch_datasets
from ddp_trainer.data import DataConfig
from ddp_trainer.imports import import_torchvision
import_torchvision()
from torchvision.datasets import CIFAR10

class Counting(http.server.SimpleHTTPRequestHandler):
    asked = collections.Counter()
    def do_GET(self):
        Counting.asked[self.path] += 1
        super().do_GET()
    def log_message(self, *_):
        pass

folder = pathlib.Path(arguments[0])
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Counting, directory=str(folder)))
threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
CIFAR10.url = f"http://127.0.0.1:{server.server_port}/{CIFAR10.filename}"
CIFAR10.tgz_md5 = (folder / "md5").read_text()
CIFAR10.train_list = [(name, None) for name, _ in CIFAR10.train_list]
CIFAR10.test_list = [(name, None) for name, _ in CIFAR10.test_list]
CIFAR10.meta = CIFAR10.meta | {"md5": None}
datasets = fetch_datasets(DataConfig(name="cifar10", dir=str(folder / "new"), download=True), world)
print("samples", len(datasets.train), "fetched", sum(Counting.asked.values()))
"""


def test_one_process_per_node_downloads_and_all_read(tmp_path: Path) -> None:
    archive = tmp_path / "cifar-10-python.tar.gz"
    (tmp_path / "md5").write_text(pack_cifar10(write_cifar10(tmp_path / "origin"), archive))
    ranks = run_script(tmp_path, FETCH, 2)
    # torchvision requests the headers first, to follow redirections.
    assert "samples 100 fetched 2" in ranks.output(0)
    assert ranks.output(1) == "samples 100 fetched 0\n"
