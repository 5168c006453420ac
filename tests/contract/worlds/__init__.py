"""The worlds in which the contract of a cluster is tried, one for each implementation.

A new implementation (a real API server, say) gets a module with a ``World`` and an entry in ``OPENERS``; the suite then
runs on it as it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from .base import World
from .local import open_local
from .standin import open_standin

OPENERS: dict[str, Callable[[Path], AbstractAsyncContextManager[World]]] = {
    "local": open_local,
    "standin": open_standin,
}

__all__ = ["OPENERS", "World"]
