"""Copy the user's folder for a run, so that the script changes only the copy."""

import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from ddp_cli.client.errors import ClientError
from ddp_cli.client.packing.archive import format_size, list_largest
from ddp_cli.client.packing.files import CannotPack, Selection

MOST: Final = 1 << 30
"""Maximum size of all copied files in bytes."""
_MOST_FILES: Final = 200_000


def copy_folder(folder: Path, target: Path, *, most: int = MOST) -> None:
    """Copy a folder to ``target``, which does not exist. Links are replaced by what they name. Raises: ClientError.

    Version control, virtual environments, caches, run folders and the files that .ddpignore names are left out.
    """
    sizes: Counter[str] = Counter()
    count = 0
    root = folder.resolve()
    if root in target.resolve().parents:
        raise ClientError(f"{target} is inside of the folder to copy; set TMPDIR to another folder")
    target.mkdir(parents=True)
    for path, place in _list_entries(root, "", (root,)):
        copy = target / path
        try:
            if place.is_dir():
                copy.mkdir(parents=True, exist_ok=True)
                continue
            sizes[path.partition("/")[0]] += place.stat().st_size
            count += 1
            if sizes.total() > most or count > _MOST_FILES:
                break
            shutil.copy2(place, copy)
            copy.chmod(copy.stat().st_mode | 0o600)
        except OSError as error:
            raise ClientError(f"{place}: {error.strerror}; make it readable, or name it in .ddpignore") from None
    else:
        return
    raise ClientError(
        f"{folder}: each run needs a copy of this folder, which has more than {format_size(most)} or {_MOST_FILES} "
        f"files. Largest entries so far: {list_largest(sizes.items())}. Name what the script does not need in "
        ".ddpignore, and move data out of the folder: the script can read it by an absolute path"
    )


def list_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the path below the folder and the place of each file that is copied. Raises: ClientError."""
    root = folder.resolve()
    for path, place in islice(_list_entries(root, "", (root,)), _MOST_FILES):
        if place.is_file():
            yield path, place


def _list_entries(folder: Path, prefix: str, above: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    """Yield the path and the place of each folder and regular file. ``above``: the folders that links led to."""
    try:
        for path, name in Selection(folder, on_machine=True).walk():
            place = Path(name)
            if not place.is_symlink():
                yield f"{prefix}{path}", place
                continue
            place = place.resolve()
            if place.is_file():
                yield f"{prefix}{path}", place
            elif place.is_dir() and not any(place == outer or place in outer.parents for outer in above):
                yield f"{prefix}{path}/", place
                yield from _list_entries(place, f"{prefix}{path}/", (*above, place))
    except CannotPack as error:
        raise ClientError(str(error)) from None
