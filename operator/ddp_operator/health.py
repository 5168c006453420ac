"""One small HTTP server for the kubelet and for Prometheus: /healthz, /readyz and /metrics on one port."""

import socket
from collections.abc import Callable

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ddp_operator.kube.client import StartupError
from ddp_operator.telemetry import Metrics


class HealthServer:
    """Serves the three pages. ``alive`` and ``ready`` return a reason why not, or None when all is well."""

    def __init__(
        self, metrics: Metrics, *, port: int, alive: Callable[[], str | None], ready: Callable[[], str | None]
    ) -> None:
        self._metrics = metrics
        self._wanted = port
        self._alive = alive
        self._ready = ready
        self._runner: web.AppRunner | None = None
        self.port = 0
        """The port in use, once started."""

    async def start(self) -> None:
        """Listen on all addresses. Raises: StartupError."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._page)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.SockSite(self._runner, _listen(self._wanted)).start()
        except OSError as exc:
            await self.stop()
            raise StartupError(
                f"port {self._wanted} for health and metrics is not free ({exc.strerror}): set DDP_OPERATOR_HEALTH_PORT"
            ) from None
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _healthz(self, _: web.Request) -> web.Response:
        return _answer(self._alive())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _answer(self._ready())

    async def _page(self, _: web.Request) -> web.Response:
        body = generate_latest(self._metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _listen(port: int) -> socket.socket:
    """Return a socket for IPv6 and IPv4 alike, so that port 0 means one port and not one for each."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _answer(problem: str | None) -> web.Response:
    return web.Response(text="ok\n") if problem is None else web.Response(status=503, text=f"{problem}\n")
