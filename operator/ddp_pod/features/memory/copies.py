"""Copies of the training state in shared memory, written by ``ddp_sdk.memory``: their metrics and their end.

A pod that ends before the job loses its memory. It saves its newest copies in the checkpoint folder, from which the
pods of the next attempt continue. ``ddp_sdk/memory/copies.py`` defines the files.
"""

import os
import shutil
import stat
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ...base.files import log
from ...contract.names import ENV_ATTEMPT, ENV_CHECKPOINT_DIR, ENV_MEMORY_DIR, ENV_RUN_ID
from ...contract.plain_files import open_plain
from ...contract.processes import process_state
from ...contract.report import MemoryCopies

HEADER_BYTES = 4096
_MAGIC = b"DDPMEM01"
_FIELDS = struct.Struct("<8sqqqqqqQdqd")
_CRC = struct.Struct("<I")
_REPLICATED = 1
_CHUNK_BYTES = 8 << 20
_UNDER_WAY = b"DDPMEMWR"
_WRITER = struct.Struct("<8sq")
_SECONDS_FOR_COPIES = 5.0
_POLL_SECONDS = 0.005


class MemoryCopy(NamedTuple):
    """A file with a copy. ``kind``: 1 for the state of all ranks, 2 for that of ``rank`` of ``world`` ranks.

    ``saves``, ``stalled``: how often the writing process saved, and for how many seconds that stopped training.
    """

    path: str
    size: int
    kind: int
    step: int
    world: int
    rank: int
    time: float
    saves: int
    stalled: float

    @property
    def name(self) -> str:
        """Name of the state: the same in every pod that has a copy of it."""
        return "state" if self.kind == _REPLICATED else f"shard-{self.rank}"


def find_memory_folder(pod_index: int, env: Mapping[str, str]) -> str | None:
    """Return the pod's folder in shared memory; None if the job has none."""
    folder = env.get(ENV_MEMORY_DIR)
    return os.path.join(folder, f"pod-{pod_index}") if folder else None


def find_saved_folder(env: Mapping[str, str]) -> str | None:
    """Return the folder of saved copies, which all attempts of one resource share; None without a checkpoint folder."""
    checkpoints = env.get(ENV_CHECKPOINT_DIR)
    if not checkpoints:
        return None
    run = env.get(ENV_RUN_ID, "")
    suffix = f"-{env.get(ENV_ATTEMPT, '')}"
    return os.path.join(checkpoints, f"ddp-memory-{run[: -len(suffix)] if run.endswith(suffix) else run}")


def list_copies(folder: str) -> list[MemoryCopy]:
    """Return the complete copies in a folder, by the checksums of their headers."""
    copies = [_read_header(path) for path in _list_files(folder)]
    return [copy for copy in copies if copy is not None]


