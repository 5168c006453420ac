"""Watches of the child Jobs and pods.

Kopf's watch of the custom resource makes a task, a memory and several causes of each event, for handlers that change
the object. Nothing here does that with children, of which a job may have a thousand: their events go straight into the
store. What a watch misses ``resync`` finds.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Final

import msgspec

from ddp_operator.cluster import ClusterError
from ddp_operator.kube.calls import CHUNK, pages
from ddp_operator.kube.client import ApiClient, ApiError
from ddp_operator.kube.resources import path, plural, type_of
from ddp_operator.workqueue import backoff

logger = logging.getLogger(__name__)

SILENCE: Final = 150.0
"""Seconds after which a watch is taken for frozen. The API server sends a bookmark about every minute."""
LONGEST_BACKOFF: Final = 8.0
GONE: Final = 410

OnEvent = Callable[[str, str | None, Any], None]
"""Called with kind, type of the event (None: an object of a listing) and object."""


async def watch(client: ApiClient, kind: str, namespace: str | None, selector: str, on_event: OnEvent) -> None:
    """Tell of all Jobs or pods with these labels, and of all that happens to them, for ever.

    A watch that ends goes on where it was. Where the API server has forgotten that, all objects are listed again; what
    was deleted meanwhile is not told.
    """
    version, failures = "", 0
    while True:
        try:
            if not version:
                version = await _list(client, kind, namespace, selector, on_event)
            params = {"labelSelector": selector, "resourceVersion": version}
            place = path(kind, namespace)
            async with aclosing(client.watch(place, params, kind=plural(kind), silence=SILENCE)) as lines:
                async for line in lines:
                    event = msgspec.json.decode(line)
                    obj = event["object"]
                    if event["type"] == "ERROR":
                        raise ApiError(int(obj.get("code") or 0), obj, what=f"watch {place}")
                    version, failures = str(obj["metadata"]["resourceVersion"]), 0
                    if event["type"] != "BOOKMARK":
                        on_event(kind, event["type"], obj)
        except (ApiError, ClusterError, msgspec.DecodeError) as error:
            if isinstance(error, ApiError) and error.status == GONE:
                version = ""
            failures += 1
            logger.log(logging.WARNING if failures > 3 else logging.DEBUG, "%s; trying again", error)
        await asyncio.sleep(min(LONGEST_BACKOFF, backoff(max(1, failures))))


async def _list(client: ApiClient, kind: str, namespace: str | None, selector: str, on_event: OnEvent) -> str:
    """Tell of what is there; return the version at which it was."""
    version = ""
    async for page in pages(client, kind, namespace, {"limit": str(CHUNK), "labelSelector": selector}):
        for item in page.get("items") or ():
            on_event(kind, None, type_of(kind) | item)
        version = str(page["metadata"]["resourceVersion"])
    return version
