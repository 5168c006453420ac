"""Object stores and other file systems by URL, through fsspec, which PyTorch depends on."""

import importlib
import re
from typing import Any

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


# What precedes an @: a user and a password, which may contain slashes, or the user of a web server. A port is no
# credential.
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/:]*:(?!\d+/)|(?:(?<=http://)|(?<=https://))[^/]*\Z)")
_ENDS = " \t\r\n\"'<>"
"""Characters that no URL contains."""
# Parameters with a password, a token or a signature, such as X-Amz-Signature=, sig= and access_token=.
_PARAMETER = re.compile(
    r"([?&#][\w.~%-]*(?:token|signature|sig|key|keyid|secret|password|passwd|pwd|credential|auth)=)[^\s&#\"'<>)]+", re.I
)


def has_credentials(url: str) -> bool:
    """Return whether a URL contains a password, or the user of a web server."""
    return _hide_users(url) != url


def hide_credentials(text: str) -> str:
    """Replace the users, passwords, tokens and signatures in the URLs of a text by ``***``."""
    return _PARAMETER.sub(r"\1***", _hide_users(text))


def _hide_users(text: str) -> str:
    """Replace the users and passwords, which contain no space, by ``***``."""
    *parts, last = text.split("@") if "://" in text else [text]
    for number, part in enumerate(parts):
        match = _CREDENTIALS.search(part, 1 + max(map(part.rfind, _ENDS)))
        if match:
            parts[number] = f"{part[: match.start()]}***"
    return "@".join([*parts, last])


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
