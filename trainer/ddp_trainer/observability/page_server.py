"""A rank's web server: its metrics, and what its threads do."""

import sys
import threading
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


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
        super().__init__(("127.0.0.1", port), _Handler)


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
