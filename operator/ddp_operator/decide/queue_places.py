"""The place of a waiting Workload: one feature asks for it, another one knows it."""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from ddp_operator.api.cluster import Object
from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.api.status import QueueStatus
from ddp_operator.decide.hooks import JobHooks, Service
from ddp_operator.decide.state import PassHooks, Problem

SECONDS_TO_LOCATE: Final = 10.0
"""Limit of the hook, which waits in a pass."""


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """What a feature knows of a waiting Workload: its place, or why it is never admitted."""

    queue: QueueStatus | None = None
    problem: Problem | None = None


class LocatingService(Service):
    """A service that knows the places of Workloads."""

    async def locate(self, workload: Object, before: QueueStatus | None) -> QueuePlace | None:
        """Return the place of a Workload that waits in Kueue, for a limited time; None: it is unknown.

        ``before``: the place in the job's status. Raises: Refused, ClusterError, which are no faults.
        """
        return None


async def locate(hooks: PassHooks, workload: Object, before: QueueStatus | None) -> QueuePlace:
    """Return the place of a waiting Workload by the first feature that knows it."""
    if not isinstance(hooks, JobHooks):
        return QueuePlace()
    unknown: QueuePlace | None = None
    for name, service in hooks.hooks.services.items():
        if not isinstance(service, LocatingService):
            continue
        hook = partial(service.locate, workload, before)
        with suppress(Refused, ClusterError):
            place = await hooks.guard.wait(
                name, "locate", hook, QueuePlace | None, limit=SECONDS_TO_LOCATE, default=unknown
            )
            if place is not None:
                return place
    return QueuePlace()


def forget_place(hooks: PassHooks) -> None:
    """Forget the faults of ``locate``, which is called only while the job waits in a queue."""
    if isinstance(hooks, JobHooks):
        for name in hooks.hooks.services:
            hooks.guard.forget(name, "locate")
