"""Eight nodes of a job on two switches: a program for tests, which prints what the operator concludes when one is cut.

Run as ``unshare --user --map-root-user --net --fork --kill-child python split_network.py``. Each node is a network
namespace with a pod's probes, and renews its Lease at the operator's side of the network.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Final

from ddp_operator.api.cluster import Key, Snapshot
from ddp_operator.api.constants import KIND
from ddp_operator.api.resources import find_metrics_port
from ddp_operator.api.status import Status
from ddp_operator.features.lost_nodes.contacts import fetch_peers
from ddp_operator.features.lost_nodes.evidence import SILENT_SECONDS, LeaseAge
from ddp_operator.features.lost_nodes.leases import LeaseReading
from ddp_operator.features.lost_nodes.nodes import NodeReading
from ddp_operator.features.lost_nodes.watch import NodeWatch
from ddp_operator.kube.cache import ObjectCache
from ddp_pod.contract.records import encode_json
from ddp_pod.contract.report import PodReport
from ddp_pod.features.lost_nodes.peers import Address, PeerWatch
from ddp_pod.progress.metrics import MetricsEndpoint
from ddp_pod.progress.rank_progress import RankReader
from tests.support.builders import NOW, child_job, child_pod, job_manifest
from tests.support.launcher_config import launcher_pod

NODES: Final = 8
PATIENCE: Final = 90.0
RENEWAL: Final = 2.0
API_PORT: Final = 6443
OPERATOR: Final = "10.9.0.1"
JOB: Final = Key("default", "train")


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def find_address(index: int) -> str:
    return f"10.9.{index + 1}.1"


def serve_pod(index: int, port: int) -> None:
    """Probe the peers, serve what is known of them, and renew the Lease, until the parent ends."""
    sys.stdin.readline()  # the link is here
    for command in (f"addr add {find_address(index)}/16 dev eth0", "link set eth0 up", "link set lo up"):
        run("ip", *command.split())
    runtime = tempfile.mkdtemp()
    pod = launcher_pod(runtime, nodes=NODES, node=index, master="0", pod_host="{}", metrics_port=port)
    watch = PeerWatch(pod, resolve=lambda host: Address(socket.AF_INET, find_address(int(host))))

    def read_page(path: str, query: str) -> bytes | None:
        report = watch.read_page(path, query)
        return None if report is None else encode_json(report)

    MetricsEndpoint(RankReader(""), lambda ranks: PodReport(), read_page).serve(port, "")
    threading.Thread(target=watch.run, daemon=True).start()
    while True:
        with suppress(OSError), socket.create_connection((OPERATOR, API_PORT), timeout=RENEWAL) as connection:
            connection.sendall(bytes([index]))
        time.sleep(RENEWAL)


class Network:
    """Two switches with four nodes each; the operator is at the first one. ``renewed``: when each Lease was."""

    def __init__(self, stack: ExitStack, port: int) -> None:
        self.renewed = [0.0] * NODES
        commands = [
            "link set lo up",
            "link add switch0 type bridge",
            "link add switch1 type bridge",
            "link add uplink0 type veth peer name uplink1",
            "link set uplink0 master switch0 up",
            "link set uplink1 master switch1 up",
            "link set switch0 up",
            "link set switch1 up",
            f"addr add {OPERATOR}/16 dev switch0",
        ]
        for command in commands:
            run("ip", *command.split())
        server = socket.create_server((OPERATOR, API_PORT))
        threading.Thread(target=self._serve, args=(server,), daemon=True).start()
        for index in range(NODES):
            self._add_node(stack, index, port)

    def _add_node(self, stack: ExitStack, index: int, port: int) -> None:
        line = ["unshare", "--net", sys.executable, __file__, str(index), str(port)]
        node = stack.enter_context(subprocess.Popen(line, stdin=subprocess.PIPE, text=True))
        stack.callback(node.kill)
        own = os.readlink("/proc/self/ns/net")
        until(lambda: os.readlink(f"/proc/{node.pid}/ns/net") != own)
        half = index * 2 // NODES
        run(*f"ip link add node{index} type veth peer name eth0 netns {node.pid}".split())
        run(*f"ip link set node{index} master switch{half} up".split())
        assert node.stdin is not None
        node.stdin.write("go\n")
        node.stdin.flush()

    def _serve(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.settimeout(RENEWAL)
                index = connection.recv(1)
                if index:
                    self.renewed[index[0]] = time.monotonic()

    async def read_lease(self, node: str) -> LeaseReading:
        """Return the age of a node's Lease."""
        return LeaseReading(LeaseAge(time.monotonic() - self.renewed[int(node)], RENEWAL))

    async def read_node(self, node: str) -> NodeReading:
        """Return a node, whose boot is always the same."""
        return NodeReading(node)


def until(probe: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not probe():
        if time.monotonic() > deadline:
            raise SystemExit("never happened")
        time.sleep(0.05)


async def follow(network: Network, port: int) -> dict[str, Any]:
    """Let the operator follow the job while parts of the network are cut."""
    store = ObjectCache()
    resource = job_manifest(JOB.name, nodes=NODES)
    resource["metadata"] |= {"uid": "uid-1", "resourceVersion": "1", "namespace": JOB.namespace}
    resource["status"] = {"attempt": 1}
    store.apply(KIND, resource)
    pods = [child_pod(index, node=f"{index}", status={"podIP": find_address(index)}) for index in range(NODES)]
    for number, (kind, child) in enumerate([("Job", child_job()), *(("Pod", pod) for pod in pods)]):
        child["metadata"]["resourceVersion"] = str(number + 2)
        store.apply(kind, child)
    names = {pod["metadata"]["uid"]: index for index, pod in enumerate(pods)}
    lost: set[int] = set()
    watch = NodeWatch(store, lambda key: None, fetch_peers, network.read_lease, network.read_node)

    def list_silent(seconds: float) -> set[int]:
        found = watch.list_suspicions(JOB)
        lost.update(names[uid] for uid, suspicion in found.items() if suspicion.is_lost)
        now = watch.clock()
        return {names[uid] for uid, one in found.items() if (now - one.since).total_seconds() > seconds}

    async def wait(probe: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not probe():
            if time.monotonic() > deadline:
                raise SystemExit(f"never happened: {watch.list_suspicions(JOB)}")
            await asyncio.sleep(0.05)

    results: dict[str, Any] = {}
    assert find_metrics_port(resource) == port
    watch.note_status(Snapshot(resource), Status(), Status(phase="Running", attempt=1), NOW)
    await asyncio.sleep(10)  # each pod has probed each of its peers
    for name, link, silent in (("half", "uplink0", {4, 5, 6, 7}), ("one", "node6", {6})):
        lost.clear()
        run("ip", "link", "set", link, "down")
        await wait(lambda silent=silent: list_silent(SILENT_SECONDS + 2) >= silent)
        results[name] = sorted(lost)
        results[f"{name}: messages"] = sorted({one.message for one in watch.list_suspicions(JOB).values()})
        run("ip", "link", "set", link, "up")
        await wait(lambda: not watch.list_suspicions(JOB))
        mended = time.monotonic()
        await wait(lambda mended=mended: min(network.renewed) > mended)
    await watch.close()
    return results


def main() -> None:
    port = find_metrics_port(job_manifest(JOB.name, nodes=NODES))
    with ExitStack() as stack:
        network = Network(stack, port)
        until(lambda: all(network.renewed))
        print(json.dumps(asyncio.run(follow(network, port))), flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        serve_pod(int(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
