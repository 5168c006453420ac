"""What a call to a cluster may raise: see ``cluster``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


class ClusterError(Exception):
    """A call failed, and a retry may succeed (network, 429, 5xx)."""


class ServerError(ClusterError):
    """The API server failed (5xx), for example because a webhook is unavailable. ``message``: the server's message."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class VersionConflict(ClusterError):
    """The object changed after it was observed (409 on a precondition). Observe it again."""


class Refused(Exception):
    """The API server refuses the request, and a retry would not change that. ``message``: the server's message."""

    def __init__(self, message: str, *, reason: Literal["Invalid", "Forbidden"]) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason


@dataclass
class AlreadyExists(Exception):
    """An object with the name of a created one exists. ``existing``: that object; empty for a Secret."""

    existing: Mapping[str, Any] = field(default_factory=dict)
