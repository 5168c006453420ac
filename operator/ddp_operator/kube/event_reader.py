"""Reading what others have posted as Events, for objects that do not get on.

An API server reads all Events of a namespace to find those about one object. A thousand Jobs whose pods are forbidden
would have it do so a thousand times, and most of the operator's time at rest would be theirs. So what the Job
controller says is read for all Jobs of a namespace together, and the answer is good for some seconds.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from ddp_operator.cluster import Object
from ddp_operator.kube.client import ApiClient, call

LIMIT: Final = 50
"""Events about one object."""
PAGE: Final = 500
PAGES: Final = 20
AGE: Final = 5.0
ABOUT_JOBS: Final = "involvedObject.kind=Job,reason=FailedCreate"

_READ: Final = ("type", "reason", "message", "lastTimestamp", "eventTime", "series")


class EventReader:
    """Answers what was said about an object. ``clock`` is monotonic, in seconds."""

    def __init__(self, client: ApiClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._known: dict[str, tuple[float, dict[str, list[Object]]]] = {}
        self._lock = asyncio.Lock()

    async def about(self, item: Object) -> tuple[Object, ...]:
        """Return the Events about a Job or a pod. Raises: ClusterError, Refused."""
        meta = item["metadata"]
        namespace, uid = meta["namespace"], meta["uid"]
        if item["kind"] != "Job":
            return tuple(await self._list(namespace, f"involvedObject.uid={uid}", LIMIT, 1))
        return tuple((await self._about_jobs(namespace)).get(uid, ())[-LIMIT:])

    async def _about_jobs(self, namespace: str) -> dict[str, list[Object]]:
        """Return the Events about Jobs of a namespace by their UIDs; read anew where the answer is too old."""
        async with self._lock:
            now = self._clock()
            for old in [name for name, (asked, _) in self._known.items() if now - asked >= AGE]:
                del self._known[old]
            if namespace not in self._known:
                found: dict[str, list[Object]] = {}
                for event in await self._list(namespace, ABOUT_JOBS, PAGE, PAGES):
                    about = str((event.get("involvedObject") or {}).get("uid") or "")
                    found.setdefault(about, []).append(_trimmed(event))
                self._known[namespace] = now, found
            return self._known[namespace][1]

    async def _list(self, namespace: str, selector: str, limit: int, pages: int) -> list[Object]:
        params = {"fieldSelector": selector, "limit": str(limit)}
        found: list[Object] = []
        for _ in range(pages):
            answer = await call(self._client, "GET", "Event", namespace, refusable=True, params=params)
            found += answer.get("items") or ()
            more = (answer.get("metadata") or {}).get("continue")
            if not more:
                break
            params["continue"] = str(more)
        return found


def _trimmed(event: Object) -> Object:
    """Return what is read of an Event; a thousand of them are kept for some seconds."""
    created = (event.get("metadata") or {}).get("creationTimestamp")
    return {name: event[name] for name in _READ if name in event} | {"metadata": {"creationTimestamp": created}}
