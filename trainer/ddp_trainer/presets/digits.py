"""The preset that needs no download: real images that come with scikit-learn."""

from __future__ import annotations

from ddp_trainer.presets.preset import Preset

DIGITS_RESNET = Preset(
    "digits-resnet",
    "scikit-learn's handwritten digits (1,797 real 8x8 images), small ResNet; seconds on a CPU",
    {
        "epochs": 6,
        "log_every": 10,
        "data": {"name": "digits", "batch_size": 32, "augment": ["crop"], "crop_padding": 1},
        "model": {"name": "small-resnet", "width": 16},
        "optim": {
            "name": "sgd",
            "lr": 0.1,
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 5e-4,
            "lr_scaling": "none",
        },
        "schedule": {"name": "cosine", "warmup_epochs": 1.0, "warmup_start": 0.1},
    },
)
