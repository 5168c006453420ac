"""One boundary for what the operator can do without: an object of another owner, or a view in the status.

Other components and tenants decide about the shape of their objects, and pods about the numbers that they report. What
the operator cannot read must not end the task that reads the others, nor the pass of a job.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.api.errors import InvalidManifest

logger = logging.getLogger(__name__)

PERIOD: Final = 3600.0
"""Seconds after which a fault that lasts is logged again."""
MOST_LOGGED: Final = 200
"""Maximum lines of a period. Users can create any number of objects."""
_MAX_TEXT: Final = 300
_EXPECTED: Final = (ClusterError, Refused, InvalidManifest)

T = TypeVar("T")


class FaultLog:
    """Counts all faults by part, and logs each once in a period. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.counts: Counter[str] = Counter()
        """Faults by part: a kind of object or the name of a view."""
        self._logged: set[tuple[str, str]] = set()
        self._period_ends = 0.0

    def add(self, part: str, subject: str, error: Exception) -> None:
        """Count a fault. ``subject``: the object, or the job of the view."""
        self.counts[part] += 1
        now = self._clock()
        if now >= self._period_ends:
            self._period_ends = now + PERIOD
            self._logged.clear()
        fault = (part, subject)
        if fault in self._logged or len(self._logged) >= MOST_LOGGED:
            return
        self._logged.add(fault)
        logger.warning("%s %s is left out: %s", part, subject, describe_fault(error))
        if len(self._logged) == MOST_LOGGED:
            logger.warning("further faults of the next hour are only counted in ddp_operator_faults_total")


FAULTS: Final = FaultLog()
"""The faults of this process."""


@contextmanager
def contain(part: str, subject: str) -> Iterator[None]:
    """Continue after an exception of the block, which is counted and logged.

    Errors of the API server and refusals of a spec have handlers of their own, so they pass.
    """
    try:
        yield
    except _EXPECTED:
        raise
    except Exception as error:
        FAULTS.add(part, subject, error)


def parse_each(kind: str, items: Iterable[Any], parse: Callable[[Any], T]) -> Iterator[T]:
    """Yield the parsed items of a list; those of an odd shape are left out."""
    for item in items:
        parsed: list[T] = []
        with contain(kind, name_object(item)):
            parsed.append(parse(item))
        yield from parsed


def name_object(item: Any) -> str:
    """Return namespace and name of an object of any shape, for a log line."""
    meta = item.get("metadata") if isinstance(item, Mapping) else None
    if not isinstance(meta, Mapping):
        return "without metadata"
    names = (str(meta[part])[:_MAX_TEXT] for part in ("namespace", "name") if meta.get(part))
    return "/".join(names) or "without a name"


def describe_fault(error: Exception) -> str:
    """Return the exception in one line, with the line of code that raised it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = "" if frame is None else f" ({Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno})"
    text = " ".join(str(error).split())[:_MAX_TEXT]
    return f"{type(error).__name__}: {text}{place}"
