"""What `ddp check` reports about one check."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

PASSED: Final = "passed"
FAILED: Final = "failed"
WARNING: Final = "warning"
NOT_APPLICABLE: Final = "not applicable"
NO_SAVE: Final = "no checkpoint was written; pass arguments with which the script saves sooner, or --steps"
_SHOWN: Final = 3  # names in a message


@dataclass(frozen=True)
class CheckVerdict:
    """The state of a check. ``place``: a line of the script, such as train.py:12; ``remedy``: what to change there."""

    check: str
    state: str
    reason: str = ""
    place: str = ""
    remedy: str = ""


def passed(reason: str = "") -> CheckVerdict:
    """Return the verdict of a check that found nothing wrong."""
    return CheckVerdict("", PASSED, reason)


def failed(reason: str, place: str, remedy: str) -> CheckVerdict:
    """Return the verdict of a check that found a fault."""
    return CheckVerdict("", FAILED, reason, place, remedy)


def warned(reason: str, place: str, remedy: str) -> CheckVerdict:
    """Return the verdict of a check that found what may be intended."""
    return CheckVerdict("", WARNING, reason, place, remedy)


def not_applicable(reason: str) -> CheckVerdict:
    """Return the verdict of a check without anything to observe."""
    return CheckVerdict("", NOT_APPLICABLE, reason)


def list_names(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    unique = list(dict.fromkeys(names))
    more = len(unique) - _SHOWN
    return ", ".join(unique[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
