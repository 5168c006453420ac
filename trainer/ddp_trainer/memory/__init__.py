"""Checkpoints in memory: ``from ddp_trainer.memory import MemoryCheckpoint``.

The launcher delivers this package to images that do not contain ``ddp_trainer``: Python 3.10, torch 2.6, and no import
from the rest of the trainer.
"""

from .checkpoint import MemoryCheckpoint, Stateful

__all__ = ["MemoryCheckpoint", "Stateful"]
