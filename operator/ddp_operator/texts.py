"""Texts of values that several packages show: durations, and numbers with nouns."""


def format_duration(seconds: float) -> str:
    """Return a duration as text: 42s, 5m12s, 3h04m, 2d07h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def format_more_pods(number: int, *, preposition: str = "") -> str:
    """Return the pods that a message counts beside the named one, such as `` (and of 2 more pods)``; empty for 0."""
    if not number:
        return ""
    words = ["and", *([preposition] if preposition else []), str(number), "more", "pod" if number == 1 else "pods"]
    return f" ({' '.join(words)})"
