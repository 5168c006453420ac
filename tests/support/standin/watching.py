"""The watch: a stream of JSON lines from a version on, with bookmarks, filters, and ways to break it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from .errors import ApiFailure
from .resources import Kind
from .selectors import labels_of, parse
from .storage import Mailbox, Storage, StoredChange


class Watches:
    """All open watches of the server, so that a test can cut or freeze them."""

    def __init__(self, storage: Storage, bookmark_interval: float) -> None:
        self._storage = storage
        self.encode: Callable[[Any], bytes] = encode
        """Writes an event as JSON."""
        self._interval = bookmark_interval
        self._open: dict[asyncio.Task[Any], str] = {}
        self._thaw = asyncio.Event()
        self._thaw.set()

    def count(self, plural: str | None = None) -> int:
        """Return how many watches are open (of one kind)."""
        return sum(plural in (None, name) for name in self._open.values())

    def cut(self) -> None:
        """End every open watch abruptly."""
        for task in list(self._open):
            task.cancel()

    def freeze(self) -> None:
        """Keep all watches open and silent, as behind an interrupted network path."""
        self._thaw.clear()

    def thaw(self) -> None:
        """Resume the silent watches."""
        self._thaw.set()

    async def serve(self, request: web.Request, kind: Kind, namespace: str | None) -> web.StreamResponse:
        """Serve one watch request until it times out or is cut."""
        query = request.query
        mailbox = Mailbox(self._storage)
        task = asyncio.current_task()
        assert task is not None
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        try:
            first = self._first(kind, namespace, query, mailbox)
            self._open[task] = kind.plural
            await response.prepare(request)
            for event in first:
                await response.write(self.encode(event) + b"\n")
            async with asyncio.timeout(float(query.get("timeoutSeconds") or 3600)):
                await self._follow(response, kind, namespace, query, mailbox)
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if request.transport is not None:
                request.transport.abort()
            raise
        except ConnectionError:
            pass
        finally:
            mailbox.close()
            self._open.pop(task, None)
        return response

    def _first(
        self, kind: Kind, namespace: str | None, query: Mapping[str, str], mailbox: Mailbox
    ) -> list[dict[str, Any]]:
        """Return the events before the stream: the state, or the changes since a version."""
        since = query.get("resourceVersion", "")
        matches = parse(query.get("labelSelector", ""))
        if query.get("sendInitialEvents") == "true" or since in ("", "0"):
            events = [
                {"type": "ADDED", "object": obj}
                for obj in self._storage.list(kind, namespace)
                if matches(labels_of(obj))
            ]
            if query.get("sendInitialEvents") == "true":
                events.append(_bookmark(kind, self._storage.version, {"k8s.io/initial-events-end": "true"}))
            return events
        if int(since) < self._storage.compacted:
            return [{"type": "ERROR", "object": ApiFailure(410, f"too old resource version: {since}").body()}]
        for change in self._storage.history:
            if change.version > int(since):
                mailbox.queue.put_nowait(change)
        return []

    async def _follow(
        self,
        response: web.StreamResponse,
        kind: Kind,
        namespace: str | None,
        query: Mapping[str, str],
        mailbox: Mailbox,
    ) -> None:
        matches = parse(query.get("labelSelector", ""))
        while True:
            try:
                # Not wait_for: until Python 3.12 it loses a cancellation that comes together with the result.
                async with asyncio.timeout(self._interval):
                    change = await mailbox.queue.get()
            except TimeoutError:
                event = _bookmark(kind, self._storage.version) if query.get("allowWatchBookmarks") == "true" else None
            else:
                event = event_of(change, kind, namespace, matches)
            await self._thaw.wait()
            if event is not None:
                await response.write(self.encode(event) + b"\n")


def event_of(
    change: StoredChange, kind: Kind, namespace: str | None, matches: Callable[[Mapping[str, str]], bool]
) -> dict[str, Any] | None:
    """Return the event of a filtered watch for a change: leaving the filter is a deletion."""
    if change.kind != kind or namespace not in (None, change.namespace):
        return None
    was = change.before is not None and matches(labels_of(change.before))
    now = change.after is not None and matches(labels_of(change.after))
    if now:
        return {"type": "MODIFIED" if was else "ADDED", "object": change.after}
    if was:
        assert change.before is not None
        meta = change.before["metadata"] | {"resourceVersion": str(change.version)}
        return {"type": "DELETED", "object": change.before | {"metadata": meta}}
    return None


def _bookmark(kind: Kind, version: int, annotations: dict[str, str] | None = None) -> dict[str, Any]:
    meta: dict[str, Any] = {"resourceVersion": str(version)}
    if annotations:
        meta["annotations"] = annotations
    return {"type": "BOOKMARK", "object": {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": meta}}


def encode(value: Any) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value).encode()
