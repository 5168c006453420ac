"""PASCAL VOC 2012 with DeepLabV3. ``docs/trainer.md`` has the document's values beside these."""

from __future__ import annotations

from ddp_trainer.presets.preset import Preset

VOC2012_DEEPLABV3_RESNET101 = Preset(
    "voc2012-deeplabv3-resnet101",
    "PASCAL VOC 2012 segmentation, DeepLabV3-ResNet101, batch 8 a process, 20 epochs, mean IoU",
    {
        "epochs": 20,
        "log_every": 10,
        "data": {
            "name": "voc2012",
            "batch_size": 8,
            "eval_batch_size": 8,
            # A last batch of one image has nothing to normalise where the network pools over the whole image.
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
        "data": {"augment": [], "drop_last": False},
        "model": {"sync_batchnorm": False},
        "precision": {"name": "torch", "channels_last": False},
    },
)
