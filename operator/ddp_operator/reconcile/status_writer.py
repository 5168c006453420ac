"""Writes a status where it differs, at the version that it was decided on, then tells what changed."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

import msgspec

from ddp_operator.api.status import Status
from ddp_operator.cluster import Cluster, ClusterError, Key, Object
from ddp_operator.reconcile.memory import Memory, seconds_since
from ddp_operator.status.events import transition_events
from ddp_operator.status.transitions import Transition, find_transitions, is_minor_change

MINOR_INTERVAL = 30.0
"""Seconds between two writes of one status that change nothing which `kubectl get` prints."""


@dataclass(frozen=True)
class StatusWriter:
    """Writes statuses, posts their Events and hands transitions to the operator's metrics."""

    cluster: Cluster
    clock: Callable[[], datetime]
    on_transition: Callable[[Transition], None] | None = None

    async def write(
        self,
        key: Key,
        resource: Object,
        old: Status,
        new: Status,
        memory: Memory,
        in_place_limit: int | None = None,
    ) -> float | None:
        """Write ``new`` where it differs from what ``resource`` has. ``in_place_limit``: see ``transition_events``.

        Returns in how many seconds it can be written where that has to wait. Raises: Conflict, ClusterError.
        """
        if new == old:
            return None
        now = self.clock()
        since = seconds_since(memory.status_written, now)
        if since < MINOR_INTERVAL and is_minor_change(old, new):
            return MINOR_INTERVAL - since
        memory.status_written = now
        version = resource["metadata"]["resourceVersion"]
        await self.cluster.patch_status(key, msgspec.to_builtins(new), resource_version=version)
        if self.on_transition is not None:
            for transition in find_transitions(old, new, now):
                self.on_transition(transition)
        # The status is written, so an event that is lost now is lost; nothing else may be.
        with suppress(ClusterError):
            for event in transition_events(old, new, in_place_limit):
                await self.cluster.emit(resource, event)
        return None
