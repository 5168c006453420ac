"""What `ddp check` reports about one check."""

from dataclasses import dataclass
from typing import Final

PASSED: Final = "passed"
FAILED: Final = "failed"
NOT_APPLICABLE: Final = "not applicable"


@dataclass(frozen=True)
class Verdict:
    """The state of a check. ``place``: a line of the script, such as train.py:12; ``remedy``: what to change there."""

    check: str
    state: str
    reason: str = ""
    place: str = ""
    remedy: str = ""
