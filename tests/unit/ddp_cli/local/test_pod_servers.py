"""Which pods are forked from a server. tests/integration/features/check forks them."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddp_cli.local.pod_servers import ForkedPod, PodServers
from ddp_operator.api.constants import ENV_LOCAL_POD
from ddp_pod.contract.names import ENV_COMPLETION_INDEX
from ddp_pod.contract.pod_start import PodServer, PodStart

# A server that notes its start, and forks no pod but reports a process: its own.
SERVER = """
import os, socket, sys
sys.path.insert(0, os.environ["OPERATOR"])
from ddp_pod.contract.pod_start import READY, receive_start
open(os.environ["NOTES"], "a").write("started\\n")
orders = socket.socket(fileno=int(sys.argv[2]))
orders.sendall(READY)
while order := receive_start(orders):
    start, descriptors = order
    if "REFUSES" not in start.environment:
        os.write(descriptors[2], str(os.getpid()).encode())
    for descriptor in descriptors:
        os.close(descriptor)
"""


class Pods:
    """Forks pods whose server is SERVER."""

    def __init__(self, folder: Path, count: int) -> None:
        self.notes = folder / "notes"
        self.launcher = folder / "launcher.py"
        self.launcher.write_text(SERVER)
        self.servers = PodServers(count)

    def fork(self, index: int, command: tuple[str, ...] = (), **variables: str) -> ForkedPod | None:
        environment = {
            "OPERATOR": str(Path(__file__).parents[4] / "operator"),
            "NOTES": str(self.notes),
            ENV_LOCAL_POD: "mark",
            ENV_COMPLETION_INDEX: str(index),
            **variables,
        }
        command = command or (sys.executable, str(self.launcher), "run", "--", "train.py")
        with open(os.devnull) as null:
            return self.servers.fork(command, environment, None, output=null.fileno(), lifeline=null.fileno())

    @property
    def started(self) -> int:
        return self.notes.read_text().count("started")


@pytest.fixture
def pods(tmp_path: Path) -> Pods:
    return Pods(tmp_path, 2)


def find_pid(pod: ForkedPod | None) -> int:
    assert pod is not None
    return pod.pid


def test_rank_gets_another_server_than_in_the_first_run(pods: Pods) -> None:
    first = [find_pid(pods.fork(index)) for index in range(2)]
    pods.servers.is_first = False
    later = [find_pid(pods.fork(index)) for index in range(2)]
    pods.servers.close()
    assert len({*first}) == 2
    assert later == first[::-1]
    assert pods.started == 2


def test_single_pod_gets_a_second_server_after_the_first_run(tmp_path: Path) -> None:
    pods = Pods(tmp_path, 1)
    first = find_pid(pods.fork(0))
    assert pods.started == 1
    pods.servers.is_first = False
    later = [find_pid(pods.fork(0)) for _ in range(2)]
    pods.servers.close()
    assert later[0] == later[1] != first


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        (("/bin/sh", "-c", "true"), {}),
        ((sys.executable, "other.py", "run"), {}),
        ((), {ENV_COMPLETION_INDEX: ""}),
    ],
    ids=["a program", "no launcher", "no index"],
)
def test_other_pod_starts_in_a_fresh_interpreter(
    pods: Pods, command: tuple[str, ...], variables: dict[str, str]
) -> None:
    assert pods.fork(0, command, **variables) is None
    assert not pods.notes.exists()


def test_pod_with_another_environment_for_libraries_starts_in_a_fresh_interpreter(pods: Pods) -> None:
    assert pods.fork(0, PYTHONPATH="/one") is not None
    assert pods.fork(0, PYTHONPATH="/other", NAME="other") is not None
    assert pods.fork(0, OMP_NUM_THREADS="4") is None
    pods.servers.close()


def test_pod_starts_in_a_fresh_interpreter_if_the_server_refuses_or_has_ended(pods: Pods) -> None:
    assert pods.fork(0, REFUSES="1") is None
    assert pods.fork(0) is not None
    pods.servers.close()
    assert pods.fork(0) is None


def test_server_that_ends_before_its_import_forks_no_pod(tmp_path: Path) -> None:
    launcher = tmp_path / "launcher.py"
    launcher.write_text("raise SystemExit(1)")
    server = PodServer((sys.executable, str(launcher)), {})
    assert not server.wait()
    assert not server.wait()
    assert not server.is_alive
    assert server.fork(PodStart((), {}, "/", "VARIABLE"), (1, 1, 1)) is None


def test_threads_wait_for_one_message_of_the_server(tmp_path: Path) -> None:
    launcher = tmp_path / "launcher.py"
    launcher.write_text(f"import time\n{SERVER.replace('orders.sendall', 'time.sleep(1.2); orders.sendall')}")
    environment = {"OPERATOR": str(Path(__file__).parents[4] / "operator"), "NOTES": str(tmp_path / "notes")}
    server = PodServer((sys.executable, str(launcher)), environment)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: server.wait(), range(4)))
    assert server.is_alive
    server.end()
