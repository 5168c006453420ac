"""Where the hooks of a check write what they observe."""

from typing import Any, Protocol

from .contract import Order


class Records(Protocol):
    """The records of one process. ``steps``: those that it has made; ``is_active``: whether more are written."""

    is_active: bool
    steps: int
    order: Order

    def write(self, record: Any) -> None:
        """Write a record: once the process has made a step."""
