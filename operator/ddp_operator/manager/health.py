"""The operator's HTTP endpoints /healthz, /readyz and /metrics, with a limited number and lifetime of connections."""

import asyncio
import socket
from collections.abc import Callable

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ddp_operator.kube.client import StartupError
from ddp_operator.manager.telemetry import OperatorMetrics

MAX_CONNECTIONS = 64
"""Open connections. A further one closes the oldest, so that probes can always connect."""
CONNECTION_SECONDS = 10.0
"""Lifetime of a connection. Probes and Prometheus reconnect."""
READY_SECONDS = 3.0
"""For which a readiness probe waits for the start of the operator, rather than fail and cause a warning Event."""
_READY_POLL = 0.05
_PAGE_SECONDS = 1.0
"""Minimum interval between two generations of the metrics page."""


class HealthServer:
    """Serves the three endpoints. ``alive`` and ``ready`` return a problem, or None."""

    def __init__(
        self, metrics: OperatorMetrics, *, port: int, alive: Callable[[], str | None], ready: Callable[[], str | None]
    ) -> None:
        self._metrics = metrics
        self._configured_port = port
        self._alive = alive
        self._ready = ready
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._page_lock = asyncio.Lock()
        self._page_until = 0.0
        self._page = b""
        self.port = 0
        """The port in use, once started."""

    async def start(self) -> None:
        """Listen on all addresses. Raises: StartupError."""
        app = web.Application()
        app.router.add_get("/healthz", self._serve_healthz)
        app.router.add_get("/readyz", self._serve_readyz)
        app.router.add_get("/metrics", self._serve_metrics)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        self._runner = runner
        server = runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        connections: dict[asyncio.Transport, None] = {}

        try:
            listener = _listen(self._configured_port)
        except OSError as exc:
            await self.stop()
            raise StartupError(
                f"cannot listen on port {self._configured_port} for health and metrics ({exc.strerror}); "
                "set DDP_OPERATOR_HEALTH_PORT to a free port"
            ) from None

        self._server = await loop.create_server(lambda: BoundedConnection(server, connections, loop), sock=listener)
        self.port = listener.getsockname()[1]

    async def stop(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _serve_healthz(self, _: web.Request) -> web.Response:
        return _build_probe_response(self._alive())

    async def _serve_readyz(self, request: web.Request) -> web.Response:
        for _ in range(round(READY_SECONDS / _READY_POLL)):
            if self._ready() is None:
                break
            await asyncio.sleep(_READY_POLL)
        return _build_probe_response(self._ready())

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        # A thread counts all resources, each of up to a megabyte. Concurrent requests share one page.
        async with self._page_lock:
            now = asyncio.get_running_loop().time()
            if now >= self._page_until:
                self._page = await asyncio.to_thread(generate_latest, self._metrics.registry)
                self._page_until = now + _PAGE_SECONDS
        return web.Response(body=self._page, headers={"Content-Type": CONTENT_TYPE_LATEST})


class BoundedConnection(web.RequestHandler):
    """A connection that ends after its lifetime. ``connections``: the open ones of this server, the oldest first."""

    def __init__(
        self,
        server: web.Server,
        connections: dict[asyncio.Transport, None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(server, loop=loop, access_log=None)  # type: ignore[arg-type]  # None: no log of requests
        self._connections = connections
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection; close the oldest one if there are too many."""
        assert isinstance(transport, asyncio.Transport)
        self._connections[transport] = None
        if len(self._connections) > MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            self._connections.pop(oldest)
            oldest.abort()
        self._deadline = asyncio.get_running_loop().call_later(CONNECTION_SECONDS, transport.abort)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection."""
        if isinstance(self.transport, asyncio.Transport):
            self._connections.pop(self.transport, None)
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)


def _listen(port: int) -> socket.socket:
    """Return one socket for IPv6 and IPv4, so that port 0 selects a single port for both."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _build_probe_response(problem: str | None) -> web.Response:
    return web.Response(text="ok\n") if problem is None else web.Response(status=503, text=f"{problem}\n")
