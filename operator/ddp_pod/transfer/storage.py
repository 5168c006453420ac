"""Object stores and other file systems by URL, through fsspec, which PyTorch depends on."""

import importlib
from typing import Any

from ..contract.credentials import hide_credentials

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
