"""A web server on the loopback for fetched files: it counts sent bytes, and injects failures."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_PIECE = 1 << 16
_BLOCK = 1 << 12


@dataclass
class FileServer:
    """Serves one content at every path. ``requests``: path and Range of each, ``sent``: bytes of all bodies."""

    content: Callable[[int, int], bytes]
    """Returns a number of bytes from an offset."""
    size: int
    etag: str = '"v1"'
    ranges: bool = True
    statuses: list[int] = field(default_factory=list)
    """Responses to the next requests instead of the file; 0: the file."""
    cuts: list[int] = field(default_factory=list)
    """The number of bytes of the next bodies after which the connection is cut."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    redirect: str = ""
    sent: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def starts(self) -> list[int]:
        """The offset of each body, except the first byte that is requested to learn the size."""
        results = [range_ for _, range_ in self.requests if range_ != "bytes=0-0"]
        return [int(re.findall(r"\d+", range_)[0]) if range_ else 0 for range_ in results]

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Respond to one request."""
        asked = handler.headers.get("Range") or ""
        with self.lock:
            self.requests.append((handler.path, asked))
            self.headers.append(dict(handler.headers))
            status = self.statuses.pop(0) if self.statuses else 0
            size = self.size
            etag = self.etag
        if self.redirect or status:
            handler.send_response(302 if self.redirect else status)
            if self.redirect:
                handler.send_header("Location", self.redirect)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
        start = 0
        end = size
        same = handler.headers.get("If-Range") in (None, etag)
        if match and self.ranges and same:
            start = int(match[1])
            end = min(size, int(match[2] or size - 1) + 1)
            handler.send_response(206 if start < size else 416)
            handler.send_header(
                "Content-Range", f"bytes {start}-{end - 1}/{size}" if start < size else f"bytes */{size}"
            )
        else:
            handler.send_response(200)
        if etag:
            handler.send_header("ETag", etag)
        handler.send_header("Content-Length", str(max(0, end - start)))
        handler.end_headers()
        with self.lock:
            cut = self.cuts.pop(0) if self.cuts and asked != "bytes=0-0" else None
        until = end if cut is None else min(end, start + cut)
        while start < until:
            piece = self.content(start, min(_PIECE, until - start))
            with self.lock:  # before the client may have seen it
                self.sent += len(piece)
            handler.wfile.write(piece)
            start += len(piece)
        handler.close_connection = True


@contextmanager
def serve_file(server: FileServer, host: str = "127.0.0.1", port: int = 0) -> Iterator[FileServer]:
    """Serve until the block ends."""

    class FileHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    listener = ThreadingHTTPServer((host, port), FileHandler)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, args=(0.02,))
    thread.start()
    server.url = f"http://{host}:{listener.server_address[1]}"
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


def serve_bytes(data: bytes, **changes: object) -> FileServer:
    """Return a server of these bytes."""
    return FileServer(lambda start, count: data[start : start + count], len(data), **changes)  # type: ignore[arg-type]


def pattern(start: int, count: int) -> bytes:
    """Return bytes of an endless file whose blocks contain their position."""
    first = start // _BLOCK
    blocks = (str(number).encode().zfill(_BLOCK) for number in range(first, (start + count) // _BLOCK + 1))
    return b"".join(blocks)[start - first * _BLOCK :][:count]
