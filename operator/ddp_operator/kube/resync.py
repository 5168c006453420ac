"""Holding the store against the API server's lists.

Watches alone are not enough. A list after a 410 never tells of what was deleted meanwhile; a watch can freeze; at the
start the custom resources may arrive before their Jobs, and a reconcile that does not see a Job would make another one;
and Services and ConfigMaps are not watched at all. One cheap comparison answers all four: a list of metadata only, for
each kind, at the start, in intervals, and soon after a watch has listed anew.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ddp_operator.cluster import ClusterError, Key, Object
from ddp_operator.constants import KIND, LABEL_JOB_NAME, LABEL_MANAGED_BY, MANAGED_BY
from ddp_operator.kube.cache import ObjectCache, version_number
from ddp_operator.kube.calls import NotFound, call, pages
from ddp_operator.kube.children import UNWATCHED_KINDS, key_of, trim_metadata, trim_object
from ddp_operator.kube.client import ApiClient
from ddp_operator.kube.cluster import METADATA_ONLY

logger = logging.getLogger(__name__)

CHILD_SELECTOR: Final = f"{LABEL_MANAGED_BY}={MANAGED_BY},{LABEL_JOB_NAME}"
WATCHED: Final = (KIND, "Job", "Pod")
CHUNK: Final = "500"
POLL: Final = 0.02
GRACE: Final = 2.0
"""Seconds without any progress of the watches after which they count as lagging behind a list."""
NUDGE_DELAY: Final = 2.0
RETRY: Final = 1.0

Laggard = tuple[str, Mapping[str, Any]]
"""A kind, and the metadata of an object that is newer in the list than in the store."""

COMPARED: Final = ("name", "namespace", "uid", "resourceVersion", "labels", "ownerReferences")
"""What is needed of what is watched: the metadata of all is held at once, and managedFields are most of it."""


@dataclass(eq=False)
class Resync:
    """Keeps a store true. ``on_change`` is told of every resource for which something was found."""

    client: ApiClient
    store: ObjectCache
    namespaces: Sequence[str]
    interval: float
    on_change: Callable[[Key], None]
    synced: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once everything that existed at the start has been seen."""
    _nudged: asyncio.Event = field(default_factory=asyncio.Event)

    def nudge(self) -> None:
        """Say that a watch began anew, so that deletions may have been missed: compare soon."""
        self._nudged.set()

    async def run(self) -> None:
        """Reach the first agreement, then compare for ever."""
        await self._start()
        self.synced.set()
        while True:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: until Python 3.12 it loses a cancellation that comes together with the event.
                async with asyncio.timeout(self.interval):
                    await self._nudged.wait()
                await asyncio.sleep(NUDGE_DELAY)  # the new listing of the watch is still under way
            self._nudged.clear()
            try:
                await self.resync()
            except ClusterError as exc:
                logger.warning("cannot compare with the API server's lists: %s", exc)
                await asyncio.sleep(RETRY)
                self._nudged.set()

    async def resync(self) -> None:
        """Compare once: drop ghosts, take in what is not watched, and read what a watch has failed to deliver."""
        lagging = await self._settle(await self._compare())
        if lagging:
            logger.warning("the watches lag behind: reading %d objects one by one", len(lagging))
        for kind, meta in lagging:
            await self._read(kind, meta)

    async def _start(self) -> None:
        complaints = 0
        while True:
            try:
                lagging = await self._settle(await self._compare())
                if not lagging:
                    return
                # Either a watch has not come up, or something was deleted between the two lists: look again.
                reason = f"{len(lagging)} objects have not arrived by the watches yet"
            except ClusterError as exc:
                reason = str(exc)
                await asyncio.sleep(RETRY)
            complaints += 1
            logger.log(logging.WARNING if complaints > 2 else logging.DEBUG, "not ready yet: %s", reason)

    async def _compare(self) -> list[Laggard]:
        lagging: list[Laggard] = []
        for scope in self.namespaces or (None,):
            for kind in (*WATCHED, *UNWATCHED_KINDS):
                lagging += await self._compare_one(kind, scope)
        return lagging

    async def _compare_one(self, kind: str, scope: str | None) -> list[Laggard]:
        # What was there before the list and is not in it is gone. What came after the list began is not judged.
        before = self.store.entries(kind, [scope] if scope else [])
        items, version = await self._list(kind, scope)
        listed = {str(item["metadata"].get("uid")) for item in items}
        for uid, ((_, namespace, name), _) in before.items():
            if uid not in listed:
                key = self.store.mark_deleted(kind, namespace, name, uid, version)
                if key is not None:
                    logger.info("%s %s/%s is gone; its deletion was missed", kind, namespace, name)
                    self.on_change(key)
        if kind in UNWATCHED_KINDS:
            for item in items:
                key = self.store.apply(kind, item)
                if key is not None:
                    self.on_change(key)
            return []
        metas = [item["metadata"] for item in items]
        # Those that are known and no children any more are read too, and so dropped.
        ours = [meta for meta in metas if key_of(kind, meta) is not None or str(meta.get("uid")) in before]
        return [(kind, meta) for meta in ours if not self.store.is_current(kind, meta)]

    async def _list(self, kind: str, scope: str | None) -> tuple[list[Object], int | None]:
        """Return the objects of a kind (metadata only) and the version at which the list was true."""
        params = {"limit": CHUNK} | ({"labelSelector": CHILD_SELECTOR} if kind != KIND else {})
        items: list[Object] = []
        version: Any = None
        async for page in pages(self.client, kind, scope, params, accept=METADATA_ONLY):
            items += [_reduced(kind, item) for item in page.get("items") or ()]
            version = (page.get("metadata") or {}).get("resourceVersion")
        return items, version_number(version)

    async def _settle(self, lagging: list[Laggard]) -> list[Laggard]:
        """Give the watches some time to deliver; return what they have not delivered by then."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + GRACE
        while True:
            left = [(kind, meta) for kind, meta in lagging if not self.store.is_current(kind, meta)]
            if len(left) < len(lagging):
                deadline = loop.time() + GRACE
            if not left or loop.time() > deadline:
                return left
            lagging = left
            await asyncio.sleep(POLL)

    async def _read(self, kind: str, meta: Mapping[str, Any]) -> None:
        try:
            obj = await call(self.client, "GET", kind, meta["namespace"], meta["name"])
        except NotFound:
            return
        key = self.store.apply(kind, obj)
        if key is not None:
            self.on_change(key)


def _reduced(kind: str, item: dict[str, Any]) -> Object:
    if kind in UNWATCHED_KINDS:
        return trim_object(kind, item)
    meta = item["metadata"] if kind == KIND else trim_metadata(kind, item["metadata"])
    return {"metadata": {name: meta[name] for name in COMPARED if name in meta}}
