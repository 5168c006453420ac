"""One Prometheus endpoint a rank, for the trainer and, in two lines, for any other training script.

::

    from ddp_trainer.exporter import Exporter

    exporter = Exporter.start(total_steps=1000)
    for batch in batches:
        ...
        exporter.step(samples=len(batch), loss=loss)

Under the launcher (``DDP_RUNTIME_DIR`` is set) the endpoint takes a free port and tells it in a file; the launcher
merges the ranks of its pod. Without one it is ``http://127.0.0.1:<port + local rank>/metrics``. See
docs/pod-contract.md.
"""

import atexit
import bisect
import contextlib
import importlib.util
import itertools
import math
import os
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_trainer import contract
from ddp_trainer.distributed import RankEnv
from ddp_trainer.errors import require, warn
from ddp_trainer.files import write_atomically
from ddp_trainer.observability.metrics_table import BUCKETS, METRICS

if TYPE_CHECKING:
    from ddp_trainer.observability.meters import AsyncScalars


_MOST_CONNECTIONS = 16
_CONNECTION_SECONDS = 10.0
_MAX_PORT = 65535
_MAX_PORT_DIGITS = 5


class Histogram:
    """Counts of observations by bucket. Only one thread observes, so there is no lock to take."""

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = (*edges, math.inf)
        self.counts = [0] * len(self.edges)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count ``value`` in the first bucket whose edge is not below it."""
        self.counts[bisect.bisect_left(self.edges, value)] += 1
        self.sum += value


class Exporter:
    """The series of one rank.

    Values are plain numbers, turned into Prometheus's text only when somebody asks: recording a step costs a few
    microseconds and never waits for a device. It is a collector of prometheus-client, so that it can also be
    registered in a registry of one's own.
    """

    def __init__(self, env: RankEnv) -> None:
        self.env = env
        self.port: int | None = None
        self._server: PageServer | None = None
        self._final_page: Path | None = None
        self._last_step_end = time.perf_counter()
        # Losses on their way from the device, which is at most some steps behind. The page's thread takes them, too.
        self._pending: deque[AsyncScalars] = deque(maxlen=1024)
        self._pending_lock = threading.Lock()
        self._clock: Any = None
        # When forward began, until the step is recorded; only with a model to watch.
        self._forward_began: float | None = None
        self._steps = 0
        self._total_steps: int | None = None
        # A counter begins at 0. A gauge is absent until it is set: what is not known yet is not 0.
        self._values: dict[str, float] = {metric.name: 0.0 for metric in METRICS if metric.kind == "counter"}
        self._histograms = {name: Histogram(edges) for name, edges in BUCKETS.items()}
        self._step_seconds = self._histograms["ddp_step_duration_seconds"]
        self.set(contract.METRIC_WORLD_SIZE, env.world_size)

    def collect(self) -> Iterator[Any]:
        """The series as prometheus-client's families."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
        from prometheus_client.utils import floatToGoString

        rank = [str(self.env.rank)]
        for metric in METRICS:
            if metric.kind == "histogram":
                histogram = self._histograms[metric.name]
                totals = itertools.accumulate(histogram.counts)
                edges = map(floatToGoString, histogram.edges)
                buckets = list(zip(edges, totals, strict=True))
                family: Any = HistogramMetricFamily(metric.name, metric.help, labels=["rank"])
                family.add_metric(rank, buckets, histogram.sum)
            else:
                kind: Any = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = kind(metric.name, metric.help, labels=["rank"])
                if metric.name not in self._values:
                    continue
                family.add_metric(rank, self._values[metric.name])
            yield family

    @classmethod
    def start(
        cls,
        *,
        total_steps: int | None = None,
        epochs: int | None = None,
        port: int | None = None,
        env: RankEnv | None = None,
        runtime_dir: str | None = None,
        model: Any = None,
    ) -> "Exporter":
        """Begin to answer ``GET /metrics`` on 127.0.0.1 from a background thread.

        ``port`` is local rank 0's (default: DDP_METRICS_PORT or 9400; 0: any free one) and each local rank adds its
        number. Under the launcher ``runtime_dir`` (default: DDP_RUNTIME_DIR) decides instead. A port that is taken
        is a warning: training is worth more than its metrics. ``model`` is :meth:`watch`'s. Raises
        :class:`UserError` where DDP_METRICS_PORT is read and is no port.
        """
        exporter = cls(env or RankEnv.from_environ())
        if model is not None:
            exporter.watch(model)
        if epochs is not None:
            exporter.set(contract.METRIC_EPOCHS, epochs)
        exporter.set_total_steps(total_steps)
        runtime_dir = runtime_dir or os.environ.get(contract.ENV_RUNTIME_DIR)
        exporter._serve(read_port() if port is None else port, runtime_dir)
        atexit.register(exporter.close)
        _started.add(exporter)
        return exporter

    def _serve(self, port: int, runtime_dir: str | None) -> None:
        if importlib.util.find_spec("prometheus_client") is None:
            if self.env.rank == 0:
                warn("no metrics: prometheus-client is not installed")
            return
        local_rank = self.env.local_rank
        wanted = 0 if runtime_dir or port == 0 else port + local_rank
        try:
            self._server = PageServer(wanted, self.page)
        except (OSError, OverflowError) as error:
            warn(f"rank {self.env.rank}: no metrics on 127.0.0.1:{wanted} ({error}); choose another --metrics-port")
            return
        self.port = self._server.server_address[1]
        # How often the server looks whether it is to stop: this long, at most, close() takes.
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="ddp-metrics", daemon=True).start()
        if runtime_dir:
            self._final_page = Path(runtime_dir) / contract.RUNTIME_FINAL_PAGE.format(local_rank=local_rank)
            port_file = Path(runtime_dir) / contract.RUNTIME_PORT_FILE.format(local_rank=local_rank)
            try:
                write_atomically(port_file, f"{self.port}\n".encode())
            except OSError as error:
                warn(f"rank {self.env.rank}: {port_file} can't be written: {error}")

    def page(self) -> bytes:
        """The page in Prometheus's text format."""
        self._take_losses()
        from prometheus_client import generate_latest

        return generate_latest(self)

    def set_total_steps(self, total_steps: int | None) -> None:
        """Say when the run will be complete; without it there is no progress ratio."""
        self._total_steps = total_steps
        if total_steps is not None:
            self.set(contract.METRIC_TOTAL_STEPS, total_steps)

    def set(self, name: str, value: float) -> None:
        """Set the gauge ``name``."""
        self._values[name] = value

    def observe(self, name: str, value: float) -> None:
        """Add an observation to the histogram ``name``."""
        self._histograms[name].observe(value)

    def set_loss(self, value: float) -> None:
        """Set the loss; one that is not finite is counted as well."""
        self.set(contract.METRIC_LOSS, value)
        if not math.isfinite(value):
            self.count_nonfinite(1)

    def count_nonfinite(self, steps: int) -> None:
        """Count ``steps`` whose loss was not a finite number."""
        self._values[contract.METRIC_NONFINITE] += steps

    def watch(self, model: Any) -> None:
        """Take a step's compute time from ``model`` (a torch module, wrapped by DDP or not), and its wait for data.

        Without it a foreign script's stragglers can't be told: only :meth:`step`'s caller knows when all-reduce began.
        Wrap the model first: the end of its compute is when DDP has got the last gradient.
        """
        from ddp_trainer.observability.meters import ComputeClock

        parameter = next(model.parameters())
        self._clock = ComputeClock(model, parameter.device)
        model.register_forward_pre_hook(self._forward_begins)

    def _forward_begins(self, model: Any, _: Any) -> None:
        # The first of a step's forward passes begins it; validation is none of its business.
        if model.training and self._forward_began is None:
            self._forward_began = time.perf_counter()
            self._clock.begin()

    def step(
        self,
        *,
        samples: int,
        loss: Any = None,
        step: int | None = None,
        epoch: int | None = None,
        learning_rate: float | None = None,
        seconds: float | None = None,
        data_wait: float | None = None,
        compute: float | None = None,
        tokens: int = 0,
    ) -> None:
        """Record one finished optimiser step of ``samples`` samples, or of ``tokens`` too, on this rank.

        ``loss`` is a number or a tensor; a tensor on a GPU is copied without waiting for it and shows a step later.
        ``step`` counts the whole run (default: calls of this method), ``seconds`` is the step's time (default: since
        the last call), ``epoch`` counts from 1. ``data_wait`` and ``compute`` are known by themselves where
        :meth:`watch` was given the model.
        """
        now = time.perf_counter()
        values = self._values
        if self._forward_began is not None:
            data_wait = self._forward_began - self._last_step_end if data_wait is None else data_wait
            compute = self._clock.seconds() if compute is None else compute
            self._forward_began = None
        self._steps = self._steps + 1 if step is None else step
        values[contract.METRIC_SAMPLES] += samples
        values[contract.METRIC_TOKENS] += tokens
        values[contract.METRIC_STEPS] += 1
        values[contract.METRIC_GLOBAL_STEP] = self._steps
        self._step_seconds.observe(now - self._last_step_end if seconds is None else seconds)
        self._last_step_end = now
        values[contract.METRIC_LAST_STEP] = time.time()
        if self._total_steps:
            values[contract.METRIC_PROGRESS] = self._steps / self._total_steps
        if data_wait is not None:
            values["ddp_data_wait_seconds_total"] += data_wait
        if compute is not None:
            values["ddp_compute_seconds_total"] += compute
        if learning_rate is not None:
            values[contract.METRIC_LEARNING_RATE] = learning_rate
        if epoch is not None:
            values[contract.METRIC_EPOCH] = epoch
        if loss is not None:
            # A tensor usually comes with its graph, which is not to be kept.
            loss = loss.detach() if hasattr(loss, "detach") else loss
            if getattr(loss, "is_cuda", False):
                from ddp_trainer.observability.meters import AsyncScalars

                self._pending.append(AsyncScalars([loss]))
                self._take_losses()
            else:
                self.set_loss(float(loss))

    def heartbeat(self) -> None:
        """Say that this rank is alive where it makes no steps for long, as in a validation: once a batch will do."""
        self._values[contract.METRIC_HEARTBEATS] += 1

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Say that this rank saves a checkpoint meanwhile, for which the watchdog has a budget of its own."""
        self.set(contract.METRIC_SAVING, 1)
        try:
            yield
        finally:
            self.set(contract.METRIC_SAVING, 0)

    def _take_losses(self) -> None:
        with self._pending_lock:
            while self._pending and self._pending[0].ready():
                self.set_loss(*self._pending.popleft().read())

    def close(self) -> None:
        """Stop answering and, under the launcher, leave the last page behind. Twice is once."""
        if self._server is None:
            return
        server, self._server = self._server, None
        atexit.unregister(self.close)
        if self._final_page is not None:
            with contextlib.suppress(OSError):
                write_atomically(self._final_page, self.page())
        server.shutdown()
        server.server_close()

    def _forget_server(self) -> None:
        """In a forked child: leave port, page and exit to the parent, whose server thread the child has not."""
        # The parent's server thread may have held it during the fork.
        self._pending_lock = threading.Lock()
        self._pending.clear()
        self._final_page = None
        atexit.unregister(self.close)
        if self._server is not None:
            self._server.socket.close()
            self._server = None


# Exporters that serve a page. A child of os.fork inherits their sockets and atexit handlers, but no thread.
_started: weakref.WeakSet[Exporter] = weakref.WeakSet()


def _forget_servers() -> None:
    for exporter in list(_started):
        exporter._forget_server()
    _started.clear()


os.register_at_fork(after_in_child=_forget_servers)


def read_port() -> int:
    """The port in DDP_METRICS_PORT, 9400 where it is not set or empty; raises :class:`UserError` for anything else."""
    text = os.environ.get(contract.ENV_METRICS_PORT, "").strip()
    if not text:
        return contract.DEFAULT_METRICS_PORT
    known = text.isdecimal() and text.isascii() and len(text) <= _MAX_PORT_DIGITS and int(text) <= _MAX_PORT
    require(
        known,
        contract.ENV_METRICS_PORT,
        f"{text[:80]!r} is not a port",
        f"set a number from 0 (any free port) to {_MAX_PORT}, or unset it for {contract.DEFAULT_METRICS_PORT}",
    )
    return int(text)


class PageServer(ThreadingHTTPServer):
    """Answers ``GET /metrics`` on 127.0.0.1 with what ``page`` returns; raises OSError where the port is taken.

    ``GET /threads`` tells what all threads but the main one do: that one's stack is written from outside, by a signal,
    which would not be safe for others.
    """

    daemon_threads = True
    # A port in use is to be seen as such, also where another rank listens with SO_REUSEADDR.
    allow_reuse_address = False

    def __init__(self, port: int, page: Callable[[], bytes]) -> None:
        self.page = page
        self._deadlines: dict[Any, float] = {}  # by connection, the oldest first
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection; one beyond the limit closes the oldest."""
        with self._lock:
            self._deadlines[request] = time.monotonic() + _CONNECTION_SECONDS
            surplus = list(self._deadlines)[:-_MOST_CONNECTIONS]
        self._cut(surplus)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close the connections whose time is over."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, deadline in self._deadlines.items() if deadline < now]
        self._cut(late)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that has ended."""
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def _cut(self, requests: Sequence[Any]) -> None:
        for request in requests:
            with self._lock:
                self._deadlines.pop(request, None)
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)  # wakes its thread

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback where the client, or the server above, has closed the connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, PageServer)
        match self.path.split("?")[0]:
            case "/metrics":
                body, kind = self.server.page(), "text/plain; version=0.0.4; charset=utf-8"
            case "/threads":
                body, kind = describe_threads().encode("utf-8", "backslashreplace"), "text/plain; charset=utf-8"
            case _:
                self.send_error(404, "only /metrics and /threads are here")
                return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape is not an event of the training."""


def describe_threads() -> str:
    """Return the Python stacks, as faulthandler writes them, of all threads but the main one and this server's own."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = {threading.main_thread().ident, threading.get_ident()}
    lines: list[str] = []
    for ident, frame in sys._current_frames().items():
        stack = [(one.f_code.co_filename, line, one.f_code.co_name) for one, line in traceback.walk_stack(frame)]
        if ident not in own and not any(name == "serve_forever" for _, _, name in stack):
            lines.append(f"Thread {names.get(ident, ident)} (most recent call first):")
            lines += [f'  File "{path}", line {line} in {name}' for path, line, name in stack]
    return "".join(f"{line}\n" for line in lines)
