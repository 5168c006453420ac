"""Checkpoints in memory: ``from ddp_sdk import MemoryCheckpoint``. This package needs torch 2.6."""

from .checkpoint import MemoryCheckpoint, Stateful

__all__ = ["MemoryCheckpoint", "Stateful"]
