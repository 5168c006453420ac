"""Fixtures: one thread."""

from __future__ import annotations

from tests.support.threads import one_thread

__all__ = ["one_thread"]
