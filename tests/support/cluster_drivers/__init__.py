"""Drivers for the contract suite of a cluster, one for each implementation.

A new implementation gets a module with a ``ClusterDriver`` and a place in the fixture ``driver`` of ``tests/contract``;
the suite then runs on it.
"""

from __future__ import annotations

from .api_server import open_control_plane, open_standin
from .base import ClusterDriver
from .local import open_local

__all__ = ["ClusterDriver", "open_control_plane", "open_local", "open_standin"]
