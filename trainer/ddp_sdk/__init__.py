"""What any training script may import: ``from ddp_sdk import Exporter, MemoryCheckpoint``; see docs/your-script.md.

The launcher delivers this package to images that do not contain it, so it needs Python 3.10 and the standard library,
and torch where it handles tensors. Names are imported on first use: ``import ddp_sdk`` loads no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_sdk.errors import UserError
    from ddp_sdk.exporter import Exporter
    from ddp_sdk.memory import MemoryCheckpoint, Stateful
    from ddp_sdk.rank_env import RankEnv

_HOMES = {
    "Exporter": "exporter",
    "MemoryCheckpoint": "memory",
    "RankEnv": "rank_env",
    "Stateful": "memory",
    "UserError": "errors",
}

__all__ = ["Exporter", "MemoryCheckpoint", "RankEnv", "Stateful", "UserError"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
