"""Whether the ranks of a job form one process group, as the launcher of one pod has observed it.

The record is on the pod's page while the ranks run, and in its termination message. The user's pod writes it, so the
operator reads it with ``parse_group_facts``.
"""

from typing import Any, Final, NamedTuple

TOGETHER: Final = "Together"  # a process group spans all ranks
ALONE: Final = "Alone"  # ranks make steps without a process group
SEPARATE: Final = "Separate"  # processes have groups, none of which spans all ranks
WAITING: Final = "Waiting"  # ranks wait in init_process_group
UNKNOWN: Final = "Unknown"
GROUP_STATES: Final = (TOGETHER, ALONE, SEPARATE, WAITING, UNKNOWN)
TEXT_LIMIT: Final = 400  # characters of each text
_MOST: Final = 2**31 - 1


class GroupFacts(NamedTuple):
    """The process groups of a pod's ranks, and of the processes that they have started.

    ``rank`` and ``pod``: the cause of a wait, if it is one rank; ``since``: Unix time of the first wait;
    ``is_mistake``: whether the script causes the wait, so that a repetition would end in the same way.
    """

    state: str
    world_size: int
    message: str = ""
    remedy: str = ""
    rank: int | None = None
    pod: int | None = None
    since: float = 0.0
    is_mistake: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {_to_camel_case(name): value for name, value in self._asdict().items()}


def parse_group_facts(members: Any) -> GroupFacts | None:
    """Return the record in a JSON object of a pod; None if it is invalid. Unknown members are ignored."""
    if not isinstance(members, dict):
        return None
    try:
        facts = GroupFacts(
            state=str(members["state"]),
            world_size=_parse_count(members["worldSize"]),
            message=str(members.get("message", ""))[:TEXT_LIMIT],
            remedy=str(members.get("remedy", ""))[:TEXT_LIMIT],
            rank=_parse_index(members.get("rank")),
            pod=_parse_index(members.get("pod")),
            since=float(_parse_count(members.get("since", 0))),
            is_mistake=members.get("isMistake") is True,
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return facts if facts.state in GROUP_STATES else None


def _to_camel_case(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _parse_count(value: Any) -> int:
    """Return a number of a record. Raises: ValueError, OverflowError."""
    if not isinstance(value, (int, float)) or not 0 <= value <= _MOST:
        raise ValueError(value)
    return int(value)


def _parse_index(value: Any) -> int | None:
    return None if value is None else _parse_count(value)
