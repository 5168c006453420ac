"""Texts about the inputs of a job, which the operator and the commands share. Pure."""

from collections.abc import Sequence

from ddp_operator.api.status import InputStatus
from ddp_pod.contract.pod_end import InputReport


def describe_inputs(inputs: Sequence[InputStatus | InputReport]) -> str:
    """Return the progress of fetching in one line, with the first problem."""
    fetched = format_size(sum(item.bytes for item in inputs))
    sizes = [item.total_bytes for item in inputs]
    known = [size for size in sizes if size is not None]
    total = f" of {format_size(sum(known))}" if known and len(known) == len(sizes) else ""
    message = f"fetching inputs: {fetched}{total}"
    if len(inputs) > 1:
        complete = sum(item.phase == "Fetched" for item in inputs)
        message += f", {complete}/{len(inputs)} complete"
    waiting = next((item for item in inputs if item.message), None)
    return message if waiting is None else f"{message}; input {waiting.name}: {waiting.message}"


def format_size(number: int) -> str:
    """Return a number of bytes with a unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 1000 * size else f"{number / size:.0f} {unit}"
    return f"{number} bytes"
