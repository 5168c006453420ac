"""A pod behind a broken network: a program for tests, which prints what each side does during the partition and after.

Run as ``unshare --user --map-root-user --net --fork --kill-child python partition.py``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from ddp_pod.base.pod import Pod
from ddp_pod.contract.plan import VERSION, PodPlan
from ddp_pod.features.lost_nodes.peers import Address, probe_port
from ddp_pod.torchrun.rendezvous import PodRendezvous, PodReplacedError
from ddp_pod.torchrun.store import host_store

PATIENCE: Final = 120.0
PLAN: Final = PodPlan(
    version=VERSION,
    nodes=2,
    spares=0,
    nproc_per_node=1,
    elastic=False,
    in_place_restarts=0,
    join_timeout_seconds=600,
    non_retryable_exit_codes=(),
    success_policy="AllNodes",
    auto_instrument=True,
    warm_start=True,
)


class Partition:
    """Packets of some local ports are dropped, in both directions or in one."""

    def cut(self, *rules: str) -> None:
        chain = "".join(f"{rule} drop\n" for rule in rules)
        text = f"table inet cut {{\nchain in {{\ntype filter hook input priority 0\n{chain}}}\n}}\n"
        subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)

    def heal(self) -> None:
        subprocess.run(["nft", "delete", "table", "inet", "cut"], check=True)


def list_client_ports(port: int) -> set[int]:
    """Return the ports of this machine's connections to a port."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {int(row[1].split(":")[1], 16) for row in rows if int(row[2].split(":")[1], 16) == port and row[3] == "01"}


def until(probe: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not probe():
        if time.monotonic() > deadline:
            raise SystemExit("never happened")
        time.sleep(0.05)


def describe(joined: Future[Any]) -> str:
    """Return the rank that a pod has got in its round, or why it got none."""
    try:
        info = joined.result(PATIENCE)
    except PodReplacedError as error:
        return str(error)
    return f"rank {info.rank} of {info.world_size}"


def main() -> dict[str, Any]:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    threads = ThreadPoolExecutor(8)
    store = host_store("127.0.0.1", 0)
    folder = tempfile.mkdtemp()

    def start(index: int, identity: str) -> PodRendezvous:
        own = {"node": index, "master": "127.0.0.1", "port": store.port, "grace": 30.0, "metrics_port": 0}
        signing: dict[str, Any] = {"secret": "secret", "identity": identity, "run_id": "run-1"}
        return PodRendezvous(Pod(**vars(PLAN), **own, **signing, runtime=folder, oom_kills=0))

    found: dict[str, Any] = {}
    zero = start(0, "zero")
    before = list_client_ports(store.port)
    lost = start(1, "lost")
    own = list_client_ports(store.port) - before
    first = [threads.submit(pod.next_rendezvous) for pod in (zero, lost)]
    found["before"] = [describe(joined) for joined in first]

    server = socket.create_server(("127.0.0.1", 0))
    address = Address(socket.AF_INET, "127.0.0.1")
    port = server.getsockname()[1]
    found["answers"] = [probe_port(address, port)]
    partition = Partition()
    cut_ports = [f"tcp {side} {number}" for number in own for side in ("sport", "dport")]
    partition.cut(*cut_ports, f"tcp dport {port}")
    found["answers"].append(probe_port(address, port))

    # Both sides want to go on: the lost pod by itself, its peer with another one in its place.
    alone = threads.submit(lost.next_rendezvous)
    successor = threads.submit(start(1, "second").next_rendezvous)
    until(lambda: zero.num_nodes_waiting())
    found["peer"] = describe(threads.submit(zero.next_rendezvous))
    found["successor"] = describe(successor)
    found["lost during the partition"] = alone.done()

    partition.heal()
    found["answers"].append(probe_port(address, port))
    found["lost after the partition"] = describe(alone)
    zero._read_at = 0.0
    found["peers restart again"] = bool(zero.num_nodes_waiting())
    found["one-way"] = read_one_way(partition, address, port)
    return found


def read_one_way(partition: Partition, address: Address, port: int) -> bool:
    """Return whether a peer answers whose packets are lost in one direction only."""
    partition.cut(f"tcp sport {port}")
    answers = probe_port(address, port)
    partition.heal()
    return answers


if __name__ == "__main__":
    print(json.dumps(main()), flush=True)
    os._exit(0)  # threads may hang in the store
