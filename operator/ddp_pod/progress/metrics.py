"""The pod's endpoint: its report, and its page for Prometheus."""

import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..base.files import log, try_write_json
from ..contract.progress import RankProgress
from ..contract.records import encode_json
from ..contract.report import PodReport
from .prometheus import format_page
from .rank_progress import RankReader

BuildReport = Callable[[Sequence[RankProgress]], PodReport]
"""Returns the report of a pod with the progress of its ranks."""
ReadPage = Callable[[str, str], "bytes | None"]
"""Returns another page, by its path and query; None: there is none."""
_HEAD_LIMIT = 1 << 14
_MOST_CONNECTIONS = 16
_CONNECTION_SECONDS = 10.0  # from the first byte of a connection to its last
_NOT_FOUND = b"only /report, /metrics, /healthz and what docs/pod-contract.md lists\n"
_HOST = re.compile(rb"\r\nhost:[ \t]*([^\r\n]*)", re.IGNORECASE)
# A web page can resolve its own name to this machine, but no address, not localhost and not this machine's name.
_OWN_HOST = re.compile(
    rf"(?:localhost|{re.escape(socket.gethostname())}|[\d.]+|\[[\da-f:.]+\])(?::\d+)?", re.IGNORECASE
)


def _open_server(host: str, port: int) -> socket.socket:
    if host:
        return socket.create_server((host, port))
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        return socket.create_server(("", port))


class MetricsEndpoint:
    """Serves the pod's report, and the same for Prometheus."""

    def __init__(self, ranks: RankReader, build_report: BuildReport, read_page: ReadPage | None = None) -> None:
        self._ranks = ranks
        self._build_report = build_report
        self._read_page = read_page
        self._is_on_loopback = False
        self._open = OpenConnections(_MOST_CONNECTIONS)
        self._builders = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    def serve(self, port: int, host: str = "") -> int:
        """Listen on ``host``, which is the loopback; if empty, on all addresses. Returns the port. Raises: OSError."""
        server = _open_server(host, port)
        self._is_on_loopback = bool(host)
        threading.Thread(target=self._accept, args=(server,), daemon=True, name="metrics").start()
        return int(server.getsockname()[1])

    def serve_pod(self, port: int, host: str, port_file: str | None) -> int | None:
        """Listen on the pod's port. Returns the port in use, None if there is none. ``port_file``: gets that port.

        With a port file any free port will do: on a shared machine another process may use the port of an ended pod.
        """
        used = self._listen(port, host, has_port_file=bool(port_file))
        if used is not None and port_file:
            try_write_json(port_file, used)
        return used

    def _listen(self, port: int, host: str, *, has_port_file: bool) -> int | None:
        try:
            return self.serve(port, host)
        except OSError as error:
            problem = error
        if has_port_file and port:
            try:
                free_port = self.serve(0, host)
            except OSError as error:
                problem = error
            else:
                log(f"metrics are on port {free_port}: cannot listen on {port}: {problem.strerror}")
                return free_port
        remedy = "set spec.metrics.port to a port that no other container of the pod uses"
        log(f"no metrics: cannot listen on port {port}: {problem.strerror}; {remedy}")
        return None

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
                status, body = self._respond(request_line, request)
                head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                connection.settimeout(_find_timeout(deadline))
                connection.sendall(head.encode() + (b"" if request_line[:1] == [b"HEAD"] else body))
        finally:
            self._open.remove(connection)

    def _respond(self, request_line: list[bytes], request: bytes) -> tuple[str, bytes]:
        """Return status and body of the response to a request. Raises: OSError."""
        if len(request_line) != 3:
            return "404 Not Found", _NOT_FOUND
        host = _HOST.search(request)
        if self._is_on_loopback and host and not _OWN_HOST.fullmatch(host[1].decode("latin-1").rstrip()):
            return "403 Forbidden", b"only for requests to localhost, this machine's name or an address\n"
        method, target, _ = request_line
        path, _, query = target.partition(b"?") if method in (b"GET", b"HEAD") else (b"", b"", b"")
        if path in (b"/report", b"/metrics"):
            return self.build_page(path)
        if path == b"/healthz":
            return "200 OK", b"ok\n"
        page = self._read_page(path.decode("latin-1"), query.decode("latin-1")) if path and self._read_page else None
        if page is not None:
            return "200 OK", page
        return "404 Not Found", _NOT_FOUND

    def build_page(self, path: bytes) -> tuple[str, bytes]:
        """Return status and body of the response to a request of a page."""
        # Building waits for the ranks, also after the connection was closed: limit how many do so.
        if not self._builders.acquire(blocking=False):
            return "503 Service Unavailable", b"too many requests\n"
        try:
            pages = list(self._ranks.collect().values())
            report = self._build_report([page.progress for page in pages])
        finally:
            self._builders.release()
        if path == b"/report":
            return "200 OK", encode_json(report)
        texts = {page.progress.rank: page.text for page in pages if page.text}
        return "200 OK", format_page(report, texts).encode("utf-8", "replace")


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
