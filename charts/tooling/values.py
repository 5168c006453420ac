"""Reads ``values.yaml`` together with its comments, which are the text of the README and complete the schema.

A comment directly above a key documents it. In it, ``@schema {…}`` adds keywords of JSON Schema, and ``@section …``
begins a section of the README.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ddp_operator.api.documents import load_documents

CHART = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Value:
    """One key of the values and what its comment says."""

    path: tuple[str, ...]
    default: Any
    text: str
    keywords: dict[str, Any]
    section: str

    @property
    def is_group(self) -> bool:
        """Whether the keys below it are values of their own, rather than a map that users fill."""
        return isinstance(self.default, dict) and bool(self.default) and not self.keywords


def read_values(text: str | None = None) -> list[Value]:
    """Return every key in the order of the file, groups before what they hold. Raises: ValueError."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8") if text is None else text
    found: list[Value] = []
    _collect(yaml.compose(text), load_documents(text)[0], text.splitlines(), (), "", found)
    return found


def _collect(
    node: Any, values: dict[str, Any], lines: list[str], path: tuple[str, ...], section: str, found: list[Value]
) -> None:
    for key, child in node.value:
        where = (*path, key.value)
        text, keywords, begun = _read_comment(lines, key.start_mark.line, ".".join(where))
        section = begun or section
        value = Value(where, values[key.value], text, keywords, section)
        found.append(value)
        if value.is_group:
            _collect(child, value.default, lines, where, section, found)
        elif not text:
            raise ValueError(f"{'.'.join(where)}: has no comment above it")


def _read_comment(lines: list[str], line: int, where: str) -> tuple[str, dict[str, Any], str]:
    """Return the text, the schema's keywords and the section that begins in the comment above this line."""
    first = line
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    section = ""
    if first > 1 and lines[first - 2].startswith("# @section "):  # a section's line stands apart
        section = lines[first - 2].removeprefix("# @section ")
    text: list[str] = []
    keywords: dict[str, Any] = {}
    for comment in (row.strip().removeprefix("#").strip() for row in lines[first:line]):
        if comment.startswith("@schema "):
            try:
                keywords |= json.loads(comment.removeprefix("@schema "))
            except ValueError as error:
                raise ValueError(f"{where}: @schema is not JSON: {error}") from None
        else:
            text.append(comment)
    return " ".join(text), keywords, section
