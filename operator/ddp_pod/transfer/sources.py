"""Inputs and where they are read from: a web server or this machine by the standard library, the rest by fsspec.

fsspec, on which PyTorch depends, opens object stores and other file systems by URL, also for the checkpoints.
"""

import dataclasses
import http.client
import importlib
import os
import re
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple, cast

from ..contract.credentials import hide_credentials
from ..contract.pod_end import InputReport

STALL_SECONDS = 60.0
"""A connection that receives nothing for this long is closed; the whole download has no limit."""
_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")
_MESSAGE_LIMIT = 300  # characters
# Stores without folders: makedirs would create a bucket.
_FOLDERLESS_PROTOCOLS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "hf"}
# What storages call the version or checksum of a file.
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "blob_id", "checksum", "LastModified", "mtime")

# Without these s3fs may wait for a response without end.
_S3_OPTIONS = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}}
_OPTIONS: dict[str, Any] = {"s3": _S3_OPTIONS, "s3a": _S3_OPTIONS}
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
}


class UnusableStorage(ValueError):
    """A URL that this image cannot open; the message names the package to install or the problem to fix."""

    def __init__(self, message: str) -> None:
        super().__init__(hide_credentials(message))


def open_storage(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL and the path in it, with credentials from the environment.

    The file system caches no listings, as other processes write to it too. Raises: UnusableStorage.
    """
    protocol = url.partition("://")[0]
    try:
        fsspec = importlib.import_module("fsspec")
    except ImportError:
        raise UnusableStorage(f"{url} needs the Python package fsspec; install it in the image") from None

    package = _PACKAGES.get(protocol, "")
    options = _OPTIONS.get(protocol, {})
    try:
        system, path = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
    except ImportError as error:
        requirement = f"the Python package {package}" if package else f"a Python package ({error})"
        raise UnusableStorage(f"{url} needs {requirement}; install it in the image") from None
    except ValueError as error:
        raise UnusableStorage(f"{url} cannot be opened: {error}") from None
    return system, str(path).rstrip("/")


def make_folder(system: Any, path: str) -> None:
    """Create a folder in a file system of fsspec, if it has folders. Raises the file system's errors unchanged."""
    protocols = system.protocol
    if _FOLDERLESS_PROTOCOLS.isdisjoint([protocols] if isinstance(protocols, str) else protocols):
        system.makedirs(path, exist_ok=True)


class FetchError(Exception):
    """An input cannot be fetched. ``reason``: of the condition InputsReady; ``retryable``: a retry may succeed."""

    def __init__(self, reason: str, message: str, hint: str = "", *, retryable: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.hint = hint
        self.retryable = retryable


@dataclasses.dataclass
class InputState:
    """One input and its progress. ``root``: the mounted claim or cache; ``key``: the input's folder in it."""

    name: str
    url: str
    root: str
    key: str
    checksum: str = ""
    secret: str = ""
    """Prefix of the environment variables with the keys of its Secret."""
    phase: str = "Pending"
    bytes: int = 0
    total: int | None = None
    etag: str = ""
    reason: str = ""
    message: str = ""

    def report(self) -> InputReport:
        """Return what the pod reports about the input."""
        return InputReport(
            name=self.name,
            phase=self.phase,
            bytes=self.bytes,
            total_bytes=self.total,
            etag=self.etag,
            checksum=self.checksum,
            reason=self.reason,
            message=self.message[:_MESSAGE_LIMIT],
        )


class File(NamedTuple):
    """A file of an input. ``size``: None if unknown. ``token``: changes with each version; empty if unknown."""

    path: str
    size: int | None
    token: str


class InputSource:
    """A file, or all files below a folder, on this machine."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._root = urllib.parse.unquote(urllib.parse.urlsplit(url).path)

    def list(self) -> list[File]:
        """Return the files with their paths relative to the input's folder. Raises: FetchError, OSError."""
        if os.path.isfile(self._root):
            name = os.path.basename(self._root)
            self._root = os.path.dirname(self._root)
            return [self._stat(name)]
        os.listdir(self._root)  # raises OSError for a missing folder, unlike os.walk
        files = []
        for parent, _, names in os.walk(self._root):
            for name in names:
                files.append(self._stat(os.path.relpath(os.path.join(parent, name), self._root)))
        return files

    def _stat(self, path: str) -> File:
        status = os.stat(os.path.join(self._root, path))
        return File(path, status.st_size, f"{status.st_size}-{status.st_mtime_ns}")

    def open(self, file: File, offset: int) -> tuple[BinaryIO, int]:
        """Return a stream and its start in the file: ``offset``, or 0 if the source cannot start there."""
        stream = open(os.path.join(self._root, file.path), "rb")  # noqa: SIM115
        stream.seek(offset)
        return stream, offset


class WebSource(InputSource):
    """One file of a web server. ``authorization``: a header that redirects to other hosts do not receive."""

    def __init__(self, url: str, authorization: str = "") -> None:
        super().__init__(url)
        self._authorization = authorization

    def list(self) -> list[File]:
        """Request the first byte: signed URLs and some servers allow only GET."""
        name = os.path.basename(self._root.rstrip("/")) or "index"
        with self._request({"Range": "bytes=0-0"}) as response:
            headers = response.headers
            size = headers.get("Content-Length")
            if response.status != 200:
                match = _RANGE.fullmatch(headers.get("Content-Range") or "")
                size = match[2] if match else None
            token = headers.get("ETag") or ""
            if not token or token.startswith("W/"):  # a weak ETag may cover two contents
                token = headers.get("Last-Modified") or ""
        return [File(name, int(size) if size and size.isdigit() else None, token)]

    def open(self, file: File, offset: int) -> tuple[BinaryIO, int]:
        """Continue at ``offset`` if the server still has the same version of the file."""
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
            if error.code == 416 and "Range" in headers:  # an empty file has no first byte
                return error
            raise


class StorageSource(InputSource):
    """A file, or all files below a prefix, in a storage that fsspec supports."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._system, self._root = open_storage(url)

    def list(self) -> list[File]:
        """List the prefix with the storage's metadata of each file."""
        details = self._system.find(self._root, detail=True)
        if not details or list(details) == [self._root]:
            info = self._system.info(self._root)  # raises if the path does not exist
            details = {} if info.get("type") == "directory" else {self._root: info}
        folder = self._root.rstrip("/")
        if list(details) == [self._root]:
            folder = folder.rpartition("/")[0]
        self._root = folder
        return [
            File(path[len(folder) :].lstrip("/"), info.get("size"), self._find_token(info))
            for path, info in sorted(details.items())
        ]

    def open(self, file: File, offset: int) -> tuple[BinaryIO, int]:
        """Open the file at ``offset``."""
        stream = self._system.open(f"{self._root}/{file.path}" if self._root else file.path, "rb")
        if offset:
            stream.seek(offset)
        return cast(BinaryIO, stream), offset

    @staticmethod
    def _find_token(info: Mapping[str, Any]) -> str:
        for key in _VERSION_KEYS:
            if info.get(key):
                return str(info[key]).strip('"')
        return ""


def open_source(url: str) -> InputSource:
    """Return the source of an input. Raises: FetchError."""
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
    """Return the FetchError for an exception of a source."""
    if isinstance(error, FetchError):
        return error
    source = hide_query(url)
    if isinstance(error, urllib.error.HTTPError):
        return _explain_status(error.code, f"{source}: HTTP {error.code} {error.reason}")

    cause = _find_cause(error)
    message = f"{source}: {_describe(cause)}"
    if isinstance(cause, FileNotFoundError):
        return FetchError("NotFound", f"{source}: no such file or folder", "correct the URL")
    if isinstance(cause, PermissionError) or "credentials" in type(cause).__name__.lower():
        return FetchError("AccessDenied", message, "name a Secret with credentials in secretRef")
    if isinstance(cause, ssl.SSLCertVerificationError):
        hint = "add the certificate authority to the image (SSL_CERT_FILE)"
        return FetchError("AccessDenied", message, hint)
    if isinstance(cause, socket.gaierror):
        host = urllib.parse.urlsplit(url).hostname
        hint = "correct the URL, or check the cluster's DNS"
        return FetchError("Unreachable", f"{source}: the host {host} does not resolve", hint, retryable=True)
    if isinstance(cause, (OSError, http.client.HTTPException, urllib.error.URLError)):
        hint = "check the server, and whether a NetworkPolicy or a firewall blocks the pod's traffic to it"
        return FetchError("Unreachable", message, hint, retryable=True)
    return FetchError("FetchFailed", message, retryable=True)


def _find_cause(error: BaseException) -> BaseException:
    """Return the exception that urllib wrapped, or the error itself."""
    reason = getattr(error, "reason", None)
    if isinstance(error, urllib.error.URLError) and isinstance(reason, BaseException):
        return reason
    return error


def _explain_status(code: int, message: str) -> FetchError:
    if code in (404, 410):
        return FetchError("NotFound", message, "correct the URL")
    if code in (401, 403, 407):
        hint = "name a Secret with HTTP_AUTHORIZATION in secretRef, or renew the signed URL"
        return FetchError("AccessDenied", message, hint)
    if code in (408, 425, 429) or code >= 500:
        return FetchError("Unreachable", message, "check the server", retryable=True)
    return FetchError("FetchFailed", message, "correct the URL")


def _describe(error: BaseException) -> str:
    text = str(getattr(error, "strerror", None) or error)
    if not isinstance(error, OSError) or not text:
        text = f"{type(error).__name__}: {text}"
    return hide_credentials(text)


def hide_query(url: str) -> str:
    """Return a URL without credentials and without its query, which may contain a signature."""
    return hide_credentials(url.partition("?")[0])
