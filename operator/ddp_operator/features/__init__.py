"""The features of the operator. Each is a folder here and a line of this tuple; the kernel knows none of them."""

from typing import Final

from ddp_operator.decide.hooks import Feature
from ddp_operator.features import drains, history, idle, node_health, queue_estimate, tracing

FEATURES: Final[tuple[Feature, ...]] = (
    drains.FEATURE,
    history.FEATURE,
    idle.FEATURE,
    node_health.FEATURE,
    queue_estimate.FEATURE,
    tracing.FEATURE,
)
