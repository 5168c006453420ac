"""The pod's metrics endpoint, and pages in Prometheus' text format: merge and read them."""

import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from ..base.files import read_json
from ..contract.names import (
    COMMENT_LAST_FAILURE,
    COMMENT_STEP_HINT,
    METRIC_GLOBAL_STEP,
    METRIC_LOSS,
    METRIC_STEP_SECONDS,
    METRIC_STEPS,
    PAGES,
    STACK_LIMIT,
    STEP_HINT_FILE,
)
from ..rank.counters import CounterMemory, RankCounters
from .counted_pages import ALIGNED, drop_lost_loss, format_page, merge_counters

_PROGRESS_LIMIT = 30
_NAME_LIMIT = 64
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^\n]*\})?[ \t]+(\S+)([ \t]+-?\d+)?[ \t]*")
_HEADER = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*)(?: (.*))?")
_SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created")
_PAGE_LIMIT = 1 << 20
_POST_LIMIT = 1 << 16
_HEAD_LIMIT = 1 << 14
_MOST_CONNECTIONS = 16
_CONNECTION_SECONDS = 10.0  # from the first byte of a connection to its last
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d{1,9})", re.IGNORECASE)
PAGE_TIMEOUT = 1.0
_NOT_FOUND = b"only /metrics and /healthz\n"
_HOST = re.compile(rb"\r\nhost:[ \t]*([^\r\n]*)", re.IGNORECASE)
# A web page can resolve its own name to this machine, but no address, not localhost and not this machine's name.
_OWN_HOST = re.compile(
    rf"(?:localhost|{re.escape(socket.gethostname())}|[\d.]+|\[[\da-f:.]+\])(?::\d+)?", re.IGNORECASE
)


def merge_pages(pages: Iterable[str]) -> str:
    """Merge Prometheus pages: one HELP and TYPE per name, the first of equal series, no other lines.

    Only the first page, the launcher's own, may have series of the launcher.
    """
    families: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    seen: set[str] = set()
    for number, page in enumerate(pages):
        for line in page.splitlines():
            header = _HEADER.fullmatch(line)
            if header:
                families.setdefault(header[2], {}).setdefault(header[1], header[3] or "")
                continue
            sample = _SAMPLE.fullmatch(line)
            if not sample or not is_number(sample[3]) or (number and sample[1].startswith("ddp_launcher_")):
                continue
            series = sample[1] + (sample[2] or "")
            if series not in seen:
                seen.add(series)
                samples.setdefault(_family_of(sample[1], families), []).append(line)
    lines: list[str] = []
    for name, rows in samples.items():
        headers = families.get(name, {})
        lines += [f"# {keyword} {name} {headers[keyword]}" for keyword in ("HELP", "TYPE") if keyword in headers]
        lines += rows
    return "\n".join(lines) + "\n"


def _family_of(sample: str, families: Mapping[str, object]) -> str:
    """Return the metric that a sample belongs to, such as the histogram of a ``_bucket``."""
    if sample in families:
        return sample
    for suffix in _SUFFIXES:
        if sample.endswith(suffix) and sample[: -len(suffix)] in families:
            return sample[: -len(suffix)]
    return sample


