"""Watches of the children. Of all but Jobs and pods they deliver the metadata.

For each event Kopf creates a task, a memory and several causes, for handlers that change the object. A job may have a
thousand children, which no handler changes, so their events go directly into the store. ``resync`` finds events that a
watch misses.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any, Final

import msgspec

from ddp_operator.api.cluster_errors import ClusterError
from ddp_operator.api.faults import contain, name_object
from ddp_operator.kube.children import has_metadata_only
from ddp_operator.kube.client import CHUNK, ApiClient, ResponseError, decode_json, pages
from ddp_operator.kube.cluster import METADATA_ONLY, ONE_METADATA_ONLY
from ddp_operator.kube.resources import path, plural, type_of
from ddp_operator.reconcile.workqueue import backoff

logger = logging.getLogger(__name__)

SILENCE: Final = 150.0
"""Seconds without data after which a watch counts as frozen. The API server sends a bookmark about every minute."""
LONGEST_BACKOFF: Final = 8.0
GONE: Final = 410


class WatchEvent(msgspec.Struct):
    """One line of a watch."""

    type: str
    object: dict[str, Any]


OnEvent = Callable[[str, str | None, Any], None]
"""Called with kind, type of the event (None: an object of a list) and object."""


async def watch(client: ApiClient, kind: str, namespace: str | None, selector: str, on_event: OnEvent) -> None:
    """Call ``on_event`` for all children of a kind with these labels and for their changes, without end.

    A watch that ends resumes at its last version. If the API server no longer has that version, all objects are listed
    again; deletions before the list are not reported.
    """
    version = ""
    failures = 0
    params = {"labelSelector": selector}
    is_brief = has_metadata_only(kind)
    while True:
        try:
            if not version:
                accept = METADATA_ONLY if is_brief else "application/json"
                version = await _list(client, kind, namespace, params, accept, on_event)
            place = path(kind, namespace)
            accept = ONE_METADATA_ONLY if is_brief else "application/json"
            since = params | {"resourceVersion": version}
            watching = client.watch(place, since, kind=plural(kind), silence=SILENCE, accept=accept)
            async with aclosing(watching) as lines:
                async for line in lines:
                    event = decode_json(line, WatchEvent)
                    if event.type == "ERROR":
                        code = event.object.get("code")
                        status = code if isinstance(code, int) else 0
                        raise ResponseError(status, event.object, what=f"watch {place}")
                    failures = 0
                    with contain(kind, name_object(event.object)):
                        version = str(event.object["metadata"]["resourceVersion"])
                        if event.type != "BOOKMARK":
                            on_event(kind, event.type, event.object)
        except (ResponseError, ClusterError, msgspec.DecodeError) as error:
            if isinstance(error, ResponseError) and error.status == GONE:
                version = ""
            failures += 1
            logger.log(logging.WARNING if failures > 3 else logging.DEBUG, "%s; retrying", error)
        await asyncio.sleep(min(LONGEST_BACKOFF, backoff(max(1, failures))))


async def _list(
    client: ApiClient, kind: str, namespace: str | None, params: Mapping[str, str], accept: str, on_event: OnEvent
) -> str:
    """Call ``on_event`` for all existing objects. Returns the resource version of the list."""
    version = ""
    async for page in pages(client, kind, namespace, {"limit": str(CHUNK), **params}, accept=accept):
        for item in page.get("items") or ():
            with contain(kind, name_object(item)):
                on_event(kind, None, type_of(kind) | item)
        version = str(page["metadata"]["resourceVersion"])
    return version
