"""Faults call by call: the n-th call that matches is answered with an error, late, or not at all.

server.faults.add(verb="create", resource="jobs", status=500)            # the next one
server.faults.add(verb="update", resource="ddptrainingjobs/status", nth=2, status=409)
server.faults.add(resource="pods", verb="watch", status="drop", times=3)
server.faults.add(verb="create", resource="jobs", status="lost answer")  # done, but the answer never arrives
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

Status = int | Literal["timeout", "drop", "lost answer"]
"""An HTTP status; no response; a cut connection; or the call is performed and the connection is cut then."""


@dataclass
class Fault:
    """One rule. None matches everything."""

    status: Status
    verb: str | None = None
    resource: str | None = None
    name: str | None = None
    nth: int = 1
    times: int = 1
    retry_after: int | None = None
    message: str = "injected fault"
    seen: int = 0

    @property
    def hits(self) -> int:
        """How often it has occurred."""
        return max(0, min(self.seen - self.nth + 1, self.times))


class Faults:
    """The rules, in the order in which they were added. The first that matches counts the call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[Fault] = []

    def add(
        self,
        status: Status,
        *,
        verb: str | None = None,
        resource: str | None = None,
        name: str | None = None,
        nth: int = 1,
        times: int = 1,
        retry_after: int | None = None,
        message: str = "injected fault",
    ) -> Fault:
        """Add a rule: the ``nth`` matching call from now on, and ``times`` in a row."""
        fault = Fault(status, verb, resource, name, nth, times, retry_after, message)
        with self._lock:
            self._rules.append(fault)
        return fault

    def clear(self) -> None:
        """Forget all rules."""
        with self._lock:
            self._rules.clear()

    def match(self, verb: str, resource: str, name: str) -> Fault | None:
        """Count a call and return its fault, if a rule applies."""
        with self._lock:
            for fault in self._rules:
                if fault.seen >= fault.nth + fault.times - 1:
                    continue  # used up
                if (
                    fault.verb in (None, verb)
                    and fault.resource in (None, resource)
                    and (fault.name is None or fault.name == name)
                ):
                    fault.seen += 1
                    if fault.seen >= fault.nth:
                        return fault
        return None