def is_number(text: str) -> bool:
    """Return whether a sample's value is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_progress(page: str) -> dict[str, float]:
    """Return the gauges and counters that have no label but ``rank``, and the time spent in steps.

    All values but the loss are finite.
    """
    headers = [match for match in map(_HEADER.fullmatch, page.splitlines()) if match]
    kinds = {header[2]: header[3] for header in headers if header[1] == "TYPE"}
    values: dict[str, float] = {}
    for line in page.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if not sample or not is_number(sample[3]):
            continue
        name = sample[1]
        if name != METRIC_LOSS and not math.isfinite(float(sample[3])):
            continue
        has_only_rank = not sample[2] or re.fullmatch(r'\{rank="[^"]*",?\}', sample[2])
        kind = kinds.get(name) or kinds.get(_family_of(name, kinds))
        is_value = kind in ("gauge", "counter") or name == METRIC_STEP_SECONDS
        is_ours = name.startswith("ddp_") and len(name) < _NAME_LIMIT
        if has_only_rank and is_value and is_ours and len(values) < _PROGRESS_LIMIT:
            values[name] = float(sample[3])
    return values


def read_step(page: str) -> float | None:
    """Return the run's step from a rank's page; without one, the number of steps that the rank itself reports.

    The steps that the launcher counts are none of the run: the process may have resumed from a checkpoint.
    """
    values = read_progress(page)
    if page.startswith(ALIGNED):
        return values.get(METRIC_GLOBAL_STEP)
    return values.get(METRIC_GLOBAL_STEP, values.get(METRIC_STEPS))


def fetch_page(port: int, path: str = "/metrics", timeout: float = PAGE_TIMEOUT) -> str:
    """Return a page of this machine, at most 1 MiB within ``timeout`` seconds. Raises: OSError or ValueError."""
    deadline = time.monotonic() + timeout
    with socket.socket() as connection:
        connection.settimeout(timeout)
        connection.connect(("127.0.0.1", port))
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        chunks: list[bytes] = []
        size = 0
        while size <= _PAGE_LIMIT:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            chunk = connection.recv(65536)
            if not chunk:
                break
            size += len(chunk)
            chunks.append(chunk)
    head, _, body = b"".join(chunks).partition(b"\r\n\r\n")
    if size > _PAGE_LIMIT or b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise ValueError("no usable page")
    return body.decode("utf-8", "replace")


def _open_server(host: str, port: int) -> socket.socket:
    if host:
        return socket.create_server((host, port))
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        return socket.create_server(("", port))


class MetricsEndpoint:
    """Serves the pod's own series and the pages of its ranks.

    ``receive``: handles a POST with its path, head and body, and returns the status line of the response. ``counters``:
    of the ranks' optimizer steps, if the launcher keeps them.
    """

    def __init__(
        self,
        runtime: str,
        own_page: Callable[[], str],
        receive: Callable[[bytes, bytes, bytes], str] = lambda path, head, body: "404 Not Found",
        counters: CounterMemory | None = None,
    ) -> None:
        self._folder = os.path.join(runtime, "metrics")
        self._hint_path = os.path.join(runtime, STEP_HINT_FILE)
        self._own_page = own_page
        self._receive = receive
        self._counters = counters
        self.comments: Callable[[], str] = lambda: ""  # further lines; the merge removes those of a rank's page
        self.last_failure = b""  # JSON: the failure that caused the last restart in the same pods
        self._last: dict[int, str] = {}
        self._is_on_loopback = False
        self._open = OpenConnections(_MOST_CONNECTIONS)
        self._builders = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    def serve(self, port: int, host: str = "") -> int:
        """Listen on ``host``, which is the loopback; if empty, on all addresses. Returns the port. Raises: OSError."""
        server = _open_server(host, port)
        self._is_on_loopback = bool(host)
        threading.Thread(target=self._accept, args=(server,), daemon=True, name="metrics").start()
        return int(server.getsockname()[1])

    def _ranks(self) -> list[int]:
        """Return the local ranks that have a page or have counted steps."""
        ranks = {rank for rank, counters in self._read_counters().items() if counters.shows_steps}
        with suppress(OSError):
            names = [name.partition(".") for name in os.listdir(self._folder)]
            ranks |= {int(rank) for rank, _, kind in names if rank.isdigit() and kind in PAGES}
        return sorted(ranks)

    def _read_counters(self) -> dict[int, RankCounters]:
        return {} if self._counters is None else self._counters.read_all()

    @property
    def reads_log(self) -> bool:
        """Whether the progress of a rank is read from its log."""
        return any(os.path.exists(os.path.join(self._folder, f"{rank}.log")) for rank in self._ranks())

    def collect(self) -> dict[int, str]:
        """Return the pages of the local ranks in order: from the exporter, or else from a file."""
        pages: dict[int, str] = {}
        threads = [threading.Thread(target=self._collect, args=(rank, pages), daemon=True) for rank in self._ranks()]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 2 * PAGE_TIMEOUT
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        done = dict(pages)
        self._last.update(done)
        return {rank: done[rank] for rank in sorted(done)}

    def progress(self) -> dict[str, float]:
        """Return the last known values of the lowest rank. Waits for exporters: call it after the ranks have ended."""
        for rank in self._ranks():
            values = self.rank_progress(rank)
            if rank in self._last:
                return values
        return drop_lost_loss(read_progress(self._last[min(self._last)])) if self._last else {}

    def rank_progress(self, rank: int) -> dict[str, float]:
        """Return the last known values of an ended local rank."""
        self._collect(rank, self._last)
        return drop_lost_loss(read_progress(self._last.get(rank, "")))

    def step(self, rank: int) -> float | None:
        """Return the run's step that an ended local rank has reported, otherwise that of another rank of this pod."""
        peers = [peer for peer in self._ranks() if peer != rank]
        for candidate in (rank, *peers):
            self._collect(candidate, self._last)
            step = read_step(self._last.get(candidate, ""))
            if step is not None:
                return step
        return None

    def threads(self, rank: int) -> str:
        """Return the stacks of a local rank's other threads; empty if its exporter does not respond."""
        try:
            return self._fetch(rank, "/threads")[:STACK_LIMIT].rstrip()
        except (OSError, ValueError, OverflowError):
            return ""

    def _fetch(self, rank: int, path: str) -> str:
        """Return a page of a rank's exporter. Raises: OSError, ValueError, OverflowError."""
        with open(os.path.join(self._folder, f"{rank}.port"), encoding="ascii") as file:
            return fetch_page(int(file.read(16)), path)

    def _collect(self, rank: int, pages: dict[int, str]) -> None:
        """Add a rank's page from its exporter, or else from the best of its files."""
        with suppress(OSError, ValueError, OverflowError):  # the rank has no exporter, or it does not respond
            pages[rank] = self._fetch(rank, "/metrics")
            return
        page = self._read_file(rank, PAGES[1])
        if page is None:
            page = self._complete_page(rank, self._read_file(rank, *PAGES[2:]))
        if page is not None:
            pages[rank] = page

    def _read_file(self, rank: int, *kinds: str) -> str | None:
        """Return the first of a rank's files; None without one."""
        for kind in kinds:
            path = os.path.join(self._folder, f"{rank}.{kind}")
            with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
                return file.read(_PAGE_LIMIT)
        return None

    def _complete_page(self, rank: int, page: str | None) -> str | None:
        """Return the values from a rank's log or posts, with its counters."""
        counters = self.read_counters(rank)
        if counters is None or not counters.shows_steps:
            return page
        values = read_progress(page or "")
        is_aligned = (page or "").startswith(ALIGNED)
        merged = format_page(merge_counters(values, counters, is_aligned=is_aligned), counters.rank)
        is_of_script = bool(values) and not is_aligned
        return merged if is_of_script else f"{ALIGNED}\n{merged}"

    def read_counters(self, rank: int) -> RankCounters | None:
        """Return the counters of a local rank's last process; None without any."""
        return None if self._counters is None else self._counters.read(rank)

    def count_steps(self, rank: int) -> int | None:
        """Return the steps of a local rank's last process; None if they are not counted."""
        counters = self.read_counters(rank)
        return counters.steps if counters is not None and counters.is_counted else None

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                time.sleep(0.1)  # no descriptor free
                continue
            self._open.add(connection)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + _CONNECTION_SECONDS
        try:
            with connection, suppress(OSError):
                request = _read_head(connection, deadline)
                if not request:
                    return
                request_line = request.split(b"\r\n", 1)[0].split()
                status, body = self._respond(connection, request_line, request, deadline)
                head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                connection.settimeout(_find_timeout(deadline))
                connection.sendall(head.encode() + (b"" if request_line[:1] == [b"HEAD"] else body))
        finally:
            self._open.remove(connection)

    def _respond(
        self, connection: socket.socket, request_line: list[bytes], request: bytes, deadline: float
    ) -> tuple[str, bytes]:
        """Return status and body of the response to a request. Raises: OSError."""
        if len(request_line) != 3:
            return "404 Not Found", _NOT_FOUND
        host = _HOST.search(request)
        if self._is_on_loopback and host and not _OWN_HOST.fullmatch(host[1].decode("latin-1").rstrip()):
            return "403 Forbidden", b"only for requests to localhost, this machine's name or an address\n"
        method, target, _ = request_line
        if method == b"POST":
            head, _, start = request.partition(b"\r\n\r\n")
            body = _read_body(connection, head, start, deadline)
            return self._receive(target, head, body), body
        path = target.split(b"?")[0] if method in (b"GET", b"HEAD") else b""
        if path == b"/metrics":
            return self._build_page()
        if path == b"/healthz":
            return "200 OK", b"ok\n"
        return "404 Not Found", _NOT_FOUND

    def _build_page(self) -> tuple[str, bytes]:
        # Building waits for the ranks, also after the connection was closed: limit how many do so.
        if not self._builders.acquire(blocking=False):
            return "503 Service Unavailable", b"too many requests\n"
        try:
            body = merge_pages([self._own_page(), *self.collect().values()]).encode("utf-8", "replace")
        finally:
            self._builders.release()
        if self.last_failure:  # added after the merge, which removes comments of a rank's page
            body += COMMENT_LAST_FAILURE.encode() + self.last_failure + b"\n"
        return "200 OK", body + self._build_hint().encode() + self.comments().encode()

    def _build_hint(self) -> str:
        """Return the line with the hint of the log reader; empty without one, or if a rank shows progress."""
        hint = read_json(self._hint_path).get("hint")
        return f"{COMMENT_STEP_HINT}{json.dumps(hint)}\n" if isinstance(hint, str) and not self._ranks() else ""


