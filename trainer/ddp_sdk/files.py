"""Atomic writes: a reader sees the old file or the new file, never a part of it."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ddp_sdk.errors import UserError


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False, check: Callable[[], None] = lambda: None) -> Iterator[IO[bytes]]:
    """Open a new file that replaces ``path`` at the end of the block, unless the block raises. Creates the folder.

    With ``durable`` the file is also synced to disk. ``check`` is called right before the rename, and may raise.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        check()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def write_atomically(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write ``data`` to ``path``, see :func:`replacing`. Raises OSError, and leaves no temporary file."""
    with replacing(path, durable=durable) as file:
        file.write(data)


def fsync_folder(folder: Path) -> None:
    """Sync renames and removals in ``folder`` to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writable(path: Path, field: str) -> Iterator[None]:
    """Raise an OSError of the block as a :class:`UserError` of the setting ``field``, which names ``path``."""
    try:
        yield
    except OSError as error:
        problem = f"cannot write to {path}: {error.strerror or error}"
        raise UserError(field, problem, "make it writable, or give another folder") from error
