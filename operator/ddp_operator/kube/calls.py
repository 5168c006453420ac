"""Calls about objects of a kind, and what the API server's refusals mean to the reconcile."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from ddp_operator.cluster import ClusterError, Conflict, Refused
from ddp_operator.kube.client import ApiClient, ApiError
from ddp_operator.kube.resources import path, plural

INVALID = frozenset({400, 413, 422})
"""What the API server answers where it will never take a body."""


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


async def pages(
    client: ApiClient, kind: str, namespace: str | None, params: Mapping[str, str], **options: Any
) -> AsyncIterator[Any]:
    """Yield a list page by page; ``params`` say how long these are. Raises: as ``call``, which has the options."""
    more: Any = ""
    while more is not None:
        asked = {**params, "continue": str(more)} if more else params
        page = await call(client, "GET", kind, namespace, params=asked, **options)
        yield page
        more = (page.get("metadata") or {}).get("continue") or None
