"""Print docs/trainer.md with the current tables of presets and documents: ``python -m docs.pages.trainer``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from ddp_trainer.config.presets import PRESETS
from ddp_trainer.config.run import RunConfig, resolve

NOT_STATED = "not stated"


class DocumentedValue(NamedTuple):
    """A value in a document and its location there; ``keys`` are the settings that reproduce it."""

    what: str
    keys: str
    value: str = NOT_STATED
    location: str = ""


_TUTORIAL = "ResNet-50 tutorial"
_COURSE = "WideResNet course"
_ARTICLE = "article on segmentation"
_GUIDE = "two-node guide"

_NETWORK = DocumentedValue(
    "network",
    "model.name model.widen model.dropout model.pool",
    "WideResNet of 1 (CIFAR-10: 3), 16, 160, 320 and 640 channels, dropout 0.01, `AvgPool2d(7)` at the end",
    "`class WideResNet`",
)
_ENDING = (
    DocumentedValue("epochs", "epochs", "40 at most", "`args.epochs`"),
    DocumentedValue(
        "early stop",
        "early_stop.target_accuracy early_stop.patience",
        "0.85 in two validations in a row",
        "`args.target_accuracy`, `args.patience`",
    ),
)
_LOADER = (
    DocumentedValue("last batch", "data.drop_last", "dropped", "`train_loader`"),
    DocumentedValue(
        "validation",
        "data.validation_as_training data.eval_batch_size",
        "in padded shares without their last batch; means of the ranks' means",
        "`test_loader`, `all_reduce`",
    ),
)
_FASHION = (
    DocumentedValue("data", "data.name", "Fashion-MNIST", "`train_set`"),
    DocumentedValue("augmentation", "data.augment", "none", "`train_set`"),
    DocumentedValue("batch a process", "data.batch_size", "32", "`args.batch_size`"),
    *_LOADER,
    _NETWORK,
)
_FULL = DocumentedValue("arithmetic", "precision.name precision.channels_last", "torch's default", "whole program")
_LARGE = (
    DocumentedValue(
        "update rule",
        "optim.name optim.betas optim.grad_averaging",
        "`torch_optimizer.NovoGrad` with gradient averaging (betas 0.95, 0)",
        "`optimizer`",
    ),
    DocumentedValue("momentum", "optim.momentum", "0.9, which NovoGrad ignores", "`args.momentum`"),
    DocumentedValue(
        "rate and world size",
        "optim.lr_scaling",
        "linear, or the square root, in the text; the program does not scale it",
        "Scaling Learning Rate with Batch Size; `optimizer`",
    ),
    DocumentedValue(
        "warm-up",
        "schedule.name schedule.warmup_epochs schedule.warmup_by_node schedule.warmup_stairs",
        "`LinearLR` over 5 epochs from 1 / GPUs of a node, once per epoch",
        "Learning Rate Warm-up; `scheduler`",
    ),
)
_SEED = DocumentedValue("seed", "seed")
# Preset -> its document, the part of it that is reproduced, and the values there.
DOCUMENTS: Mapping[str, tuple[str, str, tuple[DocumentedValue, ...]]] = {
    "cifar10-resnet50": (
        _TUTORIAL,
        "all of it",
        (
            DocumentedValue("data", "data.name", "CIFAR-10", "Creating the Data Loader"),
            DocumentedValue(
                "augmentation",
                "data.augment data.crop_padding",
                "random crop of 32, horizontal flip",
                "Creating the Data Loader",
            ),
            DocumentedValue(
                "test images", "data.validation_augment", "like the training images", "Creating the Data Loader"
            ),
            DocumentedValue("batch a process", "data.batch_size", "256", "Creating the Data Loader"),
            DocumentedValue("last batch", "data.drop_last", "kept", "Creating the Data Loader"),
            DocumentedValue(
                "network", "model.name", "torchvision's ResNet-50, without weights", "Training on a Single GPU"
            ),
            DocumentedValue("outputs", "model.num_outputs", "1,000, the default", "Training on a Single GPU"),
            DocumentedValue("batch norm over ranks", "model.sync_batchnorm", "no", "Step 2: Wrap the Model Using DDP"),
            DocumentedValue(
                "optimizer", "optim.name optim.momentum optim.weight_decay", "SGD, 0.9, 0", "Training on a Single GPU"
            ),
            DocumentedValue(
                "learning rate", "optim.lr optim.lr_scaling schedule.name", "0.001", "Training on a Single GPU"
            ),
            DocumentedValue("epochs", "epochs", "1", "Training on a Single GPU"),
            DocumentedValue(
                "arithmetic",
                "precision.name precision.channels_last",
                "torch's default; fp16 with a scaler in a variant",
                "Mixed Precision Training",
            ),
            _SEED,
        ),
    ),
    "cifar10-resnet18": (
        _GUIDE,
        "Distributed environment overview",
        (
            DocumentedValue("data", "data.name", "CIFAR-10", "Data sampling"),
            DocumentedValue("augmentation", "data.augment data.crop_padding"),
            DocumentedValue("batch a process", "data.batch_size", "64", "Results and discussions"),
            DocumentedValue("last batch", "data.drop_last", "kept", "Data sampling"),
            DocumentedValue(
                "network", "model.name model.num_outputs", "torchvision's ResNet-18 with 10 outputs", "Model"
            ),
            DocumentedValue("batch norm over ranks", "model.sync_batchnorm", "no", "Model"),
            DocumentedValue("optimizer", "optim.name optim.momentum optim.weight_decay"),
            DocumentedValue("learning rate", "optim.lr optim.lr_scaling schedule.name"),
            DocumentedValue("epochs", "epochs"),
            DocumentedValue("arithmetic", "precision.name precision.channels_last", "torch's default", "Training"),
            _SEED,
        ),
    ),
    "fashion-mnist-wideresnet": (
        _COURSE,
        "first lab, Final Solution",
        (
            *_FASHION,
            DocumentedValue("batch norm over ranks", "model.sync_batchnorm", "yes", "`model`"),
            DocumentedValue("optimizer", "optim.name optim.momentum optim.weight_decay", "SGD, 0, 0", "`optimizer`"),
            DocumentedValue("learning rate", "optim.lr optim.lr_scaling schedule.name", "0.01", "`args.base_lr`"),
            *_ENDING,
            _FULL,
            _SEED,
        ),
    ),
    "fashion-mnist-wideresnet-large-batch": (
        _COURSE,
        "large-batch lab, Final Code",
        (
            *_FASHION,
            DocumentedValue("batch norm over ranks", "model.sync_batchnorm", "no", "`model`"),
            *_LARGE,
            DocumentedValue("learning rate", "optim.lr", "0.01", "`args.base_lr`"),
            *_ENDING,
            _FULL,
            _SEED,
        ),
    ),
    "cifar10-wideresnet": (
        _COURSE,
        "Assignment",
        (
            DocumentedValue("data", "data.name", "CIFAR-10", "`train_set`"),
            DocumentedValue(
                "augmentation",
                "data.augment data.rotation data.shear data.scale_min data.scale_max data.jitter",
                "flip, rotation 10, shear 10, scale 0.8 to 1.2, jitter 0.2",
                "`transform_train`",
            ),
            DocumentedValue("batch a process", "data.batch_size", "256", "`args.batch_size`"),
            *_LOADER,
            _NETWORK,
            DocumentedValue("batch norm over ranks", "model.sync_batchnorm", "yes", "`model`"),
            *_LARGE,
            DocumentedValue("learning rate", "optim.lr", "0.15", "`args.base_lr`"),
            DocumentedValue("training accuracy", "train_accuracy", "printed", "`train`"),
            *_ENDING,
            _FULL,
            _SEED,
        ),
    ),
    "voc2012-deeplabv3-resnet101": (
        _ARTICLE,
        "benchmark",
        (
            DocumentedValue("data", "data.name", "PASCAL VOC 2012", "benchmark"),
            DocumentedValue("augmentation", "data.augment data.scale_min data.scale_max"),
            DocumentedValue("image size", "data.image_size"),
            DocumentedValue("batch a process", "data.batch_size data.eval_batch_size", "8", "synchronising, (2)"),
            DocumentedValue("last batch", "data.drop_last", "kept", "synchronising, (2)"),
            DocumentedValue("network", "model.name", "DeepLabV3-ResNet101", "benchmark"),
            DocumentedValue("batch norm over ranks", "model.sync_batchnorm", "no", "synchronising, (6)"),
            DocumentedValue("optimizer", "optim.name optim.momentum optim.weight_decay"),
            DocumentedValue("learning rate", "optim.lr optim.lr_scaling schedule.name"),
            DocumentedValue("epochs", "epochs", "20", "benchmark"),
            DocumentedValue("arithmetic", "precision.name precision.channels_last", "torch's default", "synchronising"),
            DocumentedValue("seed", "seed precision.deterministic", "0, deterministic cuDNN", "synchronising, (4)"),
        ),
    ),
}
_GENERATED = re.compile(r"(?<=from here by `make generate`. -->\n).*(?=<!-- Generated to here)", re.DOTALL)


def write_tables() -> Iterator[str]:
    """Yield a table for each preset that has a document."""
    for preset, (document, part, facts) in DOCUMENTS.items():
        yield f"\n`{preset}` ({document}, {part}):\n\n"
        yield "| field | the document | where | `--as-published` | the preset |\n|---|---|---|---|---|\n"
        published_config = resolve(preset, as_published=True)
        preset_config = resolve(preset)
        for fact in facts:
            keys = fact.keys.split()
            published = _format_settings(keys, published_config)
            ours = _format_settings(keys, preset_config)
            if ours == published:
                ours = "the same"
            value = f"*{fact.value}*" if fact.value == NOT_STATED else fact.value
            yield f"| {fact.what} | {value} | {fact.location} | {published} | {ours} |\n"
    yield "\n"


def _format_settings(keys: Sequence[str], config: RunConfig) -> str:
    if keys[0] == "data.augment" and not config.data.augment:
        return "none"
    parts = []
    for key in keys:
        value = attrgetter(key)(config)
        name = "" if len(keys) == 1 or key.endswith((".name", ".augment")) else f"`{key.rpartition('.')[2]}` "
        parts.append(name + _format_value(value))
    return "; ".join(parts)


def _format_value(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_format_value, value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def render(page: str) -> str:
    """Return ``page`` with its generated part replaced."""
    assert DOCUMENTS.keys() == PRESETS.keys() - {"digits-resnet", "python-reference-gpt"}
    tables = "".join(write_tables())
    return _GENERATED.sub(lambda _: tables, page)


if __name__ == "__main__":
    sys.stdout.write(render(Path("docs/trainer.md").read_text(encoding="utf-8")))
