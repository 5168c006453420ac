"""CIFAR-10 with torchvision's ResNets. ``docs/trainer.md`` has the documents' values beside these."""

from __future__ import annotations

from ddp_trainer.presets.preset import Preset

CIFAR10_RESNET50 = Preset(
    "cifar10-resnet50",
    "CIFAR-10, torchvision's ResNet-50 from scratch, batch 256 a process, one epoch",
    {
        "epochs": 1,
        "log_every": 20,
        "data": {"name": "cifar10", "batch_size": 256, "augment": ["crop", "flip"], "crop_padding": 4},
        "model": {"name": "resnet50"},
        "optim": {"name": "sgd", "lr": 0.001, "momentum": 0.9},
        "precision": {"name": "auto", "channels_last": True},
    },
    {
        # A crop as large as the image, ImageNet's thousand outputs, and the test images augmented like the others.
        "data": {"crop_padding": 0, "validation_augment": True},
        "model": {"num_outputs": 1000, "small_maps": False},
        "precision": {"name": "torch", "channels_last": False},
    },
)

CIFAR10_RESNET18 = Preset(
    "cifar10-resnet18",
    "CIFAR-10, torchvision's ResNet-18 with a 10-class head, batch 64 a process",
    {
        "epochs": 2,
        "log_every": 50,
        "data": {"name": "cifar10", "batch_size": 64, "augment": ["crop", "flip"], "crop_padding": 4},
        "model": {"name": "resnet18"},
        "optim": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
        "precision": {"name": "auto", "channels_last": True},
    },
    {"model": {"small_maps": False}, "precision": {"name": "torch", "channels_last": False}},
)
