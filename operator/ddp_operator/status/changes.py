"""Which changes of a status can wait a moment: counts and words. A big job would else write one for each pod."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ddp_operator.api.status import Condition, Status


def can_wait(old: Status, new: Status) -> bool:
    """Tell whether two statuses differ only in the counts of pods and in the messages of conditions."""
    if _facts(old.conditions) != _facts(new.conditions):
        return False
    return replace(new, nodes=old.nodes, conditions=old.conditions) == old


def _facts(conditions: Sequence[Condition]) -> list[tuple[str, str, str, int]]:
    return [(found.type, found.status, found.reason, found.observed_generation) for found in conditions]
