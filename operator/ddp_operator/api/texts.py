"""Texts that several packages show: numbers with nouns, and what no text may contain."""

from typing import Final

# Members of a class: control characters except tab and newline, separators, halves of characters, and what a font may
# omit by Unicode (joiners, direction marks, selectors, tags), in which an assistant reads text that no user sees.
INVISIBLE: Final = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    r"\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3"
    r"\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)


def format_more_pods(number: int, *, preposition: str = "") -> str:
    """Return the pods that a message counts beside the named one, such as `` (and of 2 more pods)``; empty for 0."""
    if not number:
        return ""
    words = ["and", *([preposition] if preposition else []), str(number), "more", "pod" if number == 1 else "pods"]
    return f" ({' '.join(words)})"
