"""The children that the operator builds for a spec, and how it refuses one."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.manifests.children import build_children
from tests.support.builders import job


def children(attempt: int = 1, nodes: int = 2, **spec: Any) -> dict[str, Any]:
    """Return the children of an attempt, by kind."""
    return {child["kind"]: child for child in build_children(job(**spec), attempt=attempt, nodes=nodes)}


def pod_of(attempt: int = 1, **spec: Any) -> Any:
    """Return the template of the pods of an attempt."""
    return children(attempt, **spec)["Job"]["spec"]["template"]


def refusal(**spec: Any) -> str:
    """Return why a spec has no children."""
    with pytest.raises(InvalidManifest) as caught:
        children(**spec)
    return str(caught.value)
