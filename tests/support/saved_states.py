"""Saved states: read from their files, and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load(path: Path) -> dict[str, Any]:
    """Return a saved state."""
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def same(first: Any, other: Any) -> bool:
    """Return whether two states are bitwise equal, including all tensors and types."""
    if isinstance(first, torch.Tensor):
        return first.dtype == other.dtype and torch.equal(first, other)
    if isinstance(first, dict):
        return first.keys() == other.keys() and all(same(first[key], other[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(other) and all(same(a, b) for a, b in zip(first, other, strict=True))
    return bool(first == other)
