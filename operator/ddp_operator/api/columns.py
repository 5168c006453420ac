"""The columns that `kubectl get ddp` prints, as the CRD defines them."""

from collections.abc import Mapping
from typing import Any

import msgspec

from ddp_operator.api.status import Status

COLUMNS: tuple[tuple[str, str, str, int], ...] = (
    # name, type, JSONPath, priority (0: always shown; 1: with -o wide)
    ("Phase", "string", ".status.phase", 0),
    ("Reason", "string", ".status.reason", 0),
    ("Nodes", "integer", ".spec.nodes", 0),
    ("Progress", "string", ".status.progress.percent", 0),
    ("ETA", "string", ".status.progress.eta", 0),
    ("Throughput", "string", ".status.progress.throughput", 0),
    ("Loss", "string", ".status.progress.loss", 0),
    ("Restarts", "integer", ".status.restarts.all", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Ready", "integer", ".status.nodes.ready", 1),
    ("Epoch", "integer", ".status.progress.epoch", 1),
    ("Val-Accuracy", "string", ".status.progress.valAccuracy", 1),
    ("Attempt", "integer", ".status.attempt", 1),
    ("Failure", "string", ".status.lastFailure.category", 1),
    ("Code", "string", ".spec.code.revision", 1),
    ("Position", "integer", ".status.queue.position", 1),
    ("Start", "string", ".status.queue.startP50", 1),
)


def render_columns(status: Status) -> list[Any]:
    """Return the cells that `kubectl get ddp` prints for a status."""
    resource = {"status": msgspec.to_builtins(status)}
    return [read_column(resource, path) for _, _, path, priority in COLUMNS if not priority]


def read_column(resource: Mapping[str, Any], path: str) -> Any:
    """Return the value at a column's JSONPath, or None if there is none."""
    value: Any = resource
    for step in path.strip(".").split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value
