"""What runs beside a test and has to be stopped."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager


class Stoppable(AbstractContextManager["Stoppable"]):
    """Something that is stopped at the latest on leaving its ``with`` block."""

    @abstractmethod
    def stop(self) -> None:
        """Stop it; doing so twice does no harm."""

    def __exit__(self, *about: object) -> None:
        self.stop()
