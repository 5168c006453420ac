"""Texts that no decision writes: of features, commands and the operator's process."""

from datetime import UTC, datetime
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


def format_micro_time(moment: datetime) -> str:
    """Return a time as a ``MicroTime`` of Kubernetes, such as ``2026-11-20T12:00:00.000000Z``."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
