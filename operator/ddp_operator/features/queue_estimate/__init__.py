"""The place of a waiting job in its Kueue queue, and an estimate of its start (ADR 0052)."""

from typing import TYPE_CHECKING, Final

from ddp_operator.decide.hooks import Feature, Service

if TYPE_CHECKING:  # of the operator's process, which `ddp run` does not have
    from ddp_operator.kube.services import ServiceContext


def _start(context: "ServiceContext") -> Service:
    from ddp_operator.features.queue_estimate.places import QueuePlaces
    from ddp_operator.features.queue_estimate.reader import QueueReader

    return QueuePlaces(QueueReader(context.client, context.store, clock=context.clock))


FEATURE: Final = Feature("queue-estimate", maturity="beta", page="kueue.md", start=_start)
