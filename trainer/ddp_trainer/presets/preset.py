"""What a preset is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A named starting point: nested values laid over the defaults of the configuration."""

    name: str
    summary: str
    values: Mapping[str, Any]
    # Laid over ``values`` by ``--as-published``: what the document wrote where that is not what it meant.
    as_published: Mapping[str, Any] = field(default_factory=dict)
