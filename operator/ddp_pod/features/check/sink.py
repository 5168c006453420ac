"""Where the hooks of a check write what they observe."""

from typing import Any, NamedTuple, Protocol

from .contract import Order


class Indices(NamedTuple):
    """What a batch consists of: its digest, and how often an index is less than the one before."""

    digest: int
    descents: int


class Records(Protocol):
    """The records of one process. ``steps``: those that it has made; ``is_active``: whether more are written."""

    is_active: bool
    steps: int
    order: Order

    def write(self, record: Any) -> None:
        """Write a record: once the process has made a step."""

    def enter_data(self) -> None:
        """Note that a DataLoader begins to load."""

    def leave_data(self) -> None:
        """Note that a DataLoader has loaded."""

    def note_batch(self, loader: int, iteration: int, batch: Any, indices: Indices) -> None:
        """Record a batch that a DataLoader delivers."""
