"""Records which settings a part of the trainer reads."""

from __future__ import annotations

import dataclasses
from typing import Any


class Recording:
    """Records which settings of a group a function reads; pass it ``config``, an equal copy of the group."""

    def __init__(self, config: Any) -> None:
        self._group: str = config.group
        self._names: set[str] = set()
        self.config: Any = _copy_recording(config, self._names)

    @property
    def reads(self) -> frozenset[str]:
        """Return the dotted names of the settings that have been read."""
        return frozenset(self._group + name for name in self._names)


def _copy_recording(config: Any, names: set[str]) -> Any:
    """Return a copy of ``config`` that adds each field that is read to ``names``. Its pickle is a plain group."""
    kind = type(config)
    fields = frozenset(field.name for field in dataclasses.fields(config))

    def read(self: Any, name: str) -> Any:
        if name in fields:
            names.add(name)
        return object.__getattribute__(self, name)

    def reduce(self: Any) -> Any:
        return dataclasses.replace, (config,)

    copy: Any = object.__new__(type(kind.__name__, (kind,), {"__getattribute__": read, "__reduce__": reduce}))
    for field in fields:
        object.__setattr__(copy, field, getattr(config, field))
    return copy
