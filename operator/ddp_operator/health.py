"""One small HTTP server for the kubelet and for Prometheus: /healthz, /readyz and /metrics on one port."""

from __future__ import annotations

import socket
from collections.abc import Callable

from aiohttp import web
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ddp_operator.cluster import ClusterError, Conflict
from ddp_operator.kube.errors import StartupError

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which nobody reads


class Metrics:
    """What the operator says about itself. Labels are bounded: verbs, plural names of a few kinds, HTTP statuses."""

    def __init__(self, queue_depth: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.reconcile_seconds = Histogram(
            "ddp_operator_reconcile_seconds",
            "Duration of one reconcile of one resource.",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=self.registry,
        )
        self.reconcile_errors = Counter(
            "ddp_operator_reconcile_errors_total",
            "Reconciles that failed and will be repeated, by cause: Conflict, Cluster (the API server) or Bug.",
            ["cause"],
            registry=self.registry,
        )
        for cause in ("Conflict", "Cluster", "Bug"):
            self.reconcile_errors.labels(cause)
        depth = Gauge("ddp_operator_queue_depth", "Resources that wait for a worker.", registry=self.registry)
        depth.set_function(queue_depth)
        self.leads = Gauge(
            "ddp_operator_leader", "1 where this operator works, 0 where it stands by.", registry=self.registry
        )
        self.api_requests = Counter(
            "ddp_operator_api_requests_total",
            "Calls to the API server, watches not counted.",
            ["verb", "resource", "code"],
            registry=self.registry,
        )

    def on_reconcile(self, seconds: float, error: BaseException | None) -> None:
        """Count one reconcile."""
        self.reconcile_seconds.observe(seconds)
        if error is not None:
            known = {Conflict: "Conflict", ClusterError: "Cluster"}
            cause = next((name for of, name in known.items() if isinstance(error, of)), "Bug")
            self.reconcile_errors.labels(cause).inc()

    def on_call(self, verb: str, resource: str, code: str) -> None:
        """Count one call to the API server."""
        self.api_requests.labels(verb, resource, code).inc()


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


def _answer(trouble: str | None) -> web.Response:
    return web.Response(text="ok\n") if trouble is None else web.Response(status=503, text=f"{trouble}\n")
