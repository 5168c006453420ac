"""Shards of torch.distributed.checkpoint in pods other than pod 0, which ``checkpoint.url`` does not upload."""

import os
import re
import time
from typing import Callable, Iterable, Optional

_SHARD = re.compile(r"__(\d+)_\d+\.distcp")
_SECONDS = 5.0
_MAX_FILES = 100_000  # of a folder, in one search


def find_shard(folder: str, ranks: Iterable[int]) -> Optional[str]:
    """Return a file in which one of the ranks has saved its shard, relative to the folder; None if there is none."""
    own = set(ranks)
    searched = 0
    for path, _, names in os.walk(folder):
        for name in names:
            match = _SHARD.fullmatch(name)
            if match and int(match[1]) in own:
                return os.path.relpath(os.path.join(path, name), folder)
        searched += len(names)
        if searched > _MAX_FILES:
            return None
    return None


def wait_for_shard(folder: str, list_ranks: Callable[[], Iterable[int]]) -> str:
    """Wait until a rank of this pod has saved a shard, and return why the pod cannot continue."""
    while True:
        shard = find_shard(folder, list_ranks())
        if shard is not None:
            return (
                f"checkpoint.url uploads the files of pod 0 only, and this pod's ranks have saved the shard {shard}. "
                "Use checkpoint.claimName, or write shards to the store by torch.distributed.checkpoint.FsspecWriter."
            )
        time.sleep(_SECONDS)
