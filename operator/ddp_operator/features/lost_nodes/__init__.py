"""Lost nodes: found in seconds by several witnesses that agree (ADR 0061)."""

from typing import TYPE_CHECKING, Final

from ddp_operator.decide.hooks import Feature, Service
from ddp_operator.features.lost_nodes.returns import record_returns
from ddp_operator.features.lost_nodes.silence import explain

if TYPE_CHECKING:  # of the operator's process, which `ddp run` does not have
    from ddp_operator.kube.services import ServiceContext


def _start(context: "ServiceContext") -> Service:
    from ddp_operator.features.lost_nodes.contacts import fetch_peers
    from ddp_operator.features.lost_nodes.leases import LeaseReader
    from ddp_operator.features.lost_nodes.nodes import NodeReader
    from ddp_operator.features.lost_nodes.watch import NodeWatch

    leases = LeaseReader(context.client, clock=context.clock)
    nodes = NodeReader(context.client)
    return NodeWatch(context.store, context.on_change, fetch_peers, leases.read, nodes.read, clock=context.clock)


FEATURE: Final = Feature(
    "lost-nodes", maturity="beta", page="lost-nodes.md", record=record_returns, explain=explain, start=_start
)
