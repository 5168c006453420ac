"""The digest of a requirements file and of the files that it names, which decides whether pip has to run again."""

import codecs
import contextlib
import hashlib
import os
import re
import urllib.parse
from collections.abc import Iterator

from ...contract.plan import CodeConfig

_MOST_FILES = 1000
_MOST_ENTRIES = 10_000  # of a folder with packages
_MOST_BYTES = 16 << 20  # of one file of requirements
_PIECE = 1 << 20
_PROJECT_FILES = ("pyproject.toml", "setup.cfg", "setup.py", "requirements.txt")
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip
_NESTED = ("-r", "--requirement", "-c", "--constraint")
_EDITABLE = ("-e", "--editable")
_OPTION = re.compile(r"(-[rcef]|--(?:requirement|constraint|editable|find-links))(?:\s*=\s*|\s*)(.*)")
_PATH = re.compile(r"\.?\.?/.*|\.\.?|file:.*|.*/.*|.*\.(?:whl|zip|tar\.gz|tgz|tar\.bz2)")


def digest_requirements(path: str, code: CodeConfig) -> str:
    """Return the digest of a requirements file, of those that it includes, and of the packages on this machine.

    A line that names no file adds nothing beyond its own text, so an unusual line costs a reinstallation at most.
    Raises: OSError.
    """
    total = hashlib.sha256()
    waiting = [path]
    seen: set[str] = set()
    while waiting and len(seen) < _MOST_FILES:
        path = os.path.realpath(waiting.pop())
        if path in seen:
            continue
        seen.add(path)
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES)
        total.update(hashlib.sha256(data).digest())
        for option, name in _list_names(data):
            for folder in (os.path.dirname(path), code.folder):  # pip uses the first for files, the other for packages
                place = os.path.join(folder, name)
                if option not in _NESTED:
                    total.update(_describe_package(place, code, is_editable=option in _EDITABLE).encode())
                elif os.path.isfile(place):
                    waiting.append(place)
    return total.hexdigest()


def _list_names(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the option and the path of each line that may name a file or folder."""
    encoding = next((encoding for mark, encoding in _MARKS if data.startswith(mark)), "utf-8")
    text = data.decode(encoding, "replace").lstrip("\ufeff")
    for line in re.sub(r"\\\r?\n", "", text).splitlines():
        line = os.path.expandvars(re.sub(r"(^|\s)#.*", "", line)).strip()
        match = _OPTION.fullmatch(line)
        option, name = match.groups() if match else ("", line.rpartition(" @ ")[2])
        name = name.partition(";")[0].partition(" --")[0].strip("\"' ")
        if not option and not _PATH.fullmatch(name):
            continue
        if name.startswith("file:"):
            name = urllib.parse.unquote(urllib.parse.urlsplit(name).path)
        yield option, re.sub(r"\[[^]]*\]$", "", name)


def _describe_package(path: str, code: CodeConfig, *, is_editable: bool) -> str:
    """Return a text that changes with a package: a file, a project's folder, or a folder with files of packages."""
    path = os.path.realpath(path)
    is_packed = f"{path}/".startswith(f"{os.path.realpath(code.folder)}/")
    names: list[str] | tuple[str, ...] = _PROJECT_FILES
    if os.path.isfile(path):
        return _describe_file(path, is_packed=is_packed)
    if not os.path.isdir(path):
        return ""
    if not any(os.path.exists(os.path.join(path, name)) for name in _PROJECT_FILES[:3]):
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry, _ in zip(entries, range(_MOST_ENTRIES), strict=False))
    elif is_packed and not is_editable:
        return code.digest  # pip copies its modules
    return "".join(_describe_file(os.path.join(path, name), is_packed=is_packed) for name in names)


def _describe_file(path: str, *, is_packed: bool) -> str:
    """Return the path and the digest of a packed file; for a file of the image, which may be large, size and time."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        if not os.path.isfile(path):
            return ""
        if not is_packed:
            return f"{path} {status.st_size} {status.st_mtime_ns}\n"
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while data := file.read(_PIECE):
                digest.update(data)
        return f"{path} {digest.hexdigest()}\n"
    return ""
