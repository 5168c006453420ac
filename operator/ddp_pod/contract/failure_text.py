"""Texts of failures and remedies that the launcher shares with the operator or the commands."""

import re
from collections.abc import Iterable
from typing import Any, Final

UNRESOLVED: Final = "name does not resolve yet"
"""Problem of a connection to pod 0."""
BROKEN_PYTHON: Final = re.compile(
    r"^(Fatal Python error: (pre)?(config|init)_\w+: |Could not find platform independent libraries"
    r"|\S*python\S*: error while loading shared libraries: )[^\n]*",
    re.M,
)
"""What a Python prints that cannot start."""
BROKEN_PYTHON_REMEDY: Final = (
    "this Python cannot start: correct or remove PYTHONHOME, PYTHONPATH and LD_LIBRARY_PATH in the environment, which "
    "may be meant for another Python, or repair its installation"
)
SENDER_REMEDY: Final = (
    "find the sender: a process of the pod (the script, a library, another container with shareProcessNamespace), or "
    "a person (kubectl exec, the node's container runtime); the kernel short of memory sends SIGKILL only"
)
NON_FINITE_REMEDY: Final = (
    "the training diverges: return to an earlier checkpoint, then reduce the learning rate, extend the warm-up or clip "
    "the gradients, and prefer bf16 to fp16; if only one rank is affected, check its data and its GPU"
)


def format_failure(category: str, places: Iterable[tuple[str, Any]], message: str) -> str:
    """Return a failure in one line, such as ``UserError (rank 1, exit code 1): KeyError: 10``."""
    place = format_place(places)
    head = f"{category} ({place})" if place else category
    return f"{head}: {message or 'no message'}"


def format_place(places: Iterable[tuple[str, Any]]) -> str:
    """Return where a failure happened; unknown parts are omitted."""
    return ", ".join(f"{name} {value}" for name, value in places if value not in (None, ""))
