"""Which helper process of a rank a signal has killed: those who wait for it see a closed connection at most.

This module is loaded before the program starts, like ``tracebacks``.
"""

import sys
import time
from typing import Any, Final

from ..base.exceptions import KilledChild
from .script_objects import is_instance

_SECONDS_FOR_END: Final = 0.5  # a process closes its connections before its parent sees it end
_SECONDS_BETWEEN_LOOKS: Final = 0.02
_MOST_CHILDREN: Final = 256


def find_killed_child(error: BaseException) -> KilledChild | None:
    """Return the child that a signal has killed, for an exception of a rank that may have waited for it.

    Exceptions of lost connections arrive before the end of the process, which is awaited then.
    """
    module = sys.modules.get("multiprocessing.process")
    deadline = time.monotonic() + _SECONDS_FOR_END
    while True:
        children = tuple(getattr(module, "_children", ()))[:_MOST_CHILDREN]
        killed = next(filter(None, map(_examine, children)), None)
        may_follow = bool(children) and isinstance(error, (ConnectionError, EOFError))
        if killed is not None or not may_follow or time.monotonic() > deadline:
            return killed
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _examine(child: Any) -> KilledChild | None:
    """Return a child if a signal has killed it. It may be of any class of the script."""
    try:
        code = child._popen.poll()
        name = child.name
    except Exception:
        return None
    is_killed = is_instance(code, int) and code < 0 and is_instance(name, str)
    return KilledChild(str(name)[:80], -code) if is_killed else None
