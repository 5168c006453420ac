"""A registry of images on the loopback: as strict as the distribution API, with a login by tokens or by a password."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

_TOKEN = "granted"
_SERVICE = "reg, one"
_REPOSITORY = "/v2/team/code"
_UPLOADS = f"{_REPOSITORY}/blobs/uploads"
_INVALID_MANIFEST = b'{"errors": [{"message": "manifest invalid"}]}'
_DENIED = b'{"errors": [{"code": "DENIED", "message": "access to team/code is denied"}]}'


class RegistryCall(NamedTuple):
    """A request to the registry."""

    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Message
    body: bytes


class RegistryResponse(NamedTuple):
    """The registry's response; the server adds Content-Length."""

    status: int
    headers: Mapping[str, str] = {}
    body: bytes = b""


@dataclass
class Registry:
    """Keeps blobs and manifests. ``calls``: method and path of each call, with the status of its response."""

    auth: str = ""
    """``bearer`` or ``basic``; empty: no login is needed."""
    login: tuple[str, str] = ("ann", "pass:word")
    refresh_token: str = "kept"
    may_push: bool = True
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Status and body of the response to each call of a method, instead of the registry's own."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    """By tag, and by digest."""
    types: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, str, int]] = field(default_factory=list)
    scopes: list[str] = field(default_factory=list)
    logins: list[str] = field(default_factory=list)
    """The header Authorization of each call."""
    uploads: str = ""
    """Scheme and host for the upload of blobs; empty: this registry."""
    host: str = ""
    realm: str = ""
    """Where tokens are granted; empty: at this registry."""

    def pushed(self) -> int:
        """Return the number of blobs and manifests that were stored."""
        return sum(method == "PUT" and status == 201 for method, _, status in self.calls)

    def respond(self, call: RegistryCall) -> RegistryResponse:
        """Process a call, and record it."""
        response = self._process(call)
        self.logins.append(call.headers.get("Authorization") or "")
        self.calls.append((call.method, call.path, response.status))
        return response

    def _process(self, call: RegistryCall) -> RegistryResponse:
        if call.path == "/token":
            return self._grant_token(call)

        if self.auth and not self._is_authorized(call):
            return RegistryResponse(401, self._build_challenge(), b"{}")

        if not self.may_push:
            return RegistryResponse(403, body=_DENIED)

        if call.method in self.answers:
            status, body = self.answers[call.method]
            return RegistryResponse(status, self._build_challenge(), body)

        return self._store(call)

    def _store(self, call: RegistryCall) -> RegistryResponse:
        """Process a call to the repository by the rules of the distribution API."""
        folder, name = call.path.removeprefix(_REPOSITORY).rsplit("/", 1)
        if call.method == "HEAD":
            return self._find(self.blobs if folder == "/blobs" else self.manifests, name)

        if call.method == "POST" and call.path == f"{_UPLOADS}/":
            return RegistryResponse(202, {"Location": f"{self.uploads}{_UPLOADS}/7?_state=a%2Bb"})

        if call.method == "PUT" and folder == "/blobs/uploads" and call.query.get("_state") == ["a+b"]:
            return self._store_blob(call)

        if call.method == "PUT" and folder == "/manifests":
            return self._store_manifest(name, call)

        return RegistryResponse(400, body=b"{}")

    def _find(self, stored: Mapping[str, bytes], name: str) -> RegistryResponse:
        if name not in stored:
            return RegistryResponse(404)
        return RegistryResponse(200, {"Docker-Content-Digest": _digest(stored[name])})

    def _store_blob(self, call: RegistryCall) -> RegistryResponse:
        digest = call.query["digest"]
        self.blobs[digest[0]] = call.body
        return RegistryResponse(201 if digest == [_digest(call.body)] else 400)

    def _store_manifest(self, name: str, call: RegistryCall) -> RegistryResponse:
        manifest = json.loads(call.body)
        content_type = call.headers["Content-Type"]
        digest = _digest(call.body)
        blobs = [part["digest"] for part in [manifest.get("config"), *manifest.get("layers", ())] if part]
        is_complete = all(blob in self.blobs for blob in blobs)
        is_complete &= all(part["digest"] in self.manifests for part in manifest.get("manifests", ()))
        is_other_digest = name.startswith("sha256:") and name != digest
        if not is_complete or content_type != manifest["mediaType"] or is_other_digest:
            return RegistryResponse(400, body=_INVALID_MANIFEST)

        self.manifests |= {name: call.body, digest: call.body}
        self.types[digest] = content_type
        return RegistryResponse(201)

    def _build_challenge(self) -> dict[str, str]:
        bearer = f'Bearer realm="{self.realm or f"http://{self.host}/token"}",service="{_SERVICE}",scope="x"'
        return {"WWW-Authenticate": bearer if self.auth == "bearer" else 'Basic realm="r"'}

    def _build_basic(self) -> str:
        return "Basic " + base64.b64encode(":".join(self.login).encode()).decode()

    def _is_authorized(self, call: RegistryCall) -> bool:
        expected = self._build_basic() if self.auth == "basic" else f"Bearer {_TOKEN}"
        return call.headers.get("Authorization") == expected

    def _grant_token(self, call: RegistryCall) -> RegistryResponse:
        form = parse_qs(call.body.decode()) or call.query
        self.scopes += form["scope"]
        has_refresh_token = form.get("refresh_token") == [self.refresh_token] and call.method == "POST"
        has_login = has_refresh_token or call.headers.get("Authorization") == self._build_basic()
        if form["service"] != [_SERVICE] or not has_login:
            return RegistryResponse(401, body=b'{"errors": [{"message": "no such user"}]}')

        name = "access_token" if has_refresh_token else "token"
        return RegistryResponse(200, body=json.dumps({name: _TOKEN}).encode())


@contextmanager
def serve_registry(registry: Registry) -> Iterator[Registry]:
    """Serve until the block ends."""

    class RegistryHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_call(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            response = registry.respond(RegistryCall(self.command, url.path, parse_qs(url.query), self.headers, body))
            self.send_response(response.status)
            for name, value in response.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(response.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(response.body)

        do_GET = do_HEAD = do_POST = do_PUT = handle_call

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
