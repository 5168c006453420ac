"""The DDP operator: one ``DDPTrainingJob`` becomes a headless Service and an Indexed Job of torchrun pods."""

from ddp_operator._version import __version__ as __version__
