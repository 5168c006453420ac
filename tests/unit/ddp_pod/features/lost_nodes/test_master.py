"""The move of pod 0: the agent restarts once the old store is silent and the new one accepts connections."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_pod.contract.failure_record import Failure
from ddp_pod.contract.report import PodReport
from ddp_pod.failures.agent_failure import STORE_ERRORS
from ddp_pod.features.lost_nodes import peers
from ddp_pod.features.lost_nodes.master import MasterWatch, accepts_connection, responds_to_request
from ddp_pod.features.lost_nodes.peers import Address
from ddp_pod.network.connections import Connection, list_servers
from ddp_pod.progress.metrics import MetricsEndpoint
from ddp_pod.progress.rank_progress import RankReader
from tests.support.launcher_config import launcher_pod

OLD = Connection("10.0.0.1", 1, 29400)
NEW = Address(socket.AF_INET, "10.0.0.9")


class FakeControl:
    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1

    def restart_agent(self, failure: Failure) -> None:
        self.failures.append(failure)


def restarts(folder: Path, *silent: Connection, now_at: Address | None = NEW, serves: bool = True) -> list[Failure]:
    control = FakeControl()
    pod = launcher_pod(folder, node=1, nodes=2, master="train-1-0.train", port=29400)
    watch = MasterWatch(pod, resolve=lambda host: now_at, accepts=lambda address, port: serves)
    watch.start(control)  # type: ignore[arg-type]
    watch.check(silent)
    watch.follow(())
    watch.follow(())
    return control.failures


def test_agent_restarts_when_pod_0_has_moved(tmp_path: Path) -> None:
    (failure,) = restarts(tmp_path, OLD)
    assert failure.exception_type in STORE_ERRORS
    assert failure.secondary
    assert "the new one is at 10.0.0.9:29400" in failure.message


@pytest.mark.parametrize(
    ("silent", "now_at", "serves"),
    [
        ((), NEW, True),
        ((OLD,), Address(socket.AF_INET, OLD.address), True),
        ((OLD,), None, True),
        ((OLD,), NEW, False),
        ((OLD._replace(port=443),), NEW, True),
    ],
    ids=["pod 0 acknowledges", "same address", "no name", "store not served yet", "another server is silent"],
)
def test_agent_continues_without_a_move(
    tmp_path: Path, silent: tuple[Connection, ...], now_at: Address | None, serves: bool
) -> None:
    assert restarts(tmp_path, *silent, now_at=now_at, serves=serves) == []


def test_outage_of_name_server_is_no_move(tmp_path: Path) -> None:
    def fail(host: str) -> Address | None:
        raise OSError("no name server")

    control = FakeControl()
    watch = MasterWatch(launcher_pod(tmp_path, node=1, nodes=2, master="train-1-0.train"), resolve=fail)
    watch.start(control)  # type: ignore[arg-type]
    watch.check([OLD])
    watch.follow(())
    assert control.failures == []


def moves(
    folder: Path,
    servers: set[str],
    *,
    now_at: Address | None = NEW,
    serves: bool = True,
    responses: tuple[bool, bool] = (True, False),
) -> bool:
    """Return whether the agent restarts. ``responses``: of the launchers at the new and at the old address."""
    control = FakeControl()
    pod = launcher_pod(folder, node=1, nodes=2, master="train-1-0.train", port=29400, metrics_port=9400)
    answers = dict(zip((NEW.host, OLD.address), responses, strict=True))
    watch = MasterWatch(
        pod,
        resolve=lambda host: now_at,
        accepts=lambda address, port: serves,
        responds=lambda address, port: answers[address.host],
    )
    watch.start(control)  # type: ignore[arg-type]
    for later in (60, 120):
        watch.check_response(servers, time.monotonic() + later)
    watch.follow(())
    return bool(control.failures)


def test_agent_restarts_when_frozen_pod_0_was_replaced(tmp_path: Path) -> None:
    assert moves(tmp_path, {OLD.address})


@pytest.mark.parametrize(
    ("servers", "options"),
    [
        (set(), {}),
        ({OLD.address}, {"now_at": Address(socket.AF_INET, OLD.address)}),
        ({OLD.address, NEW.host}, {}),
        ({OLD.address}, {"now_at": None}),
        ({OLD.address}, {"serves": False}),
        ({OLD.address}, {"responses": (True, True)}),
        ({OLD.address}, {"responses": (False, False)}),
    ],
    ids=[
        "no connection",
        "same address",
        "connected to the new one",
        "no name",
        "not served yet",
        "it responds",
        "no response may pass",
    ],
)
def test_agent_stays_with_pod_0_whose_name_or_launcher_tells_that_it_lives(
    tmp_path: Path, servers: set[str], options: dict[str, Any]
) -> None:
    assert not moves(tmp_path, servers, **options)


def test_name_of_pod_0_is_looked_up_again_and_again_only_after_it_has_ceased_to_respond(tmp_path: Path) -> None:
    looked_up = []
    responds = [False]
    pod = launcher_pod(tmp_path, node=1, nodes=2, master="train-1-0.train", port=29400, metrics_port=9400)
    watch = MasterWatch(pod, resolve=looked_up.append, responds=lambda address, port: responds[0])
    began = time.monotonic()

    def look_often(first: int, last: int) -> int:
        looked_up.clear()
        for second in range(first, last):
            watch.check_response({OLD.address}, began + second)
        return len(looked_up)

    look_often(100, 101)
    assert look_often(101, 121) == 4  # its response may be forbidden
    responds[0] = True
    look_often(121, 126)
    assert look_often(126, 140) == 0
    responds[0] = False
    look_often(140, 141)
    assert look_often(141, 161) == 20
    assert look_often(300, 320) == 4


def test_response_is_told_from_a_machine_that_only_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(socket.AF_INET, "127.0.0.1")
        port = server.getsockname()[1]
        assert not responds_to_request(address, port)
        endpoint = MetricsEndpoint(RankReader(""), lambda ranks: PodReport())
        monkeypatch.setattr(peers, "TIMEOUT", 30.0)
        assert responds_to_request(address, endpoint.serve(0, "127.0.0.1"))
    assert not responds_to_request(address, port)


def test_servers_are_those_of_this_pods_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        port = server.getsockname()[1]
        assert list_servers(port) == {"127.0.0.1"}
    assert list_servers(1) == set()


def test_server_is_told_from_a_refused_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert accepts_connection(Address(socket.AF_INET, "127.0.0.1"), port)
    assert not accepts_connection(Address(socket.AF_INET, "127.0.0.1"), port)
