"""The launcher's log, and the JSON files through which the processes of a pod exchange records."""

import json
import os
import sys
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
BOOTSTRAP = os.path.join(_FOLDER, "launcher.py")  # as it is called where it is delivered
_FILE_LIMIT = 1 << 20  # bytes


def log(text: str) -> None:
    """Write lines of the launcher's own to stderr, each marked, in one piece."""
    sys.stderr.write("".join(f"[launcher] {line}\n" for line in text.splitlines()))
    sys.stderr.flush()


def is_own_file(path: str) -> bool:
    """Tell whether a frame with this file is the launcher's own."""
    return os.path.dirname(path) == _FOLDER


def write_json(path: str, value: Any) -> None:
    """Write a file that is either whole or not there."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(temporary, path)


def try_write_json(path: str, value: Any) -> None:
    """Write a file as ``write_json`` does; a full disk costs no more than a line of the log."""
    try:
        write_json(path, value)
    except OSError as error:
        log(f"cannot write {path}: {error.strerror}")


def read_json(path: str) -> dict[str, Any]:
    """Return a JSON object from a file that a worker wrote; nothing if it is not one."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            value = json.loads(file.read(_FILE_LIMIT))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
