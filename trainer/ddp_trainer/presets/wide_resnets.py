"""Fashion-MNIST and CIFAR-10 with a WideResNet. ``docs/trainer.md`` has the document's values beside these."""

from __future__ import annotations

from typing import Any

from ddp_trainer.options import merge
from ddp_trainer.presets.preset import Preset

_STOP = {"target_accuracy": 0.85, "patience": 2}
_FAST = {"name": "auto", "channels_last": True}
_PLAIN = {"name": "torch", "channels_last": False}
# The document's validation: a sampler that pads, a loader that drops the last batch, means over both.
_PUBLISHED_VALIDATION = {"validation_as_training": True}
# Its learning rate is not scaled, and rises once an epoch from 1 / the GPUs of one node, whatever the world size is.
_PUBLISHED_RATE = {"schedule": {"warmup_by_node": True, "warmup_stairs": True}, "optim": {"lr_scaling": "none"}}
# The NovoGrad it uses forgets the squares of gradients at once.
_PUBLISHED_NOVOGRAD = {"optim": {"beta2": 0.0}}
_PUBLISHED_MODEL = {"model": {"sparse_dropout": False}}


def _all(*parts: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        merged = merge(merged, part)
    return merged


FASHION_MNIST_WIDERESNET = Preset(
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
    {"data": {**_PUBLISHED_VALIDATION, "eval_batch_size": 32}, "precision": _PLAIN, **_PUBLISHED_MODEL},
)

FASHION_MNIST_WIDERESNET_LARGE_BATCH = Preset(
    "fashion-mnist-wideresnet-large-batch",
    "the same for many processes: NovoGrad, learning rate scaled with the world size, warm-up, CSV",
    {
        "epochs": 40,
        "log_every": 50,
        "csv_dir": "training_data",
        "data": {"name": "fashion-mnist", "batch_size": 32, "drop_last": True},
        "model": {"name": "wide-resnet", "widen": 10, "dropout": 0.01},
        "optim": {
            "name": "novograd", "lr": 0.01, "momentum": 0.9, "grad_averaging": True, "lr_scaling": "linear",
        },
        "schedule": {"warmup_epochs": 5.0},
        "early_stop": _STOP,
        "precision": _FAST,
    },
    _all(
        {"data": {**_PUBLISHED_VALIDATION, "eval_batch_size": 32}, "precision": _PLAIN},
        _PUBLISHED_MODEL,
        _PUBLISHED_RATE,
        _PUBLISHED_NOVOGRAD,
    ),
)  # fmt: skip

CIFAR10_WIDERESNET = Preset(
    "cifar10-wideresnet",
    "CIFAR-10, WideResNet with full augmentation, SyncBatchNorm, NovoGrad, batch 256 a process, stops at 85 % twice",
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
        "optim": {
            "name": "novograd", "lr": 0.15, "momentum": 0.9, "grad_averaging": True, "lr_scaling": "linear",
        },
        "schedule": {"warmup_epochs": 5.0},
        "early_stop": _STOP,
        "precision": _FAST,
    },
    _all(
        # Seven of the eight pixels a side that are left at the end are averaged.
        {"data": _PUBLISHED_VALIDATION, "model": {"pool": 7}, "precision": _PLAIN},
        _PUBLISHED_MODEL,
        _PUBLISHED_RATE,
        _PUBLISHED_NOVOGRAD,
    ),
)  # fmt: skip
