"""What torchrun's agent asks of the mirror."""

from typing import NamedTuple


class SnapshotNeeded(NamedTuple):
    """A round begins with a snapshot; None: first upload the folder, in other pods than pod 0 the shards.

    The reply is the snapshot's name.
    """

    known: str | None
