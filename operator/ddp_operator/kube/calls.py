"""Calls about objects of a kind. Errors of the API server become exceptions of the ``Cluster`` protocol."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from ddp_operator.api.cluster import ClusterError, Refused, VersionConflict
from ddp_operator.kube.client import AnswerTooLarge, ApiClient, ResponseError
from ddp_operator.kube.resources import path, plural

CHUNK: Final = 250
"""Objects in one page of a list."""
PAGE_BYTES: Final = 4 << 20
"""Maximum bytes of one page. A parsed page takes a multiple of its bytes in memory."""
OBJECT_BYTES: Final = 32 << 20
"""Maximum bytes of a page with a single object, more than an API server stores."""

INVALID = frozenset({400, 413, 422})
"""HTTP statuses for a body that the API server will never accept."""


class ObjectNotFound(ClusterError):
    """The object, namespace or kind does not exist (404)."""


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

    Raises: ObjectNotFound, VersionConflict, ClusterError; with ``refusable`` also Refused, if a retry cannot help.
    """
    try:
        return await client.request(method, path(kind, namespace, name, subresource), kind=plural(kind), **options)
    except ResponseError as error:
        if refusable and error.status == 403:
            raise Refused(error.message, reason="Forbidden") from error
        if refusable and error.status in INVALID:
            raise Refused(error.message, reason="Invalid") from error
        exceptions = {404: ObjectNotFound, 409: VersionConflict}
        raise exceptions.get(error.status, ClusterError)(str(error)) from error


async def pages(
    client: ApiClient, kind: str, namespace: str | None, params: Mapping[str, str], **options: Any
) -> AsyncIterator[Any]:
    """Yield a list page by page; ``params`` limit the objects in each, PAGE_BYTES their size.

    A page that is too large is read again with half the objects. Options and exceptions are those of ``call``.
    """
    max_limit = int(params["limit"])
    limit = max_limit
    token = ""
    while True:
        page_params = {**params, "limit": str(limit)}
        if token:
            page_params["continue"] = token
        max_bytes = PAGE_BYTES if limit > 1 else OBJECT_BYTES
        try:
            page = await call(client, "GET", kind, namespace, params=page_params, max_bytes=max_bytes, **options)
        except AnswerTooLarge:
            if limit == 1:
                raise
            limit = max(1, limit // 2)
            continue
        yield page
        token = str((page.get("metadata") or {}).get("continue") or "")
        if not token:
            return
        limit = min(max_limit, limit * 2)
