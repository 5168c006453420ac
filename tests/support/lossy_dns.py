"""Two processes resolve names by a DNS server that loses the first packets about each, and this one prints the order.

Run as ``unshare --user --map-root-user --net --fork --kill-child python lossy_dns.py FILE``. FILE takes the place of
the machine's resolv.conf. ``default`` has the C library's options, ``launcher`` those of a launcher's processes.
"""

import os
import select
import socket
import subprocess
import sys
import threading
from collections import Counter
from typing import Final

from ddp_pod.network.resolver import repeat_lost_queries_soon

_ADDRESS: Final = "127.0.0.77"
_LOST: Final = 2  # the queries for an IPv4 and an IPv6 address
_HEADER_BYTES: Final = 12
_A_RECORD: Final = b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x05\x00\x04\x7f\x00\x00\x05"  # 127.0.0.5 for the question
_CODE: Final = "import socket, sys; socket.getaddrinfo(sys.argv[1], 80, type=socket.SOCK_STREAM); print(sys.argv[1])"


def serve(listener: socket.socket) -> None:
    """Answer queries, except the first ones about each name (RFC 1035, section 4)."""
    counts = Counter[bytes]()
    while True:
        query, address = listener.recvfrom(4096)
        end = query.index(b"\0", _HEADER_BYTES) + 5  # of the name, the type and the class
        name = query[_HEADER_BYTES : end - 4]
        counts[name] += 1
        if counts[name] <= _LOST:
            continue
        is_ipv4 = query[end - 4 : end - 2] == b"\x00\x01"
        counters = b"\x00\x01" + (b"\x00\x01" if is_ipv4 else b"\x00\x00") + b"\x00\x00\x00\x00"
        response = query[:2] + b"\x81\x80" + counters + query[_HEADER_BYTES:end]
        listener.sendto(response + (_A_RECORD if is_ipv4 else b""), address)


def resolve(name: str, environment: dict[str, str]) -> int:
    """Start a process that resolves a name; return the pipe into which it then writes the name."""
    done, end = os.pipe()
    subprocess.Popen([sys.executable, "-c", _CODE, name], env=environment, stdout=end)
    os.close(end)
    return done


def main() -> None:
    """Serve, and print the names in the order in which they were resolved."""
    (path,) = sys.argv[1:]
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with open(path, "w", encoding="ascii") as file:
        file.write(f"nameserver {_ADDRESS}\n")
    subprocess.run(["mount", "--bind", path, "/etc/resolv.conf"], check=True)
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.bind((_ADDRESS, 53))
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    environment = dict(os.environ)
    environment.pop("RES_OPTIONS", None)
    waiting = [resolve("default", dict(environment))]
    repeat_lost_queries_soon(environment)
    waiting.append(resolve("launcher", environment))
    while waiting:
        for pipe in select.select(waiting, [], [])[0]:
            waiting.remove(pipe)
            print(os.read(pipe, 100).decode().strip())


if __name__ == "__main__":
    main()
