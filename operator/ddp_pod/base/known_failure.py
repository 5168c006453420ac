"""Errors of the launcher whose outcome is known."""

from ..contract.failure_table import Outcome


class KnownFailure(Exception):
    """An error whose outcome and remedy are known where it is raised."""

    def __init__(self, message: str, outcome: Outcome, remedy: str = "") -> None:
        super().__init__(message)
        self.outcome = outcome
        self.remedy = remedy
