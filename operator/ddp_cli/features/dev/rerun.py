"""What a new run of `ddp dev` needs: the folder packed again, and its saved files."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from ddp_cli.client.errors import ClientError
from ddp_cli.client.job import Job
from ddp_cli.client.packing.archive import format_size, list_largest
from ddp_cli.client.packing.files import CannotPack, Selection
from ddp_cli.client.packing.packed import PackedCode, pack_code
from ddp_operator.api.parse import parse_resource
from ddp_operator.features import SCHEMA
from ddp_operator.manifests.template import resolve_template
from ddp_pod.features.dev.contract import MOST_CODE_BYTES

_POLL_SECONDS: Final = 0.25


class CannotPackAgain(ClientError):
    """The folder cannot be brought to the pods."""


def pack_again(job: Job, folder: Path, include: Sequence[str] = ()) -> PackedCode:
    """Pack the folder of a job for a new run, by the rules of `ddp submit`. Raises: CannotPackAgain."""
    parsed = parse_resource(job.resource, SCHEMA)
    code = job.resource["spec"].get("code")
    if not code:
        raise CannotPackAgain(
            f"{job.name} has no spec.code, so its pods run the code of their image or of this machine's folder: run it "
            "again with --no-code, or start the job with `ddp dev --workdir DIR`"
        )
    try:
        packed = pack_code(folder, include, pip=bool(code.get("pip")), limit=MOST_CODE_BYTES)
        template = resolve_template(parsed)
        packed.check_command(template.command, template.trainer.get("workingDir"))
    except CannotPack as error:
        raise CannotPackAgain(str(error)) from None
    size = len(packed.archive.data)
    if size > MOST_CODE_BYTES:
        raise CannotPackAgain(
            f"{folder} is {format_size(size)} when packed, and a run receives at most {format_size(MOST_CODE_BYTES)}. "
            f"Largest files: {list_largest(packed.archive.sizes)}. Name unneeded files in .ddpignore"
        )
    return packed


def watch_files(
    folder: Path, include: Sequence[str] = (), *, sleep: Callable[[float], None] = time.sleep
) -> Iterator[None]:
    """Yield after files that are packed have changed, and then not changed for a moment."""
    known = _list_files(folder, include)
    while True:
        sleep(_POLL_SECONDS)
        files = _list_files(folder, include)
        if files == known:
            continue
        while files != known:
            known = files
            sleep(_POLL_SECONDS)
            files = _list_files(folder, include)
        yield


def _list_files(folder: Path, include: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return what changes with the content of each file."""
    files: dict[str, tuple[int, ...]] = {}
    with suppress(CannotPack, OSError):  # of a file that was deleted just now
        for path, place in Selection(folder, include).walk():
            status = os.lstat(place)
            files[path] = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode)
    return files
