"""The pod's one metrics endpoint, and pages in Prometheus' text format: merged, and read."""

import math
import os
import re
import socket
import threading
import time
from contextlib import suppress
from typing import Callable, Iterable, Optional

from .contract import (
    COMMENT_LAST_FAILURE,
    METRIC_GLOBAL_STEP,
    METRIC_STEP_SECONDS,
    METRIC_STEPS,
    PAGES,
    STACK_LIMIT,
)

_PROGRESS_LIMIT = 30
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^\n]*\})?[ \t]+(\S+)([ \t]+-?\d+)?[ \t]*")
_HEADER = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*)(?: (.*))?")
_SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created")
_PAGE_LIMIT = 1 << 20
_POST_LIMIT = 1 << 16
_HEAD_LIMIT = 1 << 14
_MOST_CONNECTIONS = 16
_CONNECTION_SECONDS = 10.0  # of one connection, from its first byte to its last
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d{1,9})", re.IGNORECASE)
PAGE_TIMEOUT = 1.0


def merge_pages(pages: Iterable[str]) -> str:
    """Merge Prometheus pages: one HELP and TYPE a name, the first of equal series, no line that is neither."""
    families: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    seen: set[str] = set()
    for number, page in enumerate(pages):
        for line in page.splitlines():
            header = _HEADER.fullmatch(line)
            if header:
                word, name, text = header[1], header[2], header[3] or ""
                families.setdefault(name, {}).setdefault(word, text)
                continue
            sample = _SAMPLE.fullmatch(line)
            if not sample or not is_number(sample[3]) or (number and sample[1].startswith("ddp_launcher_")):
                continue
            series = sample[1] + (sample[2] or "")
            if series in seen:
                continue
            seen.add(series)
            samples.setdefault(_family_of(sample[1], families), []).append(line)
    lines: list[str] = []
    for name, rows in samples.items():
        about = families.get(name, {})
        lines += [f"# {word} {name} {about[word]}" for word in ("HELP", "TYPE") if word in about]
        lines += rows
    return "\n".join(lines) + "\n"


def _family_of(sample: str, families: dict[str, dict[str, str]]) -> str:
    if sample in families:
        return sample
    for suffix in _SUFFIXES:
        if sample.endswith(suffix) and sample[: -len(suffix)] in families:
            return sample[: -len(suffix)]
    return sample


