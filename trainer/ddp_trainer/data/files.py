"""What the readers of published datasets have in common: missing files, damaged ones, and fetching them."""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from ddp_trainer.errors import UserError


def require_files(what: str, folder: Path, names: Sequence[str], remedy: str) -> None:
    """Raise :class:`UserError` naming ``folder`` and those of the files ``names`` that are not in it."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise UserError(
            "data.dir",
            f"{what} is not complete in {folder.resolve()}: {listed} missing",
            f"{remedy}, give --data-dir, or fetch it with --data-download",
        )


@contextlib.contextmanager
def readable(what: str, folder: Path, remedy: str) -> Iterator[None]:
    """Turn what a reader raises at a file that is not what it should be into a :class:`UserError`."""
    try:
        yield
    except UserError:
        raise
    except RuntimeError as error:  # torchvision's word for a wrong checksum
        raise UserError(
            "data.dir",
            f"files in {folder.resolve()} are damaged or not the published ones ({error})",
            f"{remedy} again, or read them as they are with --data-verify false",
        ) from error
    except (
        pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError, AssertionError, IndexError, OSError,
        struct.error,
    ) as error:  # fmt: skip
        raise UserError(
            "data.dir",
            f"{what} in {folder.resolve()} can't be read: {type(error).__name__}: {error}",
            f"{remedy} again",
        ) from error


def fetch(what: str, folder: Path, reader: Callable[[], Any]) -> None:
    """Let torchvision's ``reader`` download into ``folder``; raises :class:`UserError` where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reader()
    except (URLError, OSError, RuntimeError, EOFError) as error:
        if isinstance(error, HTTPError):
            error.close()  # it is the answer, too, and holds the connection
        raise UserError(
            "data.download",
            f"{what} can't be fetched into {folder.resolve()}: {' '.join(str(error).split())[:200]}",
            "check the network and the disk, or put the files there by hand and leave --data-download out",
        ) from error
