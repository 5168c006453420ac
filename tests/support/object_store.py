"""Checkpoint stores: a folder, or moto's S3 over HTTP behind a proxy that tests interrupt.

s3fs and moto need another python-dateutil than kubernetes does, so they are in a separate folder (`make s3`).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "build" / "s3"
_BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class FaultyProxy:
    """A TCP proxy; ``state``: ``up``, ``down`` (the end at once), ``busy`` (503), ``cut`` (after 100,000 bytes)."""

    def __init__(self, target: int, host: str) -> None:
        self.state = "up"
        self.cuts = 0
        self._target = target
        self._server = socket.create_server((host, 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client:
            if self.state == "down":
                return
            if self.state == "busy":
                client.recv(65536)
                client.sendall(_BUSY)
                return
            with socket.create_connection(("127.0.0.1", self._target)) as server:
                back = threading.Thread(target=self._copy, args=(server, client, False), daemon=True)
                back.start()
                self._copy(client, server, True)

    def _copy(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        sent = 0
        with suppress(OSError):
            while data := source.recv(65536):
                sent += len(data)
                if self.state in ("down", "busy") or (up and self.state == "cut" and sent > 100_000):
                    self.cuts += 1
                    break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class ObjectStore:
    """A bucket. ``url`` is a folder in it, ``credentials`` are a pod's to reach it, ``env`` a process's variables.

    ``host``: its address.
    """

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        if not PACKAGES.is_dir():
            pytest.skip("no s3fs and moto in build/s3; `make s3` installs them")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        self.url = "s3://bucket/prefix"
        self.wire = FaultyProxy(port, host)
        self._direct = f"http://127.0.0.1:{port}"
        self.credentials = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{self.wire.port}",
        }
        self.env: Mapping[str, str] = {**self.credentials, "PYTHONPATH": str(PACKAGES)}
        with open(folder / "moto.log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
                env=os.environ | self.env,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 120
        while True:
            try:
                self._call("PUT", "bucket")
                break
            except OSError:
                assert time.monotonic() < deadline, (folder / "moto.log").read_text()
                time.sleep(0.1)

    def keys(self, folder: str) -> list[str]:
        """Return the names below a folder of the prefix."""
        listing = self._call("GET", f"bucket?list-type=2&prefix=prefix/{folder}/").decode()
        return sorted(part.partition("</Key>")[0].rpartition("/")[2] for part in listing.split("<Key>")[1:])

    def replace(self, name: str, content: bytes) -> None:
        """Replace the content of an object."""
        self._call("PUT", f"bucket/prefix/{name}", content)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self.wire.close()

    def _call(self, method: str, path: str, content: bytes | None = None) -> bytes:
        signed = {"Authorization": "AWS key:signature"}  # moto allows only the owner to change an object
        request = urllib.request.Request(f"{self._direct}/{path}", data=content, headers=signed, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())


class FolderStore:
    """The same interface for a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "store"
        self.url = f"file://{self._folder}"
        self.env: Mapping[str, str] = {}

    def keys(self, folder: str) -> list[str]:
        return sorted(path.name for path in (self._folder / folder).glob("*"))

    def replace(self, name: str, content: bytes) -> None:
        (self._folder / name).write_bytes(content)

    def stop(self) -> None:
        pass
