"""One Prometheus endpoint per rank of any training script, by two lines.

::

    from ddp_sdk import Exporter

    exporter = Exporter.start(total_steps=1000)
    for batch in batches:
        ...
        exporter.step(samples=len(batch), loss=loss)

Under the launcher (``DDP_RUNTIME_DIR`` is set) the endpoint uses a free port and writes it into a file; the launcher
merges the pages of its pod's ranks. Otherwise the page is ``http://127.0.0.1:<port + local rank>/metrics``. See
docs/pod-contract.md. This module needs no torch; a watched model and a loss on a GPU bring it along.
"""

import atexit
import bisect
import contextlib
import itertools
import math
import os
import re
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

from ddp_sdk import contract
from ddp_sdk.errors import require
from ddp_sdk.files import write_atomically
from ddp_sdk.metrics_table import BUCKETS, METRICS
from ddp_sdk.rank_env import RankEnv

if TYPE_CHECKING:
    from ddp_sdk.meters import AsyncScalars


_MAX_CONNECTIONS = 16
_CONNECTION_SECONDS = 10.0
# A web page can resolve its own name to this machine, but no address, not localhost and not this machine's name.
_OWN_HOST = re.compile(
    rf"(?:localhost|{re.escape(socket.gethostname())}|[\d.]+|\[[\da-f:.]+\])(?::\d+)?", re.IGNORECASE
)
_MAX_PORT = 65535
_MAX_PORT_DIGITS = 5


