"""Inputs, and what they are read from: by the standard library a web server or this machine, by fsspec all else."""

import dataclasses
import http.client
import os
import re
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, BinaryIO, NamedTuple, Optional, cast

from .storage import UnusableStorage, hide_credentials, open_storage

STALL_SECONDS = 60.0
"""A connection that brings nothing for so long is given up; a download as such may take any time."""
_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")


class FetchError(Exception):
    """An input cannot be fetched; ``reason`` is one of the condition InputsReady, ``retryable``: it may be later."""

    def __init__(self, reason: str, message: str, hint: str = "", *, retryable: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.hint = hint
        self.retryable = retryable


@dataclasses.dataclass
class InputState:
    """One input, and how far it is. ``root``: the folder of the claim or cache; ``key``: that of the input in it."""

    name: str
    url: str
    root: str
    key: str
    checksum: str = ""
    secret: str = ""
    """Prefix of the variables that its Secret holds."""
    phase: str = "Pending"
    bytes: int = 0
    total: Optional[int] = None
    etag: str = ""
    reason: str = ""
    message: str = ""

    def describe(self) -> dict[str, Any]:
        """Return what status.inputs says of it."""
        found = {"name": self.name, "phase": self.phase, "bytes": self.bytes, "totalBytes": self.total}
        found.update(etag=self.etag, checksum=self.checksum, reason=self.reason, message=self.message[:300])
        return {name: value for name, value in found.items() if value not in (None, "")}


class File(NamedTuple):
    """A file of an input. ``token`` tells two versions of it apart; empty: nothing does. ``size``: None, not known."""

    path: str
    size: Optional[int]
    token: str


class InputSource:
    """A file, or all files below a folder of this machine."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._root = urllib.parse.unquote(urllib.parse.urlsplit(url).path)

    def list(self) -> list[File]:
        """Return the files by their paths in the folder that they make. Raises: FetchError."""
        if os.path.isfile(self._root):
            found = [(os.path.basename(self._root), self._root)]
            self._root = os.path.dirname(self._root)
        else:
            os.listdir(self._root)  # raises where there is none
            walked = (os.path.join(top, name) for top, _, names in os.walk(self._root) for name in names)
            found = [(os.path.relpath(path, self._root), path) for path in walked]
        stats = [(path, os.stat(place)) for path, place in found]
        return [File(path, stat.st_size, f"{stat.st_size}-{stat.st_mtime_ns}") for path, stat in stats]

    def open(self, file: File, offset: int) -> tuple[BinaryIO, int]:
        """Return a stream and the place in the file where it begins: ``offset``, or 0 where that is not possible."""
        stream = open(os.path.join(self._root, file.path), "rb")  # noqa: SIM115
        stream.seek(offset)
        return stream, offset


class WebSource(InputSource):
    """One file of a web server. ``authorization``: the header of that name, which no other host is sent."""

    def __init__(self, url: str, authorization: str = "") -> None:
        super().__init__(url)
        self._authorization = authorization

    def list(self) -> list[File]:
        """Ask for the first byte: that works where only GET is allowed, as by a signed URL."""
        name = os.path.basename(self._root.rstrip("/")) or "index"
        with self._request({"Range": "bytes=0-0"}) as response:
            headers, size = response.headers, response.headers.get("Content-Length")
            if response.status != 200:
                match = _RANGE.fullmatch(headers.get("Content-Range") or "")
                size = match[2] if match else None
            etag = headers.get("ETag") or ""
            token = headers.get("Last-Modified") or "" if not etag or etag.startswith("W/") else etag
        return [File(name, int(size) if size and size.isdigit() else None, token)]

    def open(self, file: File, offset: int) -> tuple[BinaryIO, int]:
        """Go on at ``offset`` where the server still has the same file."""
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        if offset and file.token:
            headers["If-Range"] = file.token
        response = self._request(headers)
        if offset == 0 or response.status == 200:
            return cast(BinaryIO, response), 0
        match = _RANGE.fullmatch(response.headers.get("Content-Range") or "")
        if response.status == 206 and match and match[1] == str(offset) and match[2] in ("*", str(file.size)):
            return cast(BinaryIO, response), offset
        response.close()
        return cast(BinaryIO, self._request({})), 0

    def _request(self, headers: dict[str, str]) -> Any:
        request = urllib.request.Request(self.url, headers={"Accept-Encoding": "identity", **headers})  # noqa: S310
        if self._authorization:
            request.add_unredirected_header("Authorization", self._authorization)
        try:
            return urllib.request.urlopen(request, timeout=STALL_SECONDS)  # noqa: S310 # nosec B310
        except urllib.error.HTTPError as error:
            if error.code == 416 and "Range" in headers:  # of an empty file no byte can be had
                return error
            raise


class StorageSource(InputSource):
    """A file, or all files below a prefix, of a storage that fsspec knows."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._system, self._root = open_storage(url)

    def list(self) -> list[File]:
        """List the prefix with what the storage knows of each file."""
        found = self._system.find(self._root, detail=True)
        if not found or list(found) == [self._root]:
            info = self._system.info(self._root)  # raises where there is none
            found = {} if info.get("type") == "directory" else {self._root: info}
        folder = self._root.rstrip("/")
        if list(found) == [self._root]:
            folder = folder.rpartition("/")[0]
        self._root = folder
        return [
            File(path[len(folder) :].lstrip("/"), info.get("size"), str(self._token(info)))
            for path, info in sorted(found.items())
        ]

    def open(self, file: File, offset: int) -> tuple[BinaryIO, int]:
        """Open the file at ``offset``."""
        stream = self._system.open(f"{self._root}/{file.path}" if self._root else file.path, "rb")
        if offset:
            stream.seek(offset)
        return cast(BinaryIO, stream), offset

    @staticmethod
    def _token(info: dict[str, Any]) -> str:
        known = (info.get(name) for name in ("ETag", "etag", "md5Hash", "blob_id", "checksum", "LastModified", "mtime"))
        return next((str(value).strip('"') for value in known if value), "")


def open_source(url: str) -> InputSource:
    """Return what an input is read from. Raises: FetchError."""
    scheme = url.partition("://")[0].lower()
    if scheme == "file":
        return InputSource(url)
    if scheme in ("http", "https"):
        return WebSource(url, os.environ.get("HTTP_AUTHORIZATION", ""))
    try:
        return StorageSource(url)
    except UnusableStorage as error:
        raise FetchError("Unsupported", str(error)) from None


def explain(error: BaseException, url: str) -> FetchError:
    """Return what it means that a source could not be read."""
    if isinstance(error, FetchError):
        return error
    where = hide_query(url)
    if isinstance(error, urllib.error.HTTPError):
        return _explain_status(error.code, f"{where}: HTTP {error.code} {error.reason}")
    reason = getattr(error, "reason", None)
    cause = reason if isinstance(error, urllib.error.URLError) and isinstance(reason, BaseException) else error
    what = f"{where}: {_describe(cause)}"
    if isinstance(cause, FileNotFoundError):
        return FetchError("NotFound", f"{where}: no such file or folder", "correct the URL")
    if isinstance(cause, PermissionError) or "credentials" in type(cause).__name__.lower():
        return FetchError("AccessDenied", what, "name a Secret with credentials in secretRef")
    if isinstance(cause, ssl.SSLCertVerificationError):
        return FetchError("AccessDenied", what, "the image must have the certificate of the authority (SSL_CERT_FILE)")
    if isinstance(cause, socket.gaierror):
        host = urllib.parse.urlsplit(url).hostname
        what, hint = f"{where}: the host {host} cannot be resolved", "correct the URL, or look at the cluster's DNS"
        return FetchError("Unreachable", what, hint, retryable=True)
    if isinstance(cause, (OSError, http.client.HTTPException, urllib.error.URLError)):
        hint = "look at the server, and at what keeps the pod from it, such as a NetworkPolicy"
        return FetchError("Unreachable", what, hint, retryable=True)
    return FetchError("FetchFailed", what, retryable=True)


def _explain_status(code: int, what: str) -> FetchError:
    if code in (404, 410):
        return FetchError("NotFound", what, "correct the URL")
    if code in (401, 403, 407):
        return FetchError(
            "AccessDenied", what, "name a Secret with HTTP_AUTHORIZATION in secretRef, or sign the URL anew"
        )
    if code in (408, 425, 429) or code >= 500:
        return FetchError("Unreachable", what, "look at the server", retryable=True)
    return FetchError("FetchFailed", what, "correct the URL")


def _describe(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error)
    described = str(text) if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}"
    return hide_credentials(described)


def hide_query(url: str) -> str:
    """Return a URL without what may be a signature, and without credentials."""
    return hide_credentials(url.partition("?")[0])
