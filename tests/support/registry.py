"""A registry of images on the loopback: as strict as the distribution API, with a login by tokens or by a password."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

_TOKEN = "granted"


@dataclass
class Registry:
    """Keeps blobs and manifests. ``calls``: method and path of each call, with the status of its response."""

    auth: str = ""
    """``bearer`` or ``basic``; nothing: everybody may push."""
    login: tuple[str, str] = ("ann", "pass:word")
    refresh_token: str = "kept"
    may_push: bool = True
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Status and body of the response to each call of a method, instead of the true one."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    """By tag, and by digest."""
    types: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, str, int]] = field(default_factory=list)
    scopes: list[str] = field(default_factory=list)
    logins: list[str] = field(default_factory=list)
    """The header Authorization of each call."""
    uploads: str = ""
    """Scheme and host to which blobs are to be sent; nothing: here."""
    host: str = ""

    def pushed(self) -> int:
        """Return how many blobs and manifests were sent."""
        return sum(method == "PUT" and status == 201 for method, _, status in self.calls)


@contextmanager
def serve_registry(registry: Registry) -> Iterator[Registry]:
    """Serve until the block ends."""

    class RegistryHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_call(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, said = self._answer(url.path, parse_qs(url.query), body)
            registry.logins.append(self.headers.get("Authorization") or "")
            registry.calls.append((self.command, url.path, status))
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(said))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(said)

        do_GET = do_HEAD = do_POST = do_PUT = handle_call

        def _answer(self, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, dict[str, str], bytes]:
            if path == "/token":
                return self._grant(query, body)
            bearer = f'Bearer realm="http://{registry.host}/token",service="reg, one",scope="x"'
            challenge = {"WWW-Authenticate": bearer if registry.auth == "bearer" else 'Basic realm="r"'}
            if registry.auth and not self._may_in():
                return 401, challenge, b"{}"
            if not registry.may_push:
                return 403, {}, b'{"errors": [{"code": "DENIED", "message": "access to team/code is denied"}]}'
            if self.command in registry.answers:
                return registry.answers[self.command][0], challenge, registry.answers[self.command][1]
            head, name = path.removeprefix("/v2/team/code").rsplit("/", 1)
            kept = registry.blobs if head == "/blobs" else registry.manifests
            if self.command == "HEAD":
                if name not in kept:
                    return 404, {}, b""
                return 200, {"Docker-Content-Digest": _digest(kept[name])}, b""
            if (self.command, path) == ("POST", "/v2/team/code/blobs/uploads/"):
                return 202, {"Location": f"{registry.uploads}/v2/team/code/blobs/uploads/7?_state=a%2Bb"}, b""
            if self.command == "PUT" and head == "/blobs/uploads" and query.get("_state") == ["a+b"]:
                registry.blobs[query["digest"][0]] = body
                return (201 if query["digest"] == [_digest(body)] else 400), {}, b""
            if self.command == "PUT" and head == "/manifests":
                return self._keep(name, body)
            return 400, {}, b"{}"

        def _keep(self, name: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
            manifest, given = json.loads(body), self.headers["Content-Type"]
            parts = [one["digest"] for one in [manifest.get("config"), *manifest.get("layers", ())] if one]
            whole = all(part in registry.blobs for part in parts)
            whole &= all(one["digest"] in registry.manifests for one in manifest.get("manifests", ()))
            if not whole or given != manifest["mediaType"] or (name.startswith("sha256:") and name != _digest(body)):
                return 400, {}, b'{"errors": [{"message": "manifest invalid"}]}'
            registry.manifests |= {name: body, _digest(body): body}
            registry.types[_digest(body)] = given
            return 201, {}, b""

        def _may_in(self) -> bool:
            basic = "Basic " + base64.b64encode(":".join(registry.login).encode()).decode()
            return self.headers.get("Authorization") == (basic if registry.auth == "basic" else f"Bearer {_TOKEN}")

        def _grant(self, query: dict[str, list[str]], body: bytes) -> tuple[int, dict[str, str], bytes]:
            form = parse_qs(body.decode()) or query
            registry.scopes += form["scope"]
            basic = "Basic " + base64.b64encode(":".join(registry.login).encode()).decode()
            by_token = form.get("refresh_token") == [registry.refresh_token] and self.command == "POST"
            if form["service"] != ["reg, one"] or not (by_token or self.headers.get("Authorization") == basic):
                return 401, {}, b'{"errors": [{"message": "no such user"}]}'
            return 200, {}, json.dumps({"access_token" if by_token else "token": _TOKEN}).encode()

        def log_message(self, format: str, *args: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), RegistryHandler)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, args=(0.02,))
    thread.start()
    registry.host = f"127.0.0.1:{listener.server_address[1]}"
    try:
        yield registry
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
