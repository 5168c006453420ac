"""Find the full volume of this pod: the error of a write often names no path, and PyTorch's not even the reason."""

import itertools
import os
from typing import NamedTuple

_MOUNTS = "/proc/self/mounts"
_MOST_MOUNTS = 1000
# Others may belong to a server that does not answer.
_LOCAL_TYPES = ("tmpfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs")
_MIB = 1 << 20


class FullVolume(NamedTuple):
    """A mounted file system without space."""

    path: str
    description: str


def find_full_volume(path: str) -> FullVolume | None:
    """Return the full volume that contains a path, or any one if the path is empty."""
    below = os.path.realpath(path) if path else ""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as file:
            mounts = [line.split() for line in itertools.islice(file, _MOST_MOUNTS)]
        for _, mount, kind, options, *_ in reversed(mounts):  # the innermost is mounted last
            is_elsewhere = below and os.path.commonpath((below, mount)) != mount
            if is_elsewhere or kind not in _LOCAL_TYPES or "ro" in options.split(","):
                continue
            space = os.statvfs(mount)
            if space.f_files and not space.f_favail:
                return FullVolume(mount, f"the volume at {mount} has too many files: no inode is free")
            if space.f_blocks and space.f_bavail * space.f_frsize < _MIB:
                size = space.f_blocks * space.f_frsize / _MIB
                return FullVolume(mount, f"the volume at {mount} is full: {kind} of {size:.0f} MiB")
    except (OSError, ValueError):
        pass
    return None
