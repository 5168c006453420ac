"""Compare the store with the API server's lists.

Watches alone are not sufficient. A list after a 410 does not report deletions; a watch can freeze; at the start the
custom resources may arrive before their Jobs, and a reconcile would create a second Job. A list of metadata for each
kind covers all three cases. It is read at the start, at intervals, and soon after a watch has restarted with a list.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from ddp_operator.api.cluster import Key, Object
from ddp_operator.api.cluster_errors import ClusterError
from ddp_operator.api.constants import KIND, LABEL_JOB_NAME, LABEL_MANAGED_BY, MANAGED_BY
from ddp_operator.api.faults import contain, name_object, parse_each
from ddp_operator.kube.cache import ObjectCache, version_number
from ddp_operator.kube.children import CHILD_KINDS, has_metadata_only, key_of, trim_metadata, trim_object
from ddp_operator.kube.client import ApiClient, ObjectNotFound, call, pages
from ddp_operator.kube.cluster import METADATA_ONLY
from ddp_operator.kube.incoming import check_identity

logger = logging.getLogger(__name__)

CHILD_SELECTOR: Final = f"{LABEL_MANAGED_BY}={MANAGED_BY},{LABEL_JOB_NAME}"
CHUNK: Final = "500"
"""Objects in one page of a list."""
POLL: Final = 0.02
"""Seconds between two comparisons of the store with the lagging objects."""
GRACE: Final = 2.0
"""Seconds without progress of the watches until they count as lagging behind a list."""
NUDGE_DELAY: Final = 2.0
"""Seconds between the restart of a watch and the comparison."""
RETRY: Final = 1.0
"""Seconds until a failed comparison is repeated."""

Laggard = tuple[str, Mapping[str, Any]]
"""A kind, and the metadata of an object that is newer in the list than in the store."""

COMPARED: Final = ("name", "namespace", "uid", "resourceVersion", "labels", "ownerReferences")
"""Compared metadata of watched objects. The metadata of all objects is in memory at once, so managedFields is not."""


@dataclass(eq=False)
class Resync:
    """Keeps a store consistent with the API server. ``on_change`` is called for every resource with a difference.

    ``kinds``: of the watched children.
    """

    client: ApiClient
    store: ObjectCache
    namespaces: Sequence[str]
    interval: float
    on_change: Callable[[Key], None]
    kinds: Sequence[str] = CHILD_KINDS
    synced: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the store has all objects that existed at the start."""
    _nudged: asyncio.Event = field(default_factory=asyncio.Event)

    def nudge(self) -> None:
        """Request a comparison soon: a watch restarted and may have missed deletions."""
        self._nudged.set()

    async def run(self) -> None:
        """Synchronize the store, then compare it at intervals without end."""
        await self._start()
        self.synced.set()
        while True:
            with contextlib.suppress(TimeoutError):
                # Until Python 3.12, wait_for loses a cancellation that arrives together with the event.
                async with asyncio.timeout(self.interval):
                    await self._nudged.wait()
                await asyncio.sleep(NUDGE_DELAY)  # the watch still lists the objects
            self._nudged.clear()
            try:
                await self.resync()
            except ClusterError as exc:
                logger.warning("cannot compare the cache with the API server: %s; retrying", exc)
                await asyncio.sleep(RETRY)
                self._nudged.set()

    async def resync(self) -> None:
        """Compare once: drop deleted objects, store metadata, and read those that a watch did not deliver."""
        lagging = await self._settle(await self._compare())
        if lagging:
            logger.warning("watches lag behind the API server; reading %d objects one by one", len(lagging))
        for kind, meta in lagging:
            await self._read(kind, meta)

    async def _start(self) -> None:
        failures = 0
        while True:
            try:
                lagging = await self._settle(await self._compare())
                if not lagging:
                    return
                # A watch has not started, or an object was deleted between the two lists.
                reason = f"the watches have not delivered {len(lagging)} objects yet"
            except ClusterError as exc:
                reason = str(exc)
                await asyncio.sleep(RETRY)
            failures += 1
            logger.log(logging.WARNING if failures > 2 else logging.DEBUG, "not ready: %s; retrying", reason)

    async def _compare(self) -> list[Laggard]:
        lagging: list[Laggard] = []
        for scope in self.namespaces or (None,):
            for kind in (KIND, *self.kinds):
                lagging += await self._compare_kind(kind, scope)
        return lagging

    async def _compare_kind(self, kind: str, scope: str | None) -> list[Laggard]:
        # An object that was stored before the list, and is not in it, was deleted. Later ones are not compared.
        before = self.store.entries(kind, [scope] if scope else [])
        items, version = await self._list(kind, scope)
        listed = {str(item["metadata"].get("uid")) for item in items}
        for uid, ((_, namespace, name), _) in before.items():
            if uid not in listed:
                key = self.store.mark_deleted(kind, namespace, name, uid, version)
                if key is not None:
                    logger.info("%s %s/%s was deleted; the watch missed it", kind, namespace, name)
                    self.on_change(key)

        if has_metadata_only(kind):
            for item in items:
                self._apply(kind, item)
            return []

        lagging = []
        for item in items:
            meta = item["metadata"]
            with contain(kind, name_object(item)):
                # A stored object that is no longer a child is read too, which drops it.
                is_relevant = key_of(kind, meta) is not None or str(meta.get("uid")) in before
                if is_relevant and not self.store.is_current(kind, meta):
                    lagging.append((kind, meta))
        return lagging

    async def _list(self, kind: str, scope: str | None) -> tuple[list[Object], int | None]:
        """Return the objects of a kind (metadata only) and the resource version of the list."""
        params = {"limit": CHUNK} | ({"labelSelector": CHILD_SELECTOR} if kind != KIND else {})
        items: list[Object] = []
        version: Any = None
        async for page in pages(self.client, kind, scope, params, accept=METADATA_ONLY):
            items += parse_each(kind, page.get("items") or (), partial(_trim_item, kind))
            version = (page.get("metadata") or {}).get("resourceVersion")
        return items, version_number(version)

    async def _settle(self, lagging: list[Laggard]) -> list[Laggard]:
        """Wait for the watches while they make progress. Returns the objects that they have not delivered."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + GRACE
        while True:
            remaining = [(kind, meta) for kind, meta in lagging if not self.store.is_current(kind, meta)]
            if len(remaining) < len(lagging):
                deadline = loop.time() + GRACE
            if not remaining or loop.time() > deadline:
                return remaining
            lagging = remaining
            await asyncio.sleep(POLL)

    async def _read(self, kind: str, meta: Mapping[str, Any]) -> None:
        try:
            obj = await call(self.client, "GET", kind, meta["namespace"], meta["name"])
        except ObjectNotFound:
            return
        self._apply(kind, obj)

    def _apply(self, kind: str, obj: Object) -> None:
        with contain(kind, name_object(obj)):
            key = self.store.apply(kind, obj)
            if key is not None:
                self.on_change(key)


def _trim_item(kind: str, item: dict[str, Any]) -> Object:
    """Return an item of a list with the fields that are stored or compared. Raises: any exception for an odd one."""
    check_identity(item)
    if has_metadata_only(kind):
        return trim_object(kind, item)
    meta = trim_metadata(kind, item["metadata"])
    return {"metadata": {name: meta[name] for name in COMPARED if name in meta}}
