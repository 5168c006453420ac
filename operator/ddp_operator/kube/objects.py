"""Calls about objects of a kind, with the errors of the protocol in ``ddp_operator.cluster``."""

from __future__ import annotations

from typing import Any, Final

from ddp_operator.cluster import ClusterError, Conflict, Refused
from ddp_operator.kube.client import ApiClient
from ddp_operator.kube.errors import ApiError
from ddp_operator.kube.resources import path, plural

INVALID: Final = frozenset({400, 413, 422})


class NotFound(ClusterError):
    """There is no such object, namespace or kind (404)."""


async def call(
    client: ApiClient,
    method: str,
    kind: str,
    namespace: str | None,
    name: str | None = None,
    subresource: str | None = None,
    *,
    refusable: bool = False,
    **options: Any,
) -> Any:
    """Make a call about one object, or about a list of them, and return the parsed JSON.

    Raises: NotFound, Conflict, ClusterError; where it is ``refusable``, Refused for what a repetition cannot change.
    """
    try:
        return await client.request(method, path(kind, namespace, name, subresource), kind=plural(kind), **options)
    except ApiError as error:
        if refusable and error.status == 403:
            raise Refused(error.message, reason="Forbidden") from error
        if refusable and error.status in INVALID:
            raise Refused(error.message, reason="Invalid") from error
        known = {404: NotFound, 409: Conflict}
        raise known.get(error.status, ClusterError)(str(error)) from error
