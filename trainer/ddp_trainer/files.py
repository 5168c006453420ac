"""Writing a file so that a reader sees the old one or the new one and never a half, and saying where that fails."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ddp_trainer.errors import UserError


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False, check: Callable[[], None] = lambda: None) -> Iterator[IO[bytes]]:
    """A new file that takes the place of ``path`` at the end, unless anything raises; its folder is made where needed.

    ``durable`` also waits until the disk has it. ``check`` is called last before the rename, and may raise.
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
    """Write ``data`` to ``path``; see :func:`replacing`. Raises :class:`OSError`, and leaves no temporary file then."""
    with replacing(path, durable=durable) as file:
        file.write(data)


def fsync_folder(folder: Path) -> None:
    """Make renames and removals in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writable(path: Path, field: str) -> Iterator[None]:
    """Turn an :class:`OSError` into a :class:`UserError`: the setting ``field`` names a place that is not writable."""
    try:
        yield
    except OSError as error:
        problem = f"cannot write to {path}: {error.strerror or error}"
        raise UserError(field, problem, "make it writable, or choose another folder") from error
