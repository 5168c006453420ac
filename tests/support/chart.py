"""The chart through Helm's own engine."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

from tests.support import ROOT

CHART = ROOT / "charts"
CI_FILES = [CHART / "values-ha.yaml", *sorted((CHART / "ci").glob("*-values.yaml"))]

Object = dict[str, Any]


@cache
def loaded() -> helm_python.Chart:
    """The chart, read once."""
    return helm_python.Chart.load(CHART)


def render_texts(
    values: dict[str, Any] | None = None, *, name: str = "ddp-operator", namespace: str = "system"
) -> dict[str, str]:
    """Return the text of every template by its path below ``templates/``."""
    return dict(_rendered(json.dumps(values or {}), name, namespace))


@cache
def _rendered(values: str, name: str, namespace: str) -> dict[str, str]:
    texts = loaded().render(json.loads(values), name=name, namespace=namespace)
    return {path.partition("templates/")[2]: text for path, text in texts.items()}


def render(values: dict[str, Any] | None = None, **release: str) -> list[Object]:
    """Return every object."""
    texts = render_texts(values, **release)
    return [result for path, text in texts.items() if not path.endswith(".txt") for result in read_objects(text)]


def read_objects(text: str) -> list[Object]:
    """Return the objects of a YAML text."""
    return [document for document in _parsed(text) if document]


@cache
def _parsed(text: str) -> list[Object]:
    return list(yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def read_values(path: Path) -> dict[str, Any]:
    """Return the values of a CI file."""
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    """Return the objects of one kind."""
    return [result for result in objects if result["kind"] == kind]


def is_test(resource: Object) -> bool:
    """Whether an object only lives during `helm test`."""
    return "helm.sh/hook" in (resource["metadata"].get("annotations") or {})


def the(objects: list[Object], kind: str) -> Object:
    """Return the only object of this kind that belongs to the installation."""
    (results,) = (result for result in of_kind(objects, kind) if not is_test(result))
    return results
