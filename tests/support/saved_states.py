"""Saved states: read from their files, and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load(path: Path) -> dict[str, Any]:
    """Return a saved state."""
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def same(one: Any, other: Any) -> bool:
    """Return whether two states are bitwise equal, including all tensors and types."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
