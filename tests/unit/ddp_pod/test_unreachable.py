"""Unreachable peers: the kernel's table of connections, the wait for pod 0, and the line of the pod's page."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path

import pytest

from ddp_pod.network import unreachable
from ddp_pod.network.unreachable import Connection, MasterChecked, UnreachablePeers, find_unacknowledged
from tests.support.launcher_config import launcher_pod

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
MAPPED = "0000000000000000FFFF00000200000A"


def row(
    peer: str = "0200000A:1234", state: str = "01", queue: str = "00000400", retransmissions: str = "00000007"
) -> str:
    local = "0100000A:ABCD"
    return (
        f"   0: {local} {peer} {state} {queue}:00000000 01:00000020 {retransmissions}  1000        0 4242 2 0 20 4 30\n"
    )


@pytest.mark.parametrize(
    ("line", "addresses"),
    [
        (row(), ["10.0.0.2"]),
        (row(state="02", queue="00000001"), ["10.0.0.2"]),
        (row(peer=f"{MAPPED}:1234"), ["10.0.0.2"]),
        (row(peer="B80D0120000000000000000001000000:1234"), ["2001:db8::1"]),
        (row(queue="00000000"), []),
        (row(retransmissions="00000002"), []),
        (row(state="06"), []),
        ("   0: short\n", []),
    ],
    ids=["established", "connecting", "mapped", "IPv6", "nothing sent", "few retransmissions", "closing", "short"],
)
def test_unacknowledged_connections_are_found_in_table(line: str, addresses: list[str]) -> None:
    assert [connection.address for connection in find_unacknowledged(HEAD + line)] == addresses


def test_unreachable_peer_is_on_page_until_it_acknowledges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peers = UnreachablePeers(launcher_pod(tmp_path, master="train-1-0.train", nodes=2, node=1))
    assert peers.report()["unreachable"] == ""
    peers.check([Connection("10.0.0.3", 2), Connection("10.0.0.2", 1)])
    problem = "10.0.0.2 and 1 more address do not acknowledge data"
    assert peers.report()["unreachable"] == problem
    peers.check([])
    assert peers.report()["unreachable"] == ""
    logged = capsys.readouterr()
    assert "the network drops packets" in logged.out + logged.err
    assert "all peers acknowledge data again" in logged.out + logged.err


def test_unreachable_master_is_on_page_until_it_is_reached(tmp_path: Path) -> None:
    peers = UnreachablePeers(launcher_pod(tmp_path, master="train-1-0.train", port=29400, nodes=2, node=1))
    peers.note(MasterChecked("no connection: timed out"))
    expected = "cannot reach pod 0 at train-1-0.train:29400: no connection: timed out"
    assert peers.report()["unreachable"] == expected
    peers.note(MasterChecked(None))
    assert peers.report()["unreachable"] == ""


UNRESOLVED = "name does not resolve yet"


@pytest.mark.parametrize(
    ("problems", "timeout", "result", "expected"),
    [
        ([*[UNRESOLVED] * 6, None], 600, None, [UNRESOLVED, None]),
        ([unreachable.REFUSED] * 99, 30, unreachable.REFUSED, []),  # pod 0 may still start
        ([unreachable.REFUSED] * 99, 60, unreachable.REFUSED, [unreachable.REFUSED]),
        ([*[UNRESOLVED] * 5, *[unreachable.REFUSED] * 99], 25, unreachable.REFUSED, [UNRESOLVED, None]),
    ],
)
def test_wait_for_master_reports_its_problem_and_its_end(
    monkeypatch: pytest.MonkeyPatch,
    problems: list[str | None],
    timeout: float,
    result: str | None,
    expected: list[str | None],
) -> None:
    clock = itertools.count(0.0, 1.0)
    attempts = iter(problems)
    monkeypatch.setattr(unreachable, "_probe", lambda host, port: next(attempts))
    monkeypatch.setattr(unreachable.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(unreachable.time, "sleep", lambda seconds: None)
    reports: list[str | None] = []
    assert unreachable.wait_for_master("train-1-0.train", 29400, timeout, reports.append) == result
    assert reports == expected


def test_address_that_name_resolves_to_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    wrong = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: wrong)
    assert unreachable.wait_for_master("train-1-0.train", port, 0) == f"{unreachable.REFUSED} (127.0.0.1)"
