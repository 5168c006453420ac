"""A slow link between two ranks of this machine: two network namespaces, which only root may create."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

# Two namespaces and the cable between them; the names are unlikely to exist already.
_SPACES = ("ddpbench0", "ddpbench1")
_DEVICES = ("ddpbench-a", "ddpbench-b")
_ADDRESSES = ("10.213.77.1", "10.213.77.2")


def find_obstacle() -> str:
    """Return why this machine can create no slow link, or an empty text."""
    lacking = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if lacking:
        return f"{' and '.join(lacking)} not found"
    return "" if os.geteuid() == 0 else "only root may make network namespaces"


@contextlib.contextmanager
def slow_link(rate: str) -> Iterator[dict[str, Any]]:
    """Create two network namespaces whose only connection has ``rate`` each way, in the notation of ``tc``.

    Yields the arguments with which :func:`.launch.run` starts one rank in each.
    Raises: ``subprocess.CalledProcessError``.
    """

    def do(words: str) -> None:
        subprocess.run(words.split(), check=True, capture_output=True)

    try:
        for space in _SPACES:
            do(f"ip netns add {space}")
        ends = [f"{device} netns {space}" for device, space in zip(_DEVICES, _SPACES, strict=True)]
        do(f"ip link add {ends[0]} type veth peer name {ends[1]}")
        for space, device, address in zip(_SPACES, _DEVICES, _ADDRESSES, strict=True):
            inside = f"ip netns exec {space}"
            do(f"{inside} ip address add {address}/24 dev {device}")
            do(f"{inside} ip link set {device} up")
            do(f"{inside} ip link set lo up")
            # A packet of a veth may be 64 KiB large: the bucket must hold some of them.
            do(f"{inside} tc qdisc add dev {device} root tbf rate {rate} burst 256kb latency 50ms")
        prefixes = [
            f"ip netns exec {space} env GLOO_SOCKET_IFNAME={device}".split()
            for space, device in zip(_SPACES, _DEVICES, strict=True)
        ]
        yield {"prefixes": prefixes, "environ": {"MASTER_ADDR": _ADDRESSES[0]}}
    finally:
        for space in _SPACES:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)
