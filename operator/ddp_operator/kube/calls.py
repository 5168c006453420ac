"""Calls about objects of a kind, and what the API server's refusals mean to the reconcile."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from ddp_operator.cluster import ClusterError, Conflict, Refused
from ddp_operator.kube.client import AnswerTooLarge, ApiClient, ApiError
from ddp_operator.kube.resources import path, plural

CHUNK: Final = 250
"""Objects in one page of a list."""
PAGE_BYTES: Final = 4 << 20
"""Of one page. Objects of a megabyte come a few at a time: parsed, a page takes many times its bytes."""
OBJECT_BYTES: Final = 32 << 20
"""Of a page of a single object, more than an API server stores."""

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
    """Yield a list page by page; ``params`` limit the objects in each, PAGE_BYTES their size.

    A page that is too large is read again with half the objects. Raises: as ``call``, which has the options.
    """
    most = limit = int(params["limit"])
    more = ""
    while True:
        asked = {**params, "limit": str(limit)} | ({"continue": more} if more else {})
        size = PAGE_BYTES if limit > 1 else OBJECT_BYTES
        try:
            page = await call(client, "GET", kind, namespace, params=asked, max_bytes=size, **options)
        except AnswerTooLarge:
            if limit == 1:
                raise
            limit = max(1, limit // 2)
            continue
        yield page
        more = str((page.get("metadata") or {}).get("continue") or "")
        if not more:
            return
        limit = min(most, limit * 2)
