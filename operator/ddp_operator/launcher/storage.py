"""Object stores and other file systems by their URL, through fsspec, which PyTorch itself depends on."""

import importlib
import re
from typing import Any

# Where an answer is waited for without end otherwise, and what a provider's own library needs to be told for it.
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}},
}
_OPTIONS["s3a"] = _OPTIONS["s3"]
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


# A user and a password, which may have slashes, or a web server's user; a port is not one.
_CREDENTIALS = re.compile(
    r"(?<=://)(?:[^/@:\s]*:(?!\d+(?:/|\s|$))[^@\s]*@|(?<=http://)[^/@\s]*@|(?<=https://)[^/@\s]*@)"
)


def has_credentials(url: str) -> bool:
    """Tell whether a URL holds a password, or a user of a web server."""
    return _CREDENTIALS.search(url) is not None


def hide_credentials(text: str) -> str:
    """Return text without the users and passwords in its URLs."""
    return _CREDENTIALS.sub("***@", text)


class UnusableStorage(ValueError):
    """A URL that this image can do nothing with; the message says what to install or to change."""

    def __init__(self, message: str) -> None:
        super().__init__(hide_credentials(message))


def open_storage(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it. It remembers no listing: others write there too.

    Credentials are those of the environment. Raises: UnusableStorage.
    """
    protocol = url.partition("://")[0]
    try:
        fsspec = importlib.import_module("fsspec")
    except ImportError:
        raise UnusableStorage(f"{url} needs the Python package fsspec; install it in the image") from None
    package = _PACKAGES.get(protocol, "")
    try:
        options = _OPTIONS.get(protocol, {})
        system, path = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
    except ImportError as error:
        what = f"the Python package {package}" if package else f"a Python package ({error})"
        raise UnusableStorage(f"{url} needs {what}; install it in the image") from None
    except ValueError as error:
        raise UnusableStorage(f"{url} cannot be opened: {error}") from None
    return system, str(path).rstrip("/")
