"""Errors of invalid input: each names the field, the problem and the remedy."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ddp_pod.contract.credentials import hide_credentials

_MISSING: Any = object()
_MAX_VALUE: Final = 200  # characters; the message that follows has the remedy
_MAX_ERRORS: Final = 100


@dataclass(frozen=True, slots=True)
class FieldError:
    """One refused field. Its text equals the API server's text for a CEL rule, so all tools print the same message."""

    path: str
    message: str
    value: Any = _MISSING

    def __str__(self) -> str:
        if self.value is _MISSING:
            return f"{self.path}: {self.message}" if self.path else self.message
        if isinstance(self.value, dict | list | tuple):  # the API server omits their values
            return f"{self.path}: Invalid value: {self.message}"
        value = hide_credentials(json.dumps(self.value, default=str))
        value = value if len(value) <= _MAX_VALUE else f"{value[:_MAX_VALUE]}…"
        return f"{self.path}: Invalid value: {value}: {self.message}"


def check_strings(pairs: Any, path: str) -> FieldError | None:
    """Return the refusal of labels or annotations that do not map strings to strings."""
    if pairs is None:
        return None
    if isinstance(pairs, Mapping) and all(
        isinstance(key, str) and isinstance(value, str) for key, value in pairs.items()
    ):
        return None
    return FieldError(path, "must map strings to strings; quote numbers and booleans")


class InvalidManifest(ValueError):
    """The input is invalid. ``errors`` has at least one reason, in reading order; of very many the first ones."""

    def __init__(self, errors: Sequence[FieldError]) -> None:
        assert errors
        more = len(errors) - _MAX_ERRORS
        further = [FieldError("", f"and {more} further errors")] if more > 0 else []
        self.errors = (*errors[:_MAX_ERRORS], *further)
        super().__init__("\n".join(map(str, self.errors)))