def is_number(text: str) -> bool:
    """Tell whether a sample's value is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_progress(page: str) -> dict[str, float]:
    """Return the gauges and counters that have no label but ``rank``, and the time spent in steps."""
    kinds = {match[2]: match[3] for match in map(_HEADER.fullmatch, page.splitlines()) if match and match[1] == "TYPE"}
    found: dict[str, float] = {}
    for line in page.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if not sample or not is_number(sample[3]) or not math.isfinite(float(sample[3])):
            continue
        plain = not sample[2] or re.fullmatch(r'\{rank="[^"]*",?\}', sample[2])
        kind = kinds.get(sample[1]) or kinds.get(_family_of(sample[1], {name: {} for name in kinds}))
        shown = kind in ("gauge", "counter") or sample[1] == METRIC_STEP_SECONDS
        known = sample[1].startswith("ddp_") and len(sample[1]) < 64 and shown
        if plain and known and len(found) < _PROGRESS_LIMIT:
            found[sample[1]] = float(sample[3])
    return found


def read_step(page: str) -> Optional[float]:
    """Return how far the run is by a rank's page."""
    values = read_progress(page)
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
    """The endpoint: the pod's own series and the pages of its ranks."""

    def __init__(
        self,
        runtime: str,
        own_page: Callable[[], str],
        receive: Callable[[bytes, bytes, bytes], str] = lambda path, head, body: "404 Not Found",
    ) -> None:
        self._folder = os.path.join(runtime, "metrics")
        self._own_page = own_page
        self._receive = receive  # what a rank posts, by path, head and body; returns the reply's status
        self.comments: Callable[[], str] = lambda: ""  # further lines, which no page of a rank can have
        self.last_failure = b""  # after which the workers were restarted in the same pods, as JSON
        self._last: dict[int, str] = {}
        self._open = OpenConnections(_MOST_CONNECTIONS)
        self._builders = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    def serve(self, port: int, host: str = "") -> int:
        """Listen on ``host``, or on all addresses. Returns the port taken. Raises: OSError."""
        server = _open_server(host, port)
        threading.Thread(target=self._accept, args=(server,), daemon=True, name="metrics").start()
        return int(server.getsockname()[1])

    def _ranks(self) -> list[int]:
        """Return the local ranks that have a page."""
        try:
            names = [name.partition(".") for name in os.listdir(self._folder)]
        except OSError:
            return []
        return sorted({int(rank) for rank, _, kind in names if rank.isdigit() and kind in PAGES})

    @property
    def reads_log(self) -> bool:
        """Whether a rank's progress comes from its log."""
        return any(os.path.exists(os.path.join(self._folder, f"{rank}.log")) for rank in self._ranks())

    def collect(self) -> dict[int, str]:
        """Return the pages of the local ranks in order: live ones, else what a rank left behind."""
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
        """Return the last known values of the lowest rank, once all have ended: then none of them delays this."""
        for rank in self._ranks():
            self._collect(rank, self._last)
            if rank in self._last:
                break
        return read_progress(self._last[min(self._last)]) if self._last else {}

    def step(self, rank: int) -> Optional[float]:
        """Return how far a local rank, which has ended, reports that the run was; else any other of this pod."""
        for one in (rank, *(other for other in self._ranks() if other != rank)):
            self._collect(one, self._last)
            step = read_step(self._last.get(one, ""))
            if step is not None:
                return step
        return None

    def threads(self, rank: int) -> str:
        """Return what the other threads of a local rank do, if it has any and an exporter that answers."""
        try:
            return self._ask(rank, "/threads")[:STACK_LIMIT].rstrip()
        except (OSError, ValueError, OverflowError):
            return ""

    def _ask(self, rank: int, page: str) -> str:
        with open(os.path.join(self._folder, f"{rank}.port"), encoding="ascii") as file:
            return fetch_page(int(file.read(16)), page)

    def _collect(self, rank: int, pages: dict[int, str]) -> None:
        path = os.path.join(self._folder, str(rank))
        with suppress(OSError, ValueError, OverflowError):
            pages[rank] = self._ask(rank, "/metrics")
            return
        for left in PAGES[1:]:
            with suppress(OSError), open(f"{path}.{left}", encoding="utf-8", errors="replace") as file:
                pages[rank] = file.read(_PAGE_LIMIT)
                return

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
                words = request.split(b"\r\n", 1)[0].split()
                status, body = self._respond(connection, words, request, deadline)
                head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                connection.settimeout(_find_time_left(deadline))
                connection.sendall(head.encode() + (b"" if words[:1] == [b"HEAD"] else body))
        finally:
            self._open.remove(connection)

    def _respond(
        self, connection: socket.socket, words: "list[bytes]", request: bytes, deadline: float
    ) -> "tuple[str, bytes]":
        """Return status and body of the reply to a request. Raises: OSError."""
        if len(words) == 3 and words[0] == b"POST":
            head, _, body = request.partition(b"\r\n\r\n")
            body = _read_body(connection, head, body, deadline)
            return self._receive(words[1], head, body), body
        path = words[1].split(b"?")[0] if len(words) == 3 and words[0] in (b"GET", b"HEAD") else b""
        if path == b"/metrics":
            return self._build_page()
        if path == b"/healthz":
            return "200 OK", b"ok\n"
        return "404 Not Found", b"only /metrics and /healthz\n"

    def _build_page(self) -> "tuple[str, bytes]":
        # A connection that was closed meanwhile does not end this, which waits for the ranks.
        if not self._builders.acquire(blocking=False):
            return "503 Service Unavailable", b"too many requests\n"
        try:
            body = merge_pages([self._own_page(), *self.collect().values()]).encode("utf-8", "replace")
        finally:
            self._builders.release()
        if self.last_failure:  # after the merge, which lets no comment of a rank's page through
            body += COMMENT_LAST_FAILURE.encode() + self.last_failure + b"\n"
        return "200 OK", body + self.comments().encode()


class OpenConnections:
    """The connections that are open: a new one beyond ``most`` closes the oldest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._connections: dict[socket.socket, None] = {}  # in their order
        self._lock = threading.Lock()

    def add(self, connection: socket.socket) -> None:
        """Take in a connection."""
        with self._lock:
            if len(self._connections) >= self._most:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread
            self._connections[connection] = None

    def remove(self, connection: socket.socket) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._connections.pop(connection, None)


def _find_time_left(deadline: float) -> float:
    """Return the seconds until a connection's deadline. Raises: TimeoutError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _read_head(connection: socket.socket, deadline: float) -> bytes:
    """Return a request as far as it has come with the end of its head; empty where it ends before. Raises: OSError."""
    request = b""
    while b"\r\n\r\n" not in request and len(request) < _HEAD_LIMIT:
        connection.settimeout(_find_time_left(deadline))
        chunk = connection.recv(4096)
        if not chunk:
            return b""
        request += chunk
    return request


def _read_body(connection: socket.socket, head: bytes, body: bytes, deadline: float) -> bytes:
    """Return the body of a request, of which the beginning has come. Raises: OSError."""
    length = _LENGTH.search(head)
    wanted = min(int(length[1]), _POST_LIMIT) if length else 0
    while len(body) < wanted:
        connection.settimeout(_find_time_left(deadline))
        chunk = connection.recv(4096)
        if not chunk:
            break
        body += chunk
    return body
