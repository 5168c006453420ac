"""The kernel's table of connections, and the wait for pod 0."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path

import pytest

from ddp_pod.network import master
from ddp_pod.network.connections import find_unacknowledged
from ddp_pod.network.resolver import repeat_lost_queries_soon

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


UNRESOLVED = "name does not resolve yet"


@pytest.mark.parametrize(
    ("problems", "timeout", "result", "expected"),
    [
        ([*[UNRESOLVED] * 6, None], 600, None, [UNRESOLVED, None]),
        ([master.REFUSED] * 99, 30, master.REFUSED, []),  # pod 0 may still start
        ([master.REFUSED] * 99, 60, master.REFUSED, [master.REFUSED]),
        ([*[UNRESOLVED] * 5, *[master.REFUSED] * 99], 25, master.REFUSED, [UNRESOLVED, None]),
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
    monkeypatch.setattr(master, "_probe", lambda host, port: next(attempts))
    monkeypatch.setattr(master.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(master.time, "sleep", lambda seconds: None)
    reports: list[str | None] = []
    assert master.wait_for_master("train-1-0.train", 29400, timeout, reports.append) == result
    assert reports == expected


def test_address_that_name_resolves_to_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    wrong = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: wrong)
    assert master.wait_for_master("train-1-0.train", port, 0) == f"{master.REFUSED} (127.0.0.1)"


@pytest.mark.parametrize(
    ("text", "before", "options"),
    [
        ("nameserver 10.0.0.10\noptions ndots:5\n", {}, "timeout:1 attempts:4"),
        ("options ndots:5 timeout:3\n", {}, None),
        ("nameserver 10.0.0.10\n", {"RES_OPTIONS": "attempts:9"}, "attempts:9"),
        (None, {}, "timeout:1 attempts:4"),
    ],
)
def test_lost_queries_are_repeated_soon_unless_the_pod_has_other_options(
    text: str | None, before: dict[str, str], options: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "resolv.conf"
    if text is not None:
        path.write_text(text)
    environment = dict(before)
    repeat_lost_queries_soon(environment, str(path))
    assert environment.get("RES_OPTIONS") == options
