"""Read numbers of untrusted text."""

from typing import Any

_MOST_DIGITS = 18  # a 64-bit integer; Python refuses to convert more than 4,300


def parse_count(text: Any) -> int | None:
    """Return a number that consists of digits; None for other text, and for one beyond 64 bits."""
    digits = str(text)
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS else None
