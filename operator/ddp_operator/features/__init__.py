"""The features of the operator. Each is a folder here and a line of this tuple; the kernel knows none of them."""

from typing import Final

from ddp_operator.api.schema import Schema
from ddp_operator.decide.hooks import Feature, build_schema
from ddp_operator.features import drains, history, idle, node_health, queue_estimate, tracing

FEATURES: Final[tuple[Feature, ...]] = (
    drains.FEATURE,
    history.FEATURE,
    idle.FEATURE,
    node_health.FEATURE,
    queue_estimate.FEATURE,
    tracing.FEATURE,
)
SCHEMA: Final[Schema] = build_schema(FEATURES)
"""The fields of the spec, those of features included."""
