"""What the readers of published datasets have in common: missing files, damaged ones, and fetching them."""

import contextlib
import pickle
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from ddp_trainer.errors import UserError
from ddp_trainer.torchvision_compat import import_torchvision


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


def fetch(what: str, folder: Path, names: Sequence[str], dataset: str, **arguments: Any) -> None:
    """Let torchvision's ``dataset`` download into ``folder``, unless the files ``names`` are there already.

    Raises :class:`UserError` where that fails.
    """
    if all((folder / name).is_file() for name in names):
        return
    import_torchvision()
    from torchvision import datasets

    try:
        folder.mkdir(parents=True, exist_ok=True)
        getattr(datasets, dataset)(str(folder), download=True, **arguments)
    except (URLError, OSError, RuntimeError, EOFError) as error:
        if isinstance(error, HTTPError):
            error.close()  # it is the answer, too, and holds the connection
        raise UserError(
            "data.download",
            f"{what} can't be fetched into {folder.resolve()}: {' '.join(str(error).split())[:200]}",
            "check the network and the disk, or put the files there by hand and leave --data-download out",
        ) from error
