"""TCP ports of this machine that stay reserved until their use and between uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ddp_cli.local.ports import hold_port

from .stoppable import Stoppable


class HeldPort(Stoppable):
    """A reserved port, by default a free one, that only processes with its number can use until it is released."""

    def __init__(self, number: int = 0) -> None:
        self._socket = hold_port(number)
        self.number = int(self._socket.getsockname()[1])

    def __enter__(self) -> HeldPort:
        return self

    def stop(self) -> None:
        """Release the port."""
        self._socket.close()


@contextlib.contextmanager
def hold_row(count: int) -> Iterator[int]:
    """Reserve this many consecutive ports. Return the first."""
    for _ in range(50):
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(HeldPort()).number
            try:
                for number in range(first + 1, first + count):
                    stack.enter_context(HeldPort(number))
            except OSError:
                continue
            yield first
            return
    raise AssertionError("no free ports in a row")
