"""The former path of :mod:`ddp_sdk.memory`, until version 0.3."""

import warnings

from ddp_sdk import MemoryCheckpoint, Stateful

__all__ = ["MemoryCheckpoint", "Stateful"]

warnings.warn(
    "ddp_trainer.memory is deprecated, and version 0.3 removes it: use `from ddp_sdk import MemoryCheckpoint`",
    DeprecationWarning,
    stacklevel=2,
)
