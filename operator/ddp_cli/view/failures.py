"""Texts of failures that only the commands show."""

from ddp_operator.api.status import Condition, LastFailure
from ddp_operator.decide.failures import list_places
from ddp_pod.contract.failure_text import format_place


def describe_place(failure: LastFailure) -> str:
    """Return where the failure happened; unknown parts are omitted."""
    return format_place(list_places(failure))


def describe_end(failed: Condition, failure: LastFailure | None) -> str:
    """Return why the job ended, without the failure itself; empty if the failure is the only reason."""
    if failure is None or not (failure.conclusion or failed.reason == failure.category):
        return failed.message  # such as a deadline
    return failure.conclusion


def sentence(text: str) -> str:
    """Return a text as one line that ends like a sentence."""
    line = " ".join(text.split())
    return line if not line or line.endswith((".", "!", "?")) else f"{line}."
