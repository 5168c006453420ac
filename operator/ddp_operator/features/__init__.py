"""The features of the operator. Each is a folder here and a line of this tuple; the kernel knows none of them."""

from typing import Any, Final

from ddp_operator.api.constants import KIND
from ddp_operator.api.crd import build_crd
from ddp_operator.api.schema import Schema
from ddp_operator.decide.hooks import Feature, build_schema
from ddp_operator.features import (
    claims,
    code,
    completion,
    dev,
    drains,
    early_checks,
    gangs,
    history,
    inputs,
    kubelet_kills,
    lost_nodes,
    memory,
    mirror,
    multikueue,
    network_policy,
    node_health,
    pace,
    placement,
    points,
    preflight,
    process_groups,
    profiles,
    queue_estimate,
    replicas,
    stalls,
    tracing,
    tracking,
    usage,
    waiting,
)

FEATURES: Final[tuple[Feature, ...]] = (
    claims.FEATURE,
    code.FEATURE,
    completion.FEATURE,
    dev.FEATURE,
    drains.FEATURE,
    early_checks.FEATURE,
    gangs.FEATURE,
    history.FEATURE,
    inputs.FEATURE,
    kubelet_kills.FEATURE,
    memory.FEATURE,
    mirror.FEATURE,
    multikueue.FEATURE,
    network_policy.FEATURE,
    node_health.FEATURE,
    pace.FEATURE,
    placement.FEATURE,
    points.FEATURE,
    preflight.FEATURE,
    process_groups.FEATURE,
    profiles.FEATURE,
    queue_estimate.FEATURE,
    replicas.FEATURE,
    stalls.FEATURE,
    tracing.FEATURE,
    tracking.FEATURE,
    usage.FEATURE,  # after pace, whose rates it reads
    waiting.FEATURE,
    # Last, as it explains more than what peers know of a silent node.
    lost_nodes.FEATURE,
)
SCHEMA: Final[Schema] = build_schema(FEATURES)
"""The fields of the spec, those of features included."""


def build_definitions() -> dict[str, dict[str, Any]]:
    """Return the CustomResourceDefinitions of the job and of the features' own kinds, by kind."""
    definitions = {KIND: build_crd(SCHEMA)}
    for feature in FEATURES:
        if feature.definitions is not None:
            definitions |= feature.definitions(SCHEMA)
    return definitions
