"""Drains: pods leave a node that others empty, by a taint of the node or by a request that names pods (ADR 0051)."""

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from ddp_operator.decide.hooks import Feature, NodeHook, Service
from ddp_operator.features.drains.taints import FIELDS, judge_node, wants_nodes

if TYPE_CHECKING:  # of the operator's process, which `ddp run` does not have
    from ddp_operator.kube.services import ServiceContext


class DrainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of this feature."""

    drain_requests: Annotated[
        str,
        Meta(
            pattern=r"^([a-z0-9-]+/[a-z0-9-]+\.v[a-z0-9]+\.[a-z0-9.-]+)?$",
            description="NVSentinel's drain requests as NAMESPACE/RESOURCE.VERSION.GROUP; unset: none",
        ),
    ] = ""
    drain_condition: Annotated[
        str, Meta(description="type of the condition that NVSentinel expects on a drain request that is done")
    ] = "DrainComplete"


def _start(context: "ServiceContext") -> Service:
    from ddp_operator.features.drains.requests import DrainWatch

    settings = context.settings if isinstance(context.settings, DrainSettings) else DrainSettings()
    return DrainWatch(
        context.client,
        context.store,
        context.namespaces,
        context.on_change,
        source=settings.drain_requests,
        condition=settings.drain_condition,
        clock=context.clock,
    )


FEATURE: Final = Feature(
    FIELDS.feature,
    maturity="beta",
    page="drains.md",
    fields=FIELDS,
    nodes=NodeHook(wants_nodes, judge_node),
    settings=DrainSettings,
    start=_start,
)
