"""The record of a failure, shared by the pod, which writes it, and the operator, which reads it.

``to_json`` gives the form of the termination message (docs/pod-contract.md). The operator parses it in
``ddp_operator.decide.failures``, where nothing in it is trusted.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .failure_table import Outcome
from .names import EXIT_OK, TERMINATION_MESSAGE_LIMIT

MESSAGE_VERSION: Final = 1
TYPE_LIMIT: Final = 200
"""Characters kept of an exception's type and of a signature."""

# What a failure was derived from.
EVIDENCE_ERROR: Final = "Error"  # an exception, a message or a signal
EVIDENCE_EXIT_CODE: Final = "ExitCode"  # nothing but an exit code
EVIDENCE_STOPPED: Final = "Stopped"  # torchrun's agent stopped the rank after another one had failed
EVIDENCE_TIMEOUT: Final = "Timeout"  # the rank gave up a wait for a peer, rather than lost a connection
EVIDENCE: Final = (EVIDENCE_ERROR, EVIDENCE_EXIT_CODE, EVIDENCE_STOPPED, EVIDENCE_TIMEOUT)

JSON_NAMES: Final = {
    "category": "category",
    "container_exit_code": "containerExitCode",
    "secondary": "secondary",
    "rank": "rank",
    "local_rank": "localRank",
    "pod_index": "node",
    "exit_code": "exitCode",
    "exception_type": "type",
    "message": "message",
    "traceback": "traceback",
    "remedy": "hint",
    "time": "time",
    "restarts": "restarts",
    "signature": "signature",
    "step": "step",
    "repeated": "repeated",
    "progress": "progress",
    "evidence": "evidence",
}
"""Fields of a ``Failure`` and their names in JSON."""


@dataclass(frozen=True)
class Failure:
    """How a pod ended: what failed, where, and with which outcome. The category is empty where the pod succeeded."""

    category: str = ""
    container_exit_code: int = EXIT_OK
    """The launcher's own exit code, on which the Job's podFailurePolicy acts."""
    secondary: bool = False
    """Whether another rank's failure caused it, as with a lost peer."""
    rank: int | None = None
    local_rank: int | None = None
    pod_index: int | None = None
    exit_code: int | None = None
    """The worker's exit code; 128 + the number where a signal killed it."""
    exception_type: str = ""
    message: str = ""
    traceback: str = ""
    remedy: str = ""
    time: float | None = None
    """When it failed, in Unix seconds."""
    restarts: int = 0
    """How often the workers were restarted in the same pod."""
    signature: str = ""
    """What all repetitions of a failure of the script share; empty where the failure is not the script's."""
    step: float | None = None
    repeated: bool = False
    """Whether this pod had failed in the same way before, without progress in between."""
    progress: Mapping[str, float] = field(default_factory=dict)
    evidence: str = EVIDENCE_ERROR

    @property
    def outcome(self) -> Outcome:
        """Category, exit code of the container, and whether the failure is secondary."""
        return Outcome(self.category, self.container_exit_code, self.secondary)

    def to_json(self) -> dict[str, Any]:
        """Return the failure as a termination message has it."""
        members = {name: getattr(self, attribute) for attribute, name in JSON_NAMES.items()}
        return {"version": MESSAGE_VERSION, **members}

    @classmethod
    def from_json(cls, members: Mapping[str, Any]) -> "Failure":
        """Return the failure that ``to_json`` of this launcher wrote. Raises: KeyError."""
        return cls(**{attribute: members[name] for attribute, name in JSON_NAMES.items()})


def order_causes(failure: Failure) -> tuple[bool, bool, float]:
    """Return the sort key of the failures of one incident, which puts the root cause first.

    The earliest failure that is not secondary is the root cause. A rank that the agent stopped is last, because another
    one had failed before. Among equals, a failure without a time is last.
    """
    time = math.inf if failure.time is None else failure.time
    return failure.evidence == EVIDENCE_STOPPED, failure.secondary, time


class KnownFailure(Exception):
    """An error whose outcome and remedy are known where it is raised."""

    def __init__(self, message: str, outcome: Outcome, remedy: str = "") -> None:
        super().__init__(message)
        self.outcome = outcome
        self.remedy = remedy


def encode_message(message: Mapping[str, Any], limit: int = TERMINATION_MESSAGE_LIMIT) -> bytes:
    """Return a termination message as JSON of at most ``limit`` bytes.

    Where it is too long, the traceback loses its beginning; then the other texts lose their ends.
    """
    shortened = dict(message)
    for name in ("traceback", "progress", "message", "hint"):
        while True:
            text = json.dumps(shortened, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
            if len(text) <= limit:
                return text

            value = shortened.get(name)
            if not isinstance(value, str):
                shortened[name] = {} if name == "progress" else ""
                break
            if not value:
                break

            excess = max(1, (len(text) - limit) // 6)  # JSON writes a character as up to six bytes
            room = max(0, len(value) - excess)
            shortened[name] = value[len(value) - room :] if name == "traceback" else value[:room]

    return json.dumps({"version": MESSAGE_VERSION, "category": message["category"]}).encode()
