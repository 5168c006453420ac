"""Label selectors as kubectl writes them: ``a=b,c!=d,e,!f,g in (h,i)``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Predicate = Callable[[Mapping[str, str]], bool]

_SET = re.compile(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)")


def parse(selector: str) -> Predicate:
    """Return a predicate on labels."""
    tests = [_requirement(part.strip()) for part in re.split(r",(?![^(]*\))", selector) if part.strip()]
    return lambda labels: all(test(labels) for test in tests)


def labels_of(obj: Mapping[str, Any]) -> Mapping[str, str]:
    """Return an object's labels."""
    return obj["metadata"].get("labels") or {}


def _requirement(text: str) -> Predicate:
    if match := _SET.fullmatch(text):
        name = match[1]
        operator = match[2]
        values = {value.strip() for value in match[3].split(",")}
        if operator == "in":
            return lambda labels: labels.get(name) in values
        return lambda labels: labels.get(name) not in values
    if "!=" in text:
        name, value = text.split("!=", 1)
        return lambda labels: labels.get(name.strip()) != value.strip()
    if "=" in text:
        name, value = re.split(r"==?", text, maxsplit=1)
        return lambda labels: labels.get(name.strip()) == value.strip()
    if text.startswith("!"):
        return lambda labels: text[1:].strip() not in labels
    return lambda labels: text in labels
