"""Find what earlier trainings have left in the user's folder: with it a script may make no step any more."""

import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

from ddp_cli.features.check.copying import list_files
from ddp_cli.local.git import ask_git

_SOURCE: Final = ".py"
_ARCHIVE: Final = b"PK\x03\x04"
_PICKLE: Final = b"\x80"
_PROTOCOLS: Final = range(2, 6)
_ENTRY: Final = "data.pkl"  # of an archive of torch.save
_SIZE_BYTES: Final = 8  # at the beginning of a file of safetensors


def find_outputs(folder: Path, opened: Collection[str]) -> list[str]:
    """Return the folders and files of earlier trainings: those that a run has read first, then the newest.

    ``opened``: files that a run without a step has read. A training has written what git does not track and, without
    git, what is newer than all sources. Other such files, such as data, do not count without a checkpoint beside them.
    """
    files = dict(list_files(folder))
    written = set(_list_written(folder, files))
    entries: dict[str, list[str]] = {}
    for path in sorted(written):
        if is_checkpoint(files[path]):
            entries.setdefault(_find_entry(path, written, files), []).append(path)

    def rank(entry: str) -> tuple[bool, float]:
        is_read = any(path == entry or path.startswith(f"{entry}/") for path in opened)
        return is_read, max(files[path].stat().st_mtime for path in entries[entry])

    return sorted(entries, key=rank, reverse=True)


def is_checkpoint(file: Path) -> bool:
    """Return whether a file has the content that PyTorch or safetensors writes."""
    with suppress(OSError, zipfile.BadZipFile), file.open("rb") as stream:
        head = stream.read(_SIZE_BYTES + 1)
        if head.startswith(_ARCHIVE):
            with zipfile.ZipFile(stream) as archive:
                return any(PurePosixPath(name).name == _ENTRY for name in archive.namelist())
        size = int.from_bytes(head[:_SIZE_BYTES], "little")
        is_safetensors = head[_SIZE_BYTES:] == b"{" and size < file.stat().st_size
        return is_safetensors or (head[:1] == _PICKLE and len(head) > 1 and head[1] in _PROTOCOLS)
    return False


def _list_written(folder: Path, files: Mapping[str, Path]) -> Iterator[str]:
    tracked = {*ask_git(folder, "ls-files", "-z").split("\0")} - {""}
    sources = [file.stat().st_mtime for path, file in files.items() if path.endswith(_SOURCE)]
    since = max(sources, default=0.0)
    for path, file in files.items():
        is_later = path not in tracked if tracked else file.stat().st_mtime > since
        if is_later and not path.endswith(_SOURCE):
            yield path


def _find_entry(path: str, written: Collection[str], files: Mapping[str, Path]) -> str:
    """Return the outermost folder of a file that has written files alone; the file itself without one."""
    for parent in list(PurePosixPath(path).parents)[-2::-1]:
        inside = [other for other in files if other.startswith(f"{parent}/")]
        if all(other in written for other in inside):
            return str(parent)
    return path
