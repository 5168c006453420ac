"""Checkpoints of ``torch.distributed.checkpoint`` (DCP), whose files the ranks of all pods write.

Each rank writes its shards, ``__<rank>_<number>.distcp``. Rank 0 writes ``.metadata`` last, after all ranks have
finished, and that file contains the names of all shards. A checkpoint is complete if all of them exist.
"""

import os
import re
import time
from collections.abc import Iterable, Mapping

METADATA = ".metadata"
_SHARD = re.compile(r"__\d+_\d+\.distcp")
_SHARD_BYTES = re.compile(_SHARD.pattern.encode())
_PARTITION = re.compile(r"(?:\w+_)?zero_pp_rank_\d+_mp_rank_\d+_\w+\.pt")
_LONGEST_NAME = 64  # bytes
_CHUNK_BYTES = 1 << 20
_SECONDS_BETWEEN_SEARCHES = 2.0
_MAX_FILES = 100_000  # of a folder, in one search


def is_shard(path: str) -> bool:
    """Return whether a file is a shard of a DCP checkpoint."""
    return _SHARD.fullmatch(os.path.basename(path)) is not None


def is_metadata(path: str) -> bool:
    """Return whether a file is the list of the shards of a DCP checkpoint."""
    return os.path.basename(path) == METADATA


def is_partition(path: str) -> bool:
    """Return whether a file is one rank's partition of a checkpoint of DeepSpeed's ZeRO, which has no list of them."""
    return _PARTITION.fullmatch(os.path.basename(path)) is not None


def has_shards(folder: str) -> bool:
    """Return whether a folder contains a shard."""
    searched = 0
    for _, _, names in os.walk(folder):
        if any(map(is_shard, names)):
            return True
        searched += len(names)
        if searched > _MAX_FILES:
            return False
    return False


def wait_for_shards(folder: str) -> None:
    """Wait until a folder contains a shard."""
    while not has_shards(folder):
        time.sleep(_SECONDS_BETWEEN_SEARCHES)


def read_shard_names(path: str) -> frozenset[str]:
    """Return the names of the shards in a metadata file, which is a pickle that this does not load. Raises: OSError."""
    names: set[str] = set()
    rest = b""
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            names.update(name.decode() for name in _SHARD_BYTES.findall(rest + chunk))
            rest = (rest + chunk)[-_LONGEST_NAME:]
    return frozenset(names)


def list_checkpoint_folders(paths: Iterable[str]) -> set[str]:
    """Return the folders that contain shards or their list."""
    return {os.path.dirname(path) for path in paths if is_shard(path) or is_metadata(path)}


def find_missing_shards(shards: Mapping[str, Iterable[str]], existing: Iterable[str]) -> dict[str, list[str]]:
    """Return the paths of missing shards by checkpoint folder. ``shards``: the names in each folder's metadata."""
    known = set(existing)
    missing = {}
    for folder, names in shards.items():
        paths = sorted(os.path.join(folder, name) for name in names)
        absent = [path for path in paths if path not in known]
        if absent:
            missing[folder] = absent
    return missing
