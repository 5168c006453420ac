"""Where the hooks of a check write what they observe."""

from typing import Any, NamedTuple, Protocol

from .contract import RecordingOrder


class Indices(NamedTuple):
    """What a batch consists of: its digest, and how often an index is less than the one before."""

    digest: int
    descents: int


class Records(Protocol):
    """The records of one process.

    ``steps``: those that it has made; ``is_active``: whether more are written; ``models``: those in training.
    """

    is_active: bool
    rank: int
    steps: int
    order: RecordingOrder
    models: list[Any]

    def write(self, record: Any) -> None:
        """Write a record: once the process has made a step."""

    def enter_data(self) -> None:
        """Note that a DataLoader begins to load."""

    def leave_data(self) -> None:
        """Note that a DataLoader has loaded."""

    def find_view(self, tensor: Any) -> tuple[int, str] | None:
        """Return the step after which a variable of the script had a tensor of the models' memory, and its name."""

    def note_batch(self, loader: int, iteration: int, batch: Any, indices: Indices) -> None:
        """Record a batch that a DataLoader delivers."""
