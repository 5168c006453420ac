"""Drivers for the contract suite of a cluster, one for each implementation.

A new implementation (a real API server, say) gets a module with a ``ClusterDriver`` and an entry in ``OPENERS``; the
suite then runs on it as it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from .api_server import open_standin
from .base import ClusterDriver
from .local import open_local

OPENERS: dict[str, Callable[[Path], AbstractAsyncContextManager[ClusterDriver]]] = {
    "local": open_local,
    "standin": open_standin,
}

__all__ = ["OPENERS", "ClusterDriver"]
