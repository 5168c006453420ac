"""Modules that few tests use and that are slow to import: at collection each of the workers would import them."""

from __future__ import annotations

import importlib
from typing import Any

from ddp_trainer.imports import import_torchvision


class Lazy:
    """A module that is imported at its first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for its own marks
            raise AttributeError(name)
        import_torchvision()  # a module that imports torchvision must be able to
        return getattr(importlib.import_module(self._name), name)
