"""A web server of one page."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class PageServer(ThreadingHTTPServer):
    """Answers ``GET /metrics`` on 127.0.0.1 with what ``page`` returns; raises OSError where the port is taken."""

    daemon_threads = True
    # A port in use is to be seen as such, also where another rank listens with SO_REUSEADDR.
    allow_reuse_address = False

    def __init__(self, port: int, page: Callable[[], bytes]) -> None:
        self.page = page
        super().__init__(("127.0.0.1", port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.split("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is here")
            return
        assert isinstance(self.server, PageServer)
        body = self.server.page()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a scrape is not an event of the training."""
