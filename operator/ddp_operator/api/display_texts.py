"""Texts that only features and commands show."""

from typing import Final

SLOW_REMEDY: Final = "if this is slow by design, raise spec.watchdog.stallSeconds or call exporter.heartbeat()"
"""The remedy for a rank that computes, or is in I/O, while its peers wait."""


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
