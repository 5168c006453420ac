"""The counts of restarts in a stored status, which only the operator reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ddp_operator.api.status import OperatorState


def read_counts(status: Mapping[str, Any]) -> dict[str, int]:
    """Return all counts by their stored names, also those that are 0 and thus not stored."""
    state = msgspec.convert(status.get("operatorState", {}), OperatorState)
    counts = state.restarts
    return {field.encode_name: getattr(counts, field.name) for field in msgspec.structs.fields(counts)}