def _list_files(folder: str) -> list[str]:
    """Return the paths in the pod's folder.

    The memory may be that of the node, where others can plant files: none of a link, or of a folder open to them.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return []  # the script does not use MemoryCheckpoint
    try:
        status = os.fstat(descriptor)
        is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        return sorted(os.path.join(folder, name) for name in os.listdir(descriptor)) if is_private else []
    finally:
        os.close(descriptor)


def _read_header(path: str) -> MemoryCopy | None:
    try:
        with open(path, "rb", opener=open_plain) as file:
            data = file.read(_FIELDS.size + _CRC.size)
            allocated = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    fields = data[: _FIELDS.size]
    is_complete = len(data) == _FIELDS.size + _CRC.size and data.startswith(_MAGIC)
    if not is_complete or _CRC.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(fields):
        return None
    _, kind, step, world, rank, payload, manifest, _, written, saves, stalled = _FIELDS.unpack(fields)
    size = HEADER_BYTES + payload + manifest
    return MemoryCopy(path, size, kind, step, world, rank, written, saves, stalled) if size <= allocated else None


def summarize_copies(folder: str | None) -> MemoryCopies | None:
    """Return what the pod reports about its copies; None without any."""
    copies = list_copies(folder) if folder else []
    own = [copy for copy in copies if not os.path.basename(copy.path).startswith("peer-")]
    if not own:
        return None
    newest = max(own, key=lambda copy: copy.step)
    busiest = max(own, key=lambda copy: copy.stalled)
    size = sum(copy.size for copy in copies)
    return MemoryCopies(newest.step, newest.time, size, busiest.saves, busiest.stalled)


def wait_for_copies(pod_index: int, env: Mapping[str, str], seconds: float = _SECONDS_FOR_COPIES) -> None:
    """Wait until the ranks of this pod have completed the copies that they are writing.

    A copy is written while the next step runs. If a peer fails within that time, the state of the last completed step
    would be lost with the ranks. Copies of killed ranks are not waited for.
    """
    folder = find_memory_folder(pod_index, env)
    deadline = time.monotonic() + seconds
    while folder is not None and _has_copy_under_way(folder) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _has_copy_under_way(folder: str) -> bool:
    return any(process_state(_read_writer(path)) not in ("", "T") for path in _list_files(folder))


def _read_writer(path: str) -> int:
    """Return the process that is writing a copy into a file; 0 if there is none."""
    try:
        with open(path, "rb", opener=open_plain) as file:
            data = file.read(_WRITER.size)
    except OSError:
        return 0
    return int(_WRITER.unpack(data)[1]) if data.startswith(_UNDER_WAY) and len(data) == _WRITER.size else 0


def save_copies(pod_index: int, env: Mapping[str, str], *, checkpoint_step: float, deadline: float) -> None:
    """Save the pod's newest copies in the checkpoint folder, until ``deadline`` of the monotonic clock.

    ``checkpoint_step``: the step of the newest checkpoint of the script itself; older copies are not saved.
    """
    folder = find_memory_folder(pod_index, env)
    target = find_saved_folder(env)
    if folder is None or target is None:
        return
    suffix = f".pod-{pod_index}.tmp"
    _remove_unfinished(target, suffix)
    for copy in _choose_copies(list_copies(folder)):
        if copy.step <= checkpoint_step:
            continue
        try:
            if _save_file(copy, target, suffix, deadline):
                log(f"saved the copy of step {copy.step} in memory to {target} ({copy.size >> 20} MiB)")
        except OSError as error:
            log(f"the copy of step {copy.step} in memory is not saved to {target}: {error.strerror or error}")
            return


def _choose_copies(copies: Sequence[MemoryCopy]) -> list[MemoryCopy]:
    """Return the copies to save, the older ones first: the newest of replicated state, and all of shards.

    The newest shards of a pod may be of different steps, or of a step that other pods do not have.
    """
    steps = [copy.step for copy in copies if copy.kind == _REPLICATED]
    chosen = [copy for copy in copies if copy.kind != _REPLICATED or copy.step == max(steps)]
    return sorted(chosen, key=lambda copy: copy.step)


def _remove_unfinished(target: str, suffix: str) -> None:
    """Delete the files that former launchers of this pod were writing when they were killed, gigabytes each.

    Other pods may be writing theirs at this time.
    """
    with suppress(OSError), _open_folder(target) as folder:  # there is no folder yet, or a file belongs to another user
        for name in os.listdir(folder):
            if name.endswith(suffix):
                os.unlink(name, dir_fd=folder)


@contextmanager
def _open_folder(path: str) -> Iterator[int]:
    """Open a folder into which others may write, without following a link. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _save_file(copy: MemoryCopy, target: str, suffix: str, deadline: float) -> bool:
    """Write a file that is complete or does not exist. Returns False if another pod has saved it. Raises: OSError.

    ``suffix``: of its name until it is complete. Others may write to the checkpoint folder: no link is followed.
    """
    os.makedirs(target, exist_ok=True)
    with _open_folder(target) as folder:
        names = [name for name in os.listdir(folder) if _is_plain(name, folder)]
        name = f"{copy.name}-{copy.step}"
        if name in names:
            return False
        _write_copy(copy, name, f"{name}{suffix}", folder, deadline)
        for former in _list_former([*names, name], copy):
            with suppress(FileNotFoundError):  # another pod has deleted it
                os.unlink(former, dir_fd=folder)
        return True


def _is_plain(name: str, folder: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False  # another pod has deleted it


def _write_copy(copy: MemoryCopy, name: str, temporary: str, folder: int, deadline: float) -> None:
    """Write a file of a folder, given by its descriptor, under another name first. Raises: OSError."""
    descriptor = open_plain(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, folder=folder)
    try:
        with open(copy.path, "rb", opener=open_plain) as source, open(descriptor, "wb") as file:
            left = copy.size
            while left:
                if time.monotonic() > deadline:
                    raise OSError("the grace period is over; raise spec.checkpoint.graceSeconds")
                chunk = source.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise OSError("the copy has changed")
                file.write(chunk)
                left -= len(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(temporary, dir_fd=folder)
        raise


def _list_former(names: Sequence[str], copy: MemoryCopy) -> list[str]:
    """Return the saved copies of the same state that are no longer useful: all but one of replicated state or two."""
    steps = []
    for name in names:
        state, _, step = name.rpartition("-")
        if state == copy.name and step.isdigit():
            steps.append(int(step))
    kept = 1 if copy.kind == _REPLICATED else 2
    return [f"{copy.name}-{step}" for step in sorted(steps)[:-kept]]


def remove_memory(pod_index: int, env: Mapping[str, str], *, succeeded: bool) -> None:
    """Delete the pod's copies: the memory may be that of the node. After success delete the saved ones as well."""
    folder = find_memory_folder(pod_index, env)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        try:
            os.rmdir(os.path.dirname(folder))
        except OSError:
            pass  # another pod of the job shares the memory, or there was none
    saved = find_saved_folder(env)
    if succeeded and pod_index == 0 and saved is not None:
        shutil.rmtree(saved, ignore_errors=True)
