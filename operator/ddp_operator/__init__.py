"""The DDP operator: one ``DDPTrainingJob`` becomes a headless Service and an Indexed Job of torchrun pods."""

__version__ = "0.1.0"