class Histogram:
    """Counts of observations by bucket. Only one thread observes, so it needs no lock."""

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

    Values are plain numbers, formatted only when the page is read: recording a step takes a few microseconds and never
    waits for a device.
    """

    def __init__(self, env: RankEnv) -> None:
        self.env = env
        self.port: int | None = None
        self._server: PageServer | None = None
        self._final_page: Path | None = None
        self._last_step_end = time.perf_counter()
        # Losses that are being copied from the device, a few steps late. The thread of the page reads them too.
        self._pending: deque[AsyncScalars] = deque(maxlen=1024)
        self._pending_lock = threading.Lock()
        self._clock: Any = None
        # Time of the forward pass's start, until the step is recorded; only with a watched model.
        self._forward_started: float | None = None
        self._steps = 0
        self._total_steps: int | None = None
        # A counter starts at 0. A gauge is absent until it is set: an unknown value is not 0.
        self._values: dict[str, float] = {metric.name: 0.0 for metric in METRICS if metric.kind == "counter"}
        self._histograms = {name: Histogram(edges) for name, edges in BUCKETS.items()}
        self._step_seconds = self._histograms["ddp_step_duration_seconds"]
        self.set(contract.METRIC_WORLD_SIZE, env.world_size)

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
        """Serve ``GET /metrics`` on 127.0.0.1 from a background thread.

        ``port`` is local rank 0's (default: DDP_METRICS_PORT or 9400; 0: any free one), to which each local rank adds
        its number. Under the launcher, which sets ``runtime_dir`` (default: DDP_RUNTIME_DIR), any free port is used. If
        the port is in use, the training continues without metrics, with a warning. ``model`` is passed to
        :meth:`watch`. Raises :class:`UserError` if DDP_METRICS_PORT is read and is not a port.
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
        local_rank = self.env.local_rank
        own_port = 0 if runtime_dir or port == 0 else port + local_rank
        try:
            self._server = PageServer(own_port, self.page)
        except (OSError, OverflowError) as error:
            self._warn(f"no metrics on 127.0.0.1:{own_port} ({error}); set another {contract.ENV_METRICS_PORT}")
            return
        self.port = self._server.server_address[1]
        # The server checks for its end every 0.1 s, so close() takes at most 0.1 s.
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="ddp-metrics", daemon=True).start()
        if runtime_dir:
            self._final_page = Path(runtime_dir) / contract.RUNTIME_FINAL_PAGE.format(local_rank=local_rank)
            port_file = Path(runtime_dir) / contract.RUNTIME_PORT_FILE.format(local_rank=local_rank)
            try:
                write_atomically(port_file, f"{self.port}\n".encode())
            except OSError as error:
                self._warn(f"{port_file} can't be written: {error}")

    def _warn(self, message: str) -> None:
        print(f"Exporter: warning: rank {self.env.rank}: {message}", file=sys.stderr, flush=True)

    def page(self) -> bytes:
        """Return the page in Prometheus's text format."""
        self._read_losses()
        lines: list[str] = []
        for metric in METRICS:
            if metric.kind == "histogram":
                samples = self._render_histogram(metric.name)
            elif metric.name in self._values:
                samples = [f'{metric.name}{{rank="{self.env.rank}"}} {_format(self._values[metric.name])}']
            else:
                continue
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}", *samples]
        return "".join(f"{line}\n" for line in lines).encode()

    def _render_histogram(self, name: str) -> list[str]:
        histogram = self._histograms[name]
        rank = self.env.rank
        totals = list(itertools.accumulate(histogram.counts))
        lines = [
            f'{name}_bucket{{le="{_format(edge)}",rank="{rank}"}} {_format(total)}'
            for edge, total in zip(histogram.edges, totals)  # noqa: B905
        ]
        lines.append(f'{name}_count{{rank="{rank}"}} {_format(totals[-1])}')
        lines.append(f'{name}_sum{{rank="{rank}"}} {_format(histogram.sum)}')
        return lines

    def set_total_steps(self, total_steps: int | None) -> None:
        """Set the steps of the complete run; without them the page has no progress ratio."""
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
        """Set the loss, and count it if it is not finite."""
        self.set(contract.METRIC_LOSS, value)
        if not math.isfinite(value):
            self.count_nonfinite(1)

    def count_nonfinite(self, steps: int) -> None:
        """Count ``steps`` whose loss was not a finite number."""
        self._values[contract.METRIC_NONFINITE] += steps

    def watch(self, model: Any) -> None:
        """Measure each step's compute time and wait for data by hooks of ``model``, a torch module with or without DDP.

        Without this call, and without ``compute`` in :meth:`step`, the stragglers of a script cannot be detected. Wrap
        the model in DDP first: the compute time ends when DDP receives the last gradient.
        """
        from ddp_sdk.meters import ComputeClock

        parameter = next(model.parameters())
        self._clock = ComputeClock(model, parameter.device)
        model.register_forward_pre_hook(self._start_clock)

    def _start_clock(self, model: Any, _: Any) -> None:
        # Only at the first forward pass of a step, and not in a validation.
        if model.training and self._forward_started is None:
            self._forward_started = time.perf_counter()
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
        """Record a finished optimizer step of this rank with ``samples`` samples and ``tokens`` tokens.

        ``loss`` is a number or a tensor; a tensor on a GPU is copied without waiting, and appears a step later.
        ``step`` counts the whole run (default: calls of this method), ``seconds`` is the step's time (default: since
        the last call), ``epoch`` counts from 1. After :meth:`watch`, ``data_wait`` and ``compute`` are measured.
        """
        now = time.perf_counter()
        values = self._values
        if self._forward_started is not None:
            data_wait = self._forward_started - self._last_step_end if data_wait is None else data_wait
            compute = self._clock.seconds() if compute is None else compute
            self._forward_started = None
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
            self._record_loss(loss)

    def _record_loss(self, loss: Any) -> None:
        if hasattr(loss, "detach"):
            loss = loss.detach()  # so that the tensor does not keep its graph alive
        if getattr(loss, "is_cuda", False):
            from ddp_sdk.meters import AsyncScalars

            self._pending.append(AsyncScalars([loss]))
            self._read_losses()
        else:
            self.set_loss(float(loss))

    def heartbeat(self) -> None:
        """Report progress while this rank takes no steps, as in a validation; call it for example once per batch."""
        self._values[contract.METRIC_HEARTBEATS] += 1

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Report that this rank saves a checkpoint within the context; the watchdog has a separate limit for it."""
        self.set(contract.METRIC_SAVING, 1)
        try:
            yield
        finally:
            self.set(contract.METRIC_SAVING, 0)

    def _read_losses(self) -> None:
        # The training and the threads of pages read the queue: without the lock one could take a loss that the other
        # has just found ready.
        with self._pending_lock:
            while self._pending and self._pending[0].ready():
                self.set_loss(*self._pending.popleft().read())

    def close(self) -> None:
        """Stop the server and, under the launcher, write the last page to a file; a second call does nothing."""
        if self._server is None:
            return
        # The last page is written before the port closes, so that the launcher finds one of them at any time.
        server = self._server
        self._server = None
        atexit.unregister(self.close)
        if self._final_page is not None:
            with contextlib.suppress(OSError):
                write_atomically(self._final_page, self.page())
        server.shutdown()
        server.server_close()

    def _forget_server(self) -> None:
        """Release the server in a forked child, which has no server thread: port and page belong to the parent."""
        # A new lock: the parent's server thread may have held the old one during the fork.
        self._pending_lock = threading.Lock()
        self._pending.clear()
        self._final_page = None
        atexit.unregister(self.close)
        if self._server is not None:
            self._server.socket.close()
            self._server = None


# Exporters with a server. A forked child inherits their sockets and atexit handlers, but no thread.
_started: weakref.WeakSet[Exporter] = weakref.WeakSet()


def _forget_servers() -> None:
    for exporter in list(_started):
        exporter._forget_server()
    _started.clear()


os.register_at_fork(after_in_child=_forget_servers)


def read_port() -> int:
    """Return the port in DDP_METRICS_PORT, 9400 if it is unset or empty; raises :class:`UserError` for other text."""
    text = os.environ.get(contract.ENV_METRICS_PORT, "").strip()
    if not text:
        return contract.DEFAULT_METRICS_PORT
    is_port = text.isdecimal() and text.isascii() and len(text) <= _MAX_PORT_DIGITS and int(text) <= _MAX_PORT
    require(
        is_port,
        contract.ENV_METRICS_PORT,
        f"{text[:80]!r} is not a port",
        f"set a number from 0 (any free port) to {_MAX_PORT}, or unset it for {contract.DEFAULT_METRICS_PORT}",
    )
    return int(text)


class PageServer(ThreadingHTTPServer):
    """Serves the text of ``page`` as ``GET /metrics`` on 127.0.0.1; raises OSError if the port is in use.

    ``GET /threads`` returns the stacks of all threads but the main one. The launcher requests the main thread's stack
    by a signal, which would not be safe for other threads.
    """

    daemon_threads = True
    # Fail for a port in use even if another rank listens with SO_REUSEADDR.
    allow_reuse_address = False

    def __init__(self, port: int, page: Callable[[], bytes]) -> None:
        self.page = page
        # Connection -> its deadline, the oldest first.
        self._deadlines: dict[Any, float] = {}
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection; beyond the limit, close the oldest connection."""
        # Closed outside of the lock: the connection's own thread takes it in shutdown_request.
        with self._lock:
            self._deadlines[request] = time.monotonic() + _CONNECTION_SECONDS
            surplus = list(self._deadlines)[:-_MAX_CONNECTIONS]
        self._close(surplus)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close the connections whose deadline has passed."""
        now = time.monotonic()
        with self._lock:
            expired = [request for request, deadline in self._deadlines.items() if deadline < now]
        self._close(expired)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that has ended."""
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def _close(self, requests: Sequence[Any]) -> None:
        for request in requests:
            with self._lock:
                self._deadlines.pop(request, None)
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)  # wakes its thread

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback if the client, or :meth:`_close`, has closed the connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, PageServer)
        path = self.path.split("?")[0]
        if not _OWN_HOST.fullmatch(self.headers.get("Host") or "localhost"):
            self.send_error(403, "use localhost, this machine's name or an address")
            return
        if path == "/metrics":
            body = self.server.page()
            content_type = "text/plain; version=0.0.4; charset=utf-8"
        elif path == "/threads":
            body = describe_threads().encode("utf-8", "backslashreplace")
            content_type = "text/plain; charset=utf-8"
        else:
            self.send_error(404, "use /metrics or /threads")
            return
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape is not an event of the training."""


def _format(value: float) -> str:
    """Return a number as in Prometheus's text format."""
    number = float(value)
    if math.isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    return "NaN" if math.isnan(number) else repr(number)


def describe_threads() -> str:
    """Return the Python stacks, in faulthandler's format, of all threads but the main one and those of this server."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    excluded = {threading.main_thread().ident, threading.get_ident()}
    lines: list[str] = []
    for ident, thread_frame in sys._current_frames().items():
        stack = [
            (frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_stack(thread_frame)
        ]
        if ident not in excluded and not any(name == "serve_forever" for _, _, name in stack):
            lines.append(f"Thread {names.get(ident, ident)} (most recent call first):")
            lines += [f'  File "{path}", line {line} in {name}' for path, line, name in stack]
    return "".join(f"{line}\n" for line in lines)
