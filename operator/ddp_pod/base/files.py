"""The launcher's log, its archive, and the JSON files through which the processes of a pod exchange records."""

import importlib.util
import json
import os
import sys
import zipfile
from typing import Any

ARCHIVE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # launcher.zip in a pod
BOOTSTRAP = os.path.join(os.path.dirname(ARCHIVE), "launcher.py")  # the name of bootstrap.py in a pod
LOCAL_TYPES = ("tmpfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs")
"""File systems that no other machine changes, and whose server always answers."""
_FILE_LIMIT = 1 << 20  # bytes
_SDK = "ddp_sdk"
_DELIVERED = (f"{_SDK}/", "ddp_trainer/")  # in images without them


def log(text: str) -> None:
    """Write lines to stderr in one call, each with the launcher's prefix."""
    sys.stderr.write("".join(f"[launcher] {line}\n" for line in text.splitlines()))
    sys.stderr.flush()


def is_own_file(path: str) -> bool:
    """Return whether a stack frame with this file belongs to the launcher."""
    return path == BOOTSTRAP or path.startswith(ARCHIVE + os.sep)


def write_json(path: str, value: Any) -> None:
    """Write a file atomically. Raises: OSError."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(temporary, path)


def try_write_json(path: str, value: Any) -> None:
    """Write a file atomically; log an OSError, such as a full disk, instead of raising it."""
    try:
        write_json(path, value)
    except OSError as error:
        log(f"cannot write {path}: {error.strerror}")


def read_json(path: str, limit: int = _FILE_LIMIT) -> dict[str, Any]:
    """Return the JSON object in a file of ``limit`` characters; an empty one if it is missing or contains none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            value = json.loads(file.read(limit))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def add_delivered_packages(runtime: str) -> None:
    """Extract what scripts import of this project, and let all later Python processes find it. Raises: OSError.

    A folder of PYTHONPATH precedes the image's packages. The image's own take precedence: its trainer may be of another
    version, and needs the modules that were installed with it.
    """
    if importlib.util.find_spec(_SDK) is not None:
        return
    folder = os.path.join(runtime, "python")
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(_DELIVERED)])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), folder)))
