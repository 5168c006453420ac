"""What the API server answers when it does not do what was asked."""

from collections.abc import Mapping
from typing import Any

MESSAGE_LIMIT = 2000
"""Characters of the API server's message that are kept: enough for a dozen field errors, too few to bloat a status."""


class StartupError(Exception):
    """The operator cannot start. The message says in one line what is missing and what to do about it."""


class ApiError(Exception):
    """An HTTP status of 400 or more, with what the body (a ``Status`` object) said about it."""

    def __init__(self, status: int, body: Mapping[str, Any] | None = None, *, what: str = "") -> None:
        body = body or {}
        self.status = status
        self.reason = str(body.get("reason") or "")
        self.message = trim(str(body.get("message") or f"HTTP {status}"))
        super().__init__(f"{what}: {self.message}" if what else self.message)


def trim(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """Cut a long text at ``limit`` characters, visibly."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
