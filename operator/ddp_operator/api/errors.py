"""How bad input is reported: one sentence that names the field, what is wrong, and the remedy."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_operator.launcher.storage import hide_credentials

_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class FieldError:
    """One refused field. Printed as the API server prints a CEL refusal, so that every tool says the same words."""

    path: str
    message: str
    value: Any = _MISSING

    def __str__(self) -> str:
        if self.value is _MISSING:
            return f"{self.path}: {self.message}" if self.path else self.message
        if isinstance(self.value, dict | list | tuple):  # the API server leaves these out
            return f"{self.path}: Invalid value: {self.message}"
        return f"{self.path}: Invalid value: {hide_credentials(json.dumps(self.value, default=str))}: {self.message}"


def check_strings(pairs: Any, path: str) -> FieldError | None:
    """Return the refusal of labels or annotations that do not map strings to strings."""
    if pairs is None or (
        isinstance(pairs, Mapping) and all(isinstance(one, str) for pair in pairs.items() for one in pair)
    ):
        return None
    return FieldError(path, "must map strings to strings; quote numbers and booleans")


def unknown_member(name: str, parent: str, known: Sequence[str], *, belongs: str = "") -> FieldError:
    """Return the refusal of a field that is not among the known members of ``parent``.

    ``belongs``: what to write instead, where that is known; otherwise the members are named.
    """
    full = f"{parent}.{name}" if parent else name
    close = difflib.get_close_matches(name, known, n=1)
    remedy = belongs or (f"did you mean {close[0]}?" if close else f"known fields: {', '.join(known)}")
    return FieldError("", f'unknown field "{full}"; {remedy}')


class InvalidManifest(ValueError):
    """The input is refused; ``errors`` holds every reason found, in reading order, at least one."""

    def __init__(self, errors: Sequence[FieldError]) -> None:
        assert errors
        self.errors = tuple(errors)
        super().__init__("\n".join(map(str, self.errors)))
