"""Timestamps as the Kubernetes API writes them (``metav1.Time``): RFC 3339, UTC, whole seconds."""

from datetime import UTC, datetime
from typing import Any, Final

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
"""Stands for a time that is not known where times are put in order."""


def utc_now() -> datetime:
    """Return the time, aware and in UTC."""
    return datetime.now(UTC)


def truncate(moment: datetime) -> datetime:
    """Return a time in UTC with the precision that Kubernetes keeps, so that it is equal to what is read back."""
    return moment.astimezone(UTC).replace(microsecond=0)


def format_time(moment: datetime) -> str:
    """Return a time as Kubernetes writes it, such as ``2026-11-20T12:00:00Z``."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(value: Any) -> datetime | None:
    """Return an RFC 3339 time as an aware datetime; None where the value is missing or is not one."""
    if not isinstance(value, str):
        return None
    try:
        parsed = datetime.fromisoformat(value)
    except ValueError:
        return None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
