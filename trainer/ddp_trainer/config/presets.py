"""The presets: one configuration per system. ``--preset NAME`` selects one; flags or a file override its values.

``docs/trainer.md`` compares the values with those of the documents.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddp_sdk.errors import UserError
from ddp_trainer.options import merge


@dataclass(frozen=True)
class Preset:
    """A named set of nested values that override the defaults of the configuration."""

    name: str
    summary: str
    values: Mapping[str, Any]
    # Overrides ``values`` with --as-published: the values of the document that ``values`` corrects.
    as_published: Mapping[str, Any] = field(default_factory=dict)


_STOP = {"target_accuracy": 0.85, "patience": 2}
_FAST = {"name": "auto", "channels_last": True}
_PLAIN = {"name": "fp32", "channels_last": False}
_NOVOGRAD = {"name": "novograd", "grad_averaging": True, "lr_scaling": "linear"}
# The document's validation pads the samples, drops the last batch and averages the means of batches and ranks.
_PUBLISHED = {"data": {"validation_as_training": True}, "precision": _PLAIN}
# The document does not scale the learning rate, which rises once per epoch from 1 / (GPUs of a node). The second moment
# of its NovoGrad is that of the last gradient alone.
_PUBLISHED_LARGE_BATCH = merge(
    _PUBLISHED,
    {"schedule": {"warmup_by_node": True, "warmup_stairs": True}, "optim": {"lr_scaling": "none", "beta2": 0.0}},
)

_ALL = (
    Preset(
        "python-reference-gpt",
        "Python's language reference, byte by byte, a GPT of 0.9 million parameters; a minute on a CPU",
        {
            "epochs": 2,
            "log_every": 20,
            "task": "ddp_trainer.tasks:LanguageModel",
            "data": {"name": "python-reference", "batch_size": 16, "eval_batch_size": 64, "workers": 0},
            "model": {"name": "gpt", "width": 128},
            "optim": {
                "name": "adamw",
                "lr": 2e-3,
                "beta2": 0.95,
                "weight_decay": 0.1,
                "norm_bias_decay": False,
                "clip_norm": 1.0,
            },
            "schedule": {"name": "cosine", "warmup_epochs": 0.2, "warmup_start": 0.1, "final": 0.1},
        },
    ),
    Preset(
        "digits-resnet",
        "scikit-learn's handwritten digits (1,797 real 8x8 images), small ResNet; seconds on a CPU",
        {
            "epochs": 6,
            "log_every": 10,
            "data": {"name": "digits", "batch_size": 32, "augment": ["crop"], "crop_padding": 1},
            "model": {"name": "small-resnet", "width": 16},
            "optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
            "schedule": {"name": "cosine", "warmup_epochs": 1.0, "warmup_start": 0.1},
        },
    ),
    Preset(
        "cifar10-resnet18",
        "CIFAR-10, torchvision's ResNet-18 with a 10-class head, batch 64 a process",
        {
            "epochs": 2,
            "log_every": 50,
            "data": {"name": "cifar10", "batch_size": 64, "augment": ["crop", "flip"]},
            "model": {"name": "resnet18"},
            "optim": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
            "precision": _FAST,
        },
        # The document shows no augmentation.
        {"data": {"augment": []}, "precision": _PLAIN},
    ),
    Preset(
        "cifar10-resnet50",
        "CIFAR-10, torchvision's ResNet-50 from scratch, batch 256 a process, one epoch",
        {
            "epochs": 1,
            "log_every": 20,
            "data": {"name": "cifar10", "batch_size": 256, "augment": ["crop", "flip"], "crop_padding": 4},
            "model": {"name": "resnet50"},
            "optim": {"name": "sgd", "lr": 0.001, "momentum": 0.9},
            "precision": _FAST,
        },
        {
            # A crop as large as the image, ImageNet's thousand outputs, and augmented test images.
            "data": {"crop_padding": 0, "validation_augment": True},
            "model": {"num_outputs": 1000},
            "precision": _PLAIN,
        },
    ),
    Preset(
        "cifar10-wideresnet",
        "CIFAR-10, WideResNet, full augmentation, SyncBatchNorm, NovoGrad, batch 256 a process, stops at 85 % twice",
        {
            "epochs": 40,
            "log_every": 20,
            "train_accuracy": True,
            "data": {
                "name": "cifar10",
                "batch_size": 256,
                "drop_last": True,
                "augment": ["flip", "rotate", "affine", "jitter"],
                "rotation": 10.0,
                "shear": 10.0,
                "scale_min": 0.8,
                "scale_max": 1.2,
                "jitter": 0.2,
            },
            "model": {"name": "wide-resnet", "widen": 10, "dropout": 0.01, "sync_batchnorm": True},
            "optim": {**_NOVOGRAD, "lr": 0.15},
            "schedule": {"warmup_epochs": 5.0},
            "early_stop": _STOP,
            "precision": _FAST,
        },
        # The last stage has 8x8 pixels, of which the document averages 7x7.
        merge(_PUBLISHED_LARGE_BATCH, {"model": {"pool": 7}}),
    ),
    Preset(
        "fashion-mnist-wideresnet",
        "Fashion-MNIST, WideResNet 16-160-320-640, SyncBatchNorm, batch 32 a process, stops at 85 % twice",
        {
            "epochs": 40,
            "log_every": 50,
            "data": {"name": "fashion-mnist", "batch_size": 32, "drop_last": True},
            "model": {"name": "wide-resnet", "widen": 10, "dropout": 0.01, "sync_batchnorm": True},
            "optim": {"name": "sgd", "lr": 0.01, "momentum": 0.0},
            "early_stop": _STOP,
            "precision": _FAST,
        },
        merge(_PUBLISHED, {"data": {"eval_batch_size": 32}}),
    ),
    Preset(
        "fashion-mnist-wideresnet-large-batch",
        "the same for many processes: NovoGrad, learning rate scaled with the world size, warm-up, CSV",
        {
            "epochs": 40,
            "log_every": 50,
            "csv_dir": "training_data",
            "data": {"name": "fashion-mnist", "batch_size": 32, "drop_last": True},
            "model": {"name": "wide-resnet", "widen": 10, "dropout": 0.01},
            "optim": {**_NOVOGRAD, "lr": 0.01},
            "schedule": {"warmup_epochs": 5.0},
            "early_stop": _STOP,
            "precision": _FAST,
        },
        merge(_PUBLISHED_LARGE_BATCH, {"data": {"eval_batch_size": 32}}),
    ),
    Preset(
        "voc2012-deeplabv3-resnet101",
        "PASCAL VOC 2012 segmentation, DeepLabV3-ResNet101, batch 8 a process, 20 epochs, mean IoU",
        {
            "epochs": 20,
            "log_every": 10,
            "data": {
                "name": "voc2012",
                "batch_size": 8,
                "eval_batch_size": 8,
                # With a last batch of one image, batch norm would fail where the network pools over the whole image.
                "drop_last": True,
                "image_size": 480,
                "augment": ["scale", "crop", "flip"],
                "scale_min": 0.5,
                "scale_max": 2.0,
            },
            "model": {"name": "deeplabv3_resnet101", "sync_batchnorm": True},
            "optim": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4},
            "schedule": {"name": "cosine"},
            "precision": {"name": "auto", "channels_last": True, "deterministic": True},
        },
        {
            # Images are not scaled, so the range has its default.
            "data": {"augment": [], "scale_min": 0.8, "scale_max": 1.2, "drop_last": False},
            "model": {"sync_batchnorm": False},
            "precision": _PLAIN,
        },
    ),
)
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _ALL}


def get_preset(name: str) -> Preset:
    """Return the preset ``name``; raises :class:`UserError` with the most similar name if it does not exist."""
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(name, PRESETS, n=1)
    suggestion = f"did you mean {close[0]!r}? " if close else ""
    raise UserError("preset", f"{name!r} is not known", f"{suggestion}Known: {', '.join(PRESETS)}")
