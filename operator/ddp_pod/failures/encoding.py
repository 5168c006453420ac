"""Write the end of a pod as its termination message: JSON within the limit of a kubelet."""

import dataclasses
import json
from typing import Any, Final, TypeVar

from ..contract.failure_record import Failure, PodEnd
from ..contract.names import TERMINATION_MESSAGE_LIMIT
from ..contract.records import to_json

MESSAGE_VERSION: Final = 2


_NESTED_LIMIT: Final = 1500  # bytes of a failure within a termination message


AnyFailure = TypeVar("AnyFailure", bound=Failure)


def encode_end(end: PodEnd, limit: int = TERMINATION_MESSAGE_LIMIT) -> bytes:
    """Return a termination message: JSON of at most ``limit`` bytes.

    Where it is too long, the traceback loses its beginning, and the message and the remedy their ends.
    """
    nested: dict[str, Any] = {
        name: shorten_failure(failure, _NESTED_LIMIT)
        for name in ("last_failure", "awaited")
        if (failure := getattr(end, name)) is not None
    }
    shortened = shorten_failure(dataclasses.replace(end, **nested), limit)
    message = _encode(shortened)
    if len(message) > limit:
        message = _encode(Failure(end.category, container_exit_code=end.container_exit_code))
    return message


def shorten_failure(failure: AnyFailure, limit: int) -> AnyFailure:
    """Return a failure whose JSON has at most ``limit`` bytes, unless its other members are longer."""
    for name in ("traceback", "progress", "message", "remedy"):
        excess = len(_encode(failure)) - limit
        value = getattr(failure, name, None)
        while excess > 0 and value:
            if isinstance(value, str):
                room = max(0, len(value) - max(1, excess // 6))  # JSON writes a character as up to six bytes
                value = value[len(value) - room :] if name == "traceback" else value[:room]
            else:
                value = None
            changes: dict[str, Any] = {name: value}
            failure = dataclasses.replace(failure, **changes)
            excess = len(_encode(failure)) - limit
    return failure


def _encode(failure: Failure) -> bytes:
    members = {"version": MESSAGE_VERSION, "category": failure.category, **to_json(failure)}
    return json.dumps(members, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
