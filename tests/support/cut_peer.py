"""A peer behind a cut network: a program for tests, which prints the launcher's report before and after.

Run as ``unshare --user --map-root-user --net --fork --kill-child python cut_peer.py``.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from typing import Final

from ddp_pod.network.connections import list_unacknowledged

PATIENCE: Final = 60.0


def main() -> list[list[str]]:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    connection, _ = server.accept()
    client.sendall(b"acknowledged")
    before = [connection.address for connection in list_unacknowledged()]

    rules = f"table inet cut {{\nchain in {{\ntype filter hook input priority 0\ntcp dport {port} drop\n}}\n}}\n"
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)
    client.sendall(b"lost")
    after: list[str] = []
    until = time.monotonic() + PATIENCE
    while not after and time.monotonic() < until:
        time.sleep(0.2)
        after = [connection.address for connection in list_unacknowledged()]
    connection.close()
    return [before, after]


if __name__ == "__main__":
    print(json.dumps(main()))
