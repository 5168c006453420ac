"""The subcommand ``history``: store the record of an ended job, and delete the oldest records beyond a number.

In a folder it is written under a temporary name and renamed. Object stores have no rename, and write a file as a whole.
"""

import base64
import os
import re
from collections.abc import Sequence
from contextlib import suppress

from ...base.files import log
from ...contract.credentials import hide_credentials
from ...contract.names import EXIT_OK, EXIT_RETRYABLE, EXIT_USER_ERROR
from ...failures.termination import build_end, finish
from ...transfer.sources import UnusableStorage, make_folder, open_storage

KEEP = 100
"""Records of one namespace in one place."""
_FILE = re.compile(r"\d{8}T\d{6}Z-.*\.json\.gz")


def main(argv: Sequence[str]) -> int:
    """Store a record. ``argv``: its content in base64, the URL or folder, and its path there. Returns the exit code."""
    content, place, path = argv
    folder, _, name = path.rpartition("/")
    os.umask(0o002)  # users of other jobs share the folder
    local = place.removeprefix("file://")
    store = _store_at_url if "://" in local else _store_in_folder
    try:
        store(local, folder, name, base64.b64decode(content))
    except UnusableStorage as error:
        return finish(build_end(0, EXIT_USER_ERROR, str(error)))
    except Exception as error:  # each fsspec plug-in raises different types
        message = hide_credentials(f"{place} cannot be written: {type(error).__name__}: {error}")[:500]
        return finish(build_end(0, EXIT_RETRYABLE, message, remedy="check the permissions of the pod's user"))
    log(f"stored the job's record as {hide_credentials(place)}/{path}")
    return EXIT_OK


def _store_in_folder(place: str, folder: str, name: str, data: bytes) -> None:
    whole = os.path.join(place, folder)
    os.makedirs(whole, exist_ok=True)
    temporary = os.path.join(whole, f".{name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, os.path.join(whole, name))
    for old in _list_old(os.listdir(whole)):
        with suppress(OSError):  # a pod of another job deletes it too, or its user may not
            os.unlink(os.path.join(whole, old))


def _store_at_url(place: str, folder: str, name: str, data: bytes) -> None:
    system, root = open_storage(place)
    whole = f"{root}/{folder}"
    make_folder(system, whole)
    system.pipe_file(f"{whole}/{name}", data)
    for old in _list_old([os.path.basename(path) for path in system.ls(whole, detail=False)]):
        with suppress(Exception):
            system.rm_file(f"{whole}/{old}")


def _list_old(names: Sequence[str]) -> list[str]:
    """Return the names of all records except the newest."""
    return sorted(filter(_FILE.fullmatch, names))[:-KEEP]
