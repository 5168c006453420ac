"""The line of the forward pass whose gradient is NaN, which the anomaly mode of autograd keeps in the graph."""

import os
import re
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from ..base.exceptions import LIBRARY, PLACE
from ..base.files import is_own_file
from .script_objects import is_tensor, list_values, read_property

_REFUSED: Final = re.compile(r"Function '(\w+)' returned nan values")
_STACK: Final = "traceback_"  # torch/csrc/autograd/python_anomaly_mode.h
_MOST_NODES: Final = 20_000
_MOST_LINES: Final = 3


def describe_forward(torch: Any, error: BaseException) -> str:
    """Return which lines of the script have computed what has a NaN as gradient; empty: unknown, or too many."""
    refused = _REFUSED.match(str(error))
    if refused is None:
        return ""
    places: dict[str, None] = {}
    for node in _walk(_list_roots(torch, error)):
        stack = node.metadata.get(_STACK) if node.name() == refused[1] else None
        place = _find_own(stack) if type(stack) is list else ""
        if place:
            places[place] = None
    return f" (computed in {' or '.join(places)})" if 0 < len(places) <= _MOST_LINES else ""


def _list_roots(torch: Any, error: BaseException) -> Iterator[Any]:
    """Yield the nodes of the graph that the frames of an exception have."""
    trace = error.__traceback__
    while trace is not None:
        for value in list_values(dict(trace.tb_frame.f_locals)):
            for tensor in value if type(value) is tuple else (value,):
                node = read_property(torch, tensor, "grad_fn") if is_tensor(torch, tensor) else None
                if node is not None:
                    yield node
        trace = trace.tb_next


def _walk(roots: Iterator[Any]) -> Iterator[Any]:
    waiting = deque(roots)
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.popleft()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(function for function, _ in node.next_functions)


def _find_own(stack: "list[str]") -> str:
    """Return the innermost line of the script in a stack, as ``train.py:12``; empty: there is none."""
    for entry in reversed(stack):
        place = PLACE.match(entry)
        if place and not (LIBRARY.search(place[1]) or is_own_file(place[1])):
            line = " ".join(entry.splitlines()[1:2]).strip()
            return f"{os.path.basename(place[1])}:{place[2]}{f' `{line}`' if line else ''}"
    return ""
