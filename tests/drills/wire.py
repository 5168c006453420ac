"""A wire between network namespaces, made of TUN devices: it can be cut, and it can be slow.

    wire.py NETWORK NAMESPACE...

Namespace i gets a device ``wire`` with the address NETWORK.(i + 10); the last address, NETWORK.254, is this machine's
own. Lines on standard input change what lies between the namespaces: ``cut``, ``mend``, ``slow SECONDS``. The end of
the input is the end of the wire.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time

_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_TUN = 0x0001
_NO_HEADER = 0x1000
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_FIRST = 10
_HERE = 254


def open_end(namespace: str | None, name: str, address: str) -> int:
    """Create a device in a namespace (None: this one). Return the descriptor of its packets."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if namespace is not None:
        there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        if libc.setns(there, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        os.close(there)
    try:
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TUN | _NO_HEADER))
        for words in (["addr", "add", f"{address}/24", "dev", name], ["link", "set", name, "up"]):
            subprocess.run(["ip", *words], check=True)
        if namespace is not None:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    finally:
        if libc.setns(home, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "cannot come back")
        os.close(home)
    return end


class PacketForwarder:
    """Forwards packets by the last byte of their destination."""

    def __init__(self, ends: dict[int, int]) -> None:
        self._ends = ends
        self._numbers = {end: number for number, end in ends.items()}
        self._waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
        self._cut = False
        self._delay = 0.0

    def run(self) -> None:
        """Forward packets until the input ends."""
        print("ready", flush=True)
        while True:
            pause = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            for source in select.select([0, *self._numbers], [], [], pause)[0]:
                if source == 0:
                    line = os.read(0, 4096).decode()
                    if not line:
                        return
                    for words in map(str.split, line.splitlines()):
                        self._obey(words)
                else:
                    self._take(self._numbers[source], os.read(source, 65536))
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, number, packet = self._waiting.popleft()
                self._send(number, packet)

    def _obey(self, words: list[str]) -> None:
        if words[0] in ("cut", "mend"):
            self._cut = words[0] == "cut"
        else:
            self._delay = float(words[1])

    def _take(self, source: int, packet: bytes) -> None:
        if packet[0] >> 4 != 4:
            return  # the kernel's IPv6 neighbour discovery
        target = packet[19]
        if target not in self._ends:
            return
        between = _HERE not in (source, target)
        if between and self._cut:
            return
        if between and self._delay:
            self._waiting.append((time.monotonic() + self._delay, target, packet))
        else:
            self._send(target, packet)

    def _send(self, number: int, packet: bytes) -> None:
        try:
            os.write(self._ends[number], packet)
        except OSError:
            pass  # TCP sends it again


def main() -> None:
    """Create the devices and forward packets."""
    network, *namespaces = sys.argv[1:]
    names = dict(enumerate(namespaces, _FIRST))
    ends = {number: open_end(name, "wire", f"{network}.{number}") for number, name in names.items()}
    ends[_HERE] = open_end(None, f"wire{os.getpid()}"[:15], f"{network}.{_HERE}")
    PacketForwarder(ends).run()


if __name__ == "__main__":
    main()
