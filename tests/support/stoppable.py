"""Helpers that run beside a test and must be stopped."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager


class Stoppable(AbstractContextManager["Stoppable"]):
    """An object that is stopped at the latest at the end of its ``with`` block."""

    @abstractmethod
    def stop(self) -> None:
        """Stop it. A second call does no harm."""

    def __exit__(self, *about: object) -> None:
        self.stop()
