"""The features of the operator. Each is a folder here and a line of this tuple; the kernel knows none of them."""

from typing import Final

from ddp_operator.api.schema import Schema
from ddp_operator.decide.hooks import Feature, build_schema
from ddp_operator.features import (
    drains,
    history,
    idle,
    inputs,
    lost_nodes,
    multikueue,
    node_health,
    preflight,
    queue_estimate,
    stalls,
    tracing,
    tracking,
)

FEATURES: Final[tuple[Feature, ...]] = (
    drains.FEATURE,
    history.FEATURE,
    idle.FEATURE,
    inputs.FEATURE,
    lost_nodes.FEATURE,
    multikueue.FEATURE,
    node_health.FEATURE,
    preflight.FEATURE,
    queue_estimate.FEATURE,
    stalls.FEATURE,
    tracing.FEATURE,
    tracking.FEATURE,
)
SCHEMA: Final[Schema] = build_schema(FEATURES)
"""The fields of the spec, those of features included."""