class OpenConnections:
    """The open connections, at most ``most``: a further one closes the oldest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._connections: dict[socket.socket, None] = {}  # in the order of their start
        self._lock = threading.Lock()

    def add(self, connection: socket.socket) -> None:
        """Add a connection."""
        with self._lock:
            if len(self._connections) >= self._most:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                with suppress(OSError):  # the client has closed it
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread
            self._connections[connection] = None

    def remove(self, connection: socket.socket) -> None:
        """Remove a connection that has ended."""
        with self._lock:
            self._connections.pop(connection, None)


def _find_timeout(deadline: float) -> float:
    """Return the seconds until a connection's deadline. Raises: TimeoutError."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining


def _read_head(connection: socket.socket, deadline: float) -> bytes:
    """Read a request until its head is complete; empty if the connection ends before. Raises: OSError."""
    request = b""
    while b"\r\n\r\n" not in request and len(request) < _HEAD_LIMIT:
        connection.settimeout(_find_timeout(deadline))
        chunk = connection.recv(4096)
        if not chunk:
            return b""
        request += chunk
    return request


def _read_body(connection: socket.socket, head: bytes, body: bytes, deadline: float) -> bytes:
    """Read the rest of a request's body, which starts with ``body``. Raises: OSError."""
    length = _LENGTH.search(head)
    size = min(int(length[1]), _POST_LIMIT) if length else 0
    while len(body) < size:
        connection.settimeout(_find_timeout(deadline))
        chunk = connection.recv(4096)
        if not chunk:
            break
        body += chunk
    return body
