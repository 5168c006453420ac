"""The stand-in as a context manager: a thread with a separate event loop, on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from aiohttp import web

from ddp_operator.api.constants import PLURAL
from tests.support import PATIENCE
from tests.support.stoppable import Stoppable

from .controllers import Controllers
from .faults import Faults
from .resources import Kind
from .server import StandInApi
from .storage import Object, Storage, copied
from .watching import encode

ROOT = Path(__file__).resolve().parents[3]
CRD = ROOT / "deploy" / "crds" / f"{PLURAL}.yaml"
T = TypeVar("T")


class StandIn(Stoppable):
    """An API server for tests. Everything public may be used from the test's thread.

    ``faults`` injects failures, ``writes`` lists all writes, ``calls`` all requests. ``tls``: it also listens on
    ``secure_port`` with this certificate.
    """

    def __init__(self, *, crd: bool = True, bookmark_interval: float = 1.0, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.faults = Faults()
        self._storage = Storage()
        self._api = StandInApi(self._storage, self.faults, bookmark_interval=bookmark_interval)
        self.controllers = Controllers(self._storage, self._api.kind)
        for name in ("default", "kube-system"):
            self._storage.create(self._api.kind("Namespace"), {"metadata": {"name": name}, "spec": {}})
        if crd:
            self._install()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="stand-in API server", daemon=True)
        self._ready = threading.Event()
        self._end: asyncio.Event | None = None
        self._failure: BaseException | None = None
        self.port = 0
        self.secure_port = 0

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def calls(self) -> list[tuple[str, str, int]]:
        """Every call so far: verb, plural[/subresource], HTTP status (0: cut)."""
        return [call[:3] for call in self._api.calls]

    def calls_of(self, user: str) -> list[tuple[str, str, int]]:
        """Every call so far of the user of one kubeconfig."""
        return [call[:3] for call in list(self._api.calls) if call.user == user]

    @property
    def writes(self) -> list[tuple[str, str, str, str]]:
        """All writes so far by any client, without renewals of Leases: verb, plural, namespace, name."""
        return [write for write in list(self._storage.writes) if write[1] != "leases"]

    def writes_of(self, *plurals: str) -> list[tuple[str, str]]:
        """Return verb and name of every write to these kinds, without Events."""
        return [(verb, name) for verb, plural, _, name in self.writes if plural in plurals]

    def __enter__(self) -> StandIn:
        self._thread.start()
        if not self._ready.wait(PATIENCE) or self._failure is not None:
            raise RuntimeError("the stand-in did not start") from self._failure
        return self

    def stop(self) -> None:
        """Stop serving. A second call does no harm."""
        if self._thread.is_alive() and self._end is not None:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(PATIENCE)
        failure = self.controllers.failure or self._failure
        if failure is not None:
            raise RuntimeError("the stand-in failed") from failure

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function in the server's loop and return its result."""

        async def inside() -> T:
            return function(*args, **kwargs)

        return asyncio.run_coroutine_threadsafe(inside(), self._loop).result(PATIENCE)

    def get(self, kind: str, name: str, namespace: str = "default") -> Object | None:
        """Return an object as stored, or None."""
        return self.call(self._storage.find, self._api.kind(kind), namespace, name)

    def list(self, kind: str, namespace: str | None = None) -> list[Object]:
        """Return all objects of a kind."""
        return self.call(self._storage.list, self._api.kind(kind), namespace)

    def change(self, kind: str, name: str, edit: Callable[[Object], None], namespace: str = "default") -> Object:
        """Edit an object in place, without the rules of the API."""

        def inside() -> Object:
            of = self._api.kind(kind)
            before = self._storage.get(of, namespace, name)
            after = self._storage.get(of, namespace, name)
            edit(after)
            return self._storage.update(of, before, after)

        return self.call(inside)

    def put_unchecked(self, kind: str, name: str, obj: Object, namespace: str = "default") -> None:
        """Store an object of any shape."""
        self.call(self._storage.put_unchecked, self._api.kind(kind), namespace, name, obj)

    def add(self, kind: str, manifest: Object) -> Object:
        """Store a new object, without the rules of the API."""
        return self.call(self._storage.create, self._api.kind(kind), copied(manifest))

    def insert(self, placeholder: str, text: bytes) -> None:
        """Send JSON instead of a string in all objects: stored, a megabyte of small values would take 45 times that."""
        written = json.dumps(placeholder).encode()

        def write(value: Any) -> bytes:
            return encode(value).replace(written, text)

        self._api.watches.encode = write

    def remove(self, kind: str, name: str, namespace: str = "default") -> None:
        """Delete an object at once, ignoring its finalizers."""

        def inside() -> None:
            of = self._api.kind(kind)
            obj = self._storage.get(of, namespace, name)
            obj["metadata"].pop("finalizers", None)
            self._storage.delete(of, obj)

        self.call(inside)

    def write_log(self, pod: str, *lines: str, namespace: str = "default") -> None:
        """Append lines to a pod's log, each with the kubelet's time."""
        self.call(lambda: self._api.logs.setdefault((namespace, pod), []).extend(lines))

    def serve(self, kind: Kind) -> None:
        """Serve one more kind, as the API server does once a definition is installed."""
        self.call(self._api.kinds.append, kind)

    def install(self) -> None:
        """Serve the custom resource again after its withdrawal."""
        self.call(self._install)

    def _install(self) -> None:
        self._api.install(yaml.safe_load(CRD.read_text()))

    def withdraw(self, name: str) -> None:
        """Stop serving a kind, as once its definition is deleted: its objects are removed, and the watches end."""
        kind = self._api.kind(name)
        for obj in self.list(name):
            self.remove(name, obj["metadata"]["name"], obj["metadata"]["namespace"])
        self.call(self._api.kinds.remove, kind)
        self.remove("CustomResourceDefinition", f"{kind.plural}.{kind.group}", "")
        self.cut_watches()

    def allow(self, rule: Callable[[dict[str, Any]], bool]) -> None:
        """Answer SelfSubjectAccessReviews by this rule on their resourceAttributes."""
        self._api.allow = rule

    def end_pods(self, allowed: bool) -> None:
        """Remove deleted pods on a node, as a live kubelet does, or keep them."""
        self.controllers.ends_pods = allowed
        self.call(self.controllers.round)

    def cut_watches(self) -> None:
        """End all watches."""
        self.call(self._api.watches.cut)

    def freeze_watches(self) -> None:
        """Make all watches silent."""
        self.call(self._api.watches.freeze)

    def thaw_watches(self) -> None:
        """Resume the silent watches."""
        self.call(self._api.watches.thaw)

    def watch_count(self, plural: str | None = None) -> int:
        """Return the number of open watches."""
        return self.call(self._api.watches.count, plural)

    def compact(self) -> None:
        """Make every present version too old to watch from (410)."""
        self.call(self._storage.compact)

    def write_kubeconfig(self, folder: Path, user: str = "me") -> Path:
        """Write a kubeconfig for this server and return its path."""
        path = folder / ("kubeconfig" if user == "me" else f"{user}.kubeconfig")
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "stand-in", "cluster": {"server": self.url}}],
                    "users": [{"name": user, "user": {"token": user}}],
                    "contexts": [{"name": "here", "context": {"cluster": "stand-in", "user": user}}],
                    "current-context": "here",
                }
            )
        )
        return path

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as exc:
            self._failure = exc
            self._ready.set()
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        runner = web.AppRunner(self._api.app(), access_log=None, handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        if self._tls is not None:
            await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._tls).start()
            self.secure_port = runner.addresses[1][1]
        controllers = asyncio.create_task(self.controllers.run())
        self._ready.set()
        await self._end.wait()
        controllers.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await controllers
        await runner.cleanup()
        remaining = asyncio.all_tasks() - {asyncio.current_task()}
        for task in remaining:
            task.cancel()
        await asyncio.gather(*remaining, return_exceptions=True)
