"""The pod as a witness: which peers it probes, when one counts as silent, and what its readers learn."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_pod.base.pod import Pod
from ddp_pod.contract.peers import MOST_HINTS, PeerContact, PeerReport
from ddp_pod.contract.report import PodReport
from ddp_pod.features.lost_nodes.peers import (
    Address,
    PeerWatch,
    list_probed_peers,
    probe_port,
    resolve_host,
    send_hint,
)
from ddp_pod.progress.metrics import MetricsEndpoint
from ddp_pod.progress.rank_progress import RankReader
from ddp_pod.supervise.services import Services
from tests.support.launcher_config import launcher_pod

HERE = Address(socket.AF_INET, "10.0.0.1")
THERE = Address(socket.AF_INET, "10.0.0.2")


def pod(folder: Path, **changes: Any) -> Pod:
    options = {"nodes": 2, "master": "train-1-0.train", "pod_host": "train-1-{}.train", "metrics_port": 9400}
    return launcher_pod(folder, **{**options, **changes})


class Network:
    """The peers' addresses by name, and which of these answer."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.names: dict[str, Address | None] = {"train-1-1.train": HERE}
        self.answering = {HERE}
        self.has_name_server = True
        self.told: list[tuple[Address, int]] = []
        self.watch = PeerWatch(pod(folder, **changes), resolve=self.resolve, probe=self.probe, tell=self.tell)

    def resolve(self, host: str) -> Address | None:
        if not self.has_name_server:
            raise OSError("no name server")
        return self.names.get(host)

    def probe(self, address: Address, port: int) -> bool:
        assert port == 9400
        return address in self.answering

    def tell(self, address: Address, port: int, silent: int) -> None:
        assert port == 9400
        self.told.append((address, silent))

    def check(self, now: float) -> None:
        for peer in self.watch._peers:
            self.watch.check(peer, now)

    @property
    def silent(self) -> list[int]:
        contacts = self.watch.report_peers(0.0).contacts
        return [contact.pod for contact in contacts if contact.silent_seconds is not None]


@pytest.mark.parametrize(
    ("changes", "peers"),
    [
        ({"nodes": 2, "node": 1}, [0]),
        ({"nodes": 3, "spares": 1, "node": 2}, [3, 0, 1]),
        ({"nodes": 8, "node": 6}, [7, 0, 3]),
        ({"nodes": 2, "elastic": True, "min_nodes": 1, "max_nodes": 4}, [1, 2, 3]),
        ({"nodes": 1}, []),
        ({"master": "127.0.0.1"}, []),
        ({"metrics_port": 0}, []),
    ],
    ids=["pair", "with spare", "many", "elastic", "single", "one machine", "no port"],
)
def test_each_pod_probes_three_others(tmp_path: Path, changes: dict[str, Any], peers: list[int]) -> None:
    assert list(list_probed_peers(pod(tmp_path, **changes))) == peers


def test_peer_is_silent_from_the_first_probe_without_answer_until_it_answers(tmp_path: Path) -> None:
    network = Network(tmp_path)
    network.check(0.0)
    assert network.watch.report_peers(0.0) == PeerReport(contacts=(PeerContact(pod=1, silent_seconds=None),))
    network.answering.clear()
    network.check(3.0)
    network.check(5.0)
    assert network.silent == [1]
    assert network.watch._peers[0].silent_since == 3.0
    network.answering.add(HERE)
    network.check(7.0)
    assert network.silent == []


def test_peer_that_has_never_answered_counts_for_nothing(tmp_path: Path) -> None:
    network = Network(tmp_path)
    network.answering.clear()
    network.check(0.0)
    assert network.watch.report_peers(0.0).contacts == ()


def test_pod_in_the_place_of_a_silent_one_starts_anew(tmp_path: Path) -> None:
    network = Network(tmp_path)
    network.check(0.0)
    network.answering.clear()
    network.check(3.0)
    network.names["train-1-1.train"] = THERE
    network.check(5.0)
    assert network.watch.report_peers(0.0).contacts == ()
    network.answering.add(THERE)
    network.check(6.0)
    assert [contact.pod for contact in network.watch.report_peers(0.0).contacts] == [1]


def test_peer_without_a_name_is_not_silent(tmp_path: Path) -> None:
    network = Network(tmp_path)
    network.check(0.0)
    network.answering.clear()
    network.names.clear()
    network.check(3.0)
    network.check(4.0)
    assert network.silent == []


def test_outage_of_name_server_hides_no_silence_and_invents_none(tmp_path: Path) -> None:
    network = Network(tmp_path)
    network.check(0.0)
    network.has_name_server = False
    network.check(3.0)
    assert network.silent == []
    network.answering.clear()
    network.check(6.0)
    network.check(7.0)
    assert network.silent == [1]


def test_peers_are_probed_in_turn_and_at_once_if_a_reader_does_not_wait(tmp_path: Path) -> None:
    network = Network(tmp_path, nodes=4)
    network.names |= {f"train-1-{index}.train": HERE for index in (2, 3)}
    network.check(0.0)
    checked = [peer.checked for peer in network.watch._peers]
    assert [peer.due for peer in network.watch._peers] == [time + 9.0 for time in checked]
    network.watch.report_peers(0.1)
    assert [peer.due for peer in network.watch._peers] == [time + 9.0 for time in checked]
    network.watch.report_peers(0.0)
    assert [peer.due for peer in network.watch._peers] == [time + 1.0 for time in checked]


@pytest.mark.parametrize(("query", "seconds"), [("", 0.0), ("wait=8", 8.0), ("wait=99", 0.0), ("wait=x", 0.0)])
def test_page_waits_as_long_as_its_reader_asks(
    query: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(tmp_path)
    waits: list[float] = []
    monkeypatch.setattr(network.watch, "report_peers", waits.append)
    network.watch.read_page("/peers", query)
    assert network.watch.read_page("/metrics", query) is None
    assert waits == [seconds]


def test_reader_waits_until_a_peer_falls_silent(tmp_path: Path) -> None:
    network = Network(tmp_path)
    network.check(0.0)
    reports: list[PeerReport] = []
    reader = threading.Thread(target=lambda: reports.append(network.watch.report_peers(8.0)))
    reader.start()
    network.answering.clear()
    network.check(3.0)
    reader.join(60)
    assert [contact.pod for contact in reports[0].contacts] == [1]
    assert reports[0].contacts[0].silent_seconds is not None


def test_probe_counts_each_answer_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(socket.AF_INET, "127.0.0.1")
        port = server.getsockname()[1]
        assert probe_port(address, port), "nobody accepts the connection"
    assert probe_port(address, port), "refused"

    def connect(self: socket.socket, target: object) -> None:
        raise OSError(113, "No route to host")

    monkeypatch.setattr("ddp_pod.features.lost_nodes.peers.socket.socket.connect", connect)
    assert not probe_port(address, port)


def test_unknown_host_has_no_address() -> None:
    found = resolve_host("localhost")
    assert found is not None
    try:
        assert resolve_host("no-such-host.invalid") is None
    except OSError:  # here is no name server
        return


def test_witness_tells_the_pods_to_which_the_operator_listens_once(tmp_path: Path) -> None:
    network = Network(tmp_path, nodes=8, node=2)
    first = Address(socket.AF_INET, "10.0.0.7")
    last = Address(socket.AF_INET, "10.0.0.8")
    network.names = {"train-1-3.train": HERE, "train-1-0.train": first, "train-1-7.train": last}
    network.check(0.0)
    network.answering.clear()
    for now in (3.0, 5.0):
        network.check(now)
    deadline = time.monotonic() + 60
    while len(network.told) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(network.told) == [(first, 3), (last, 3)]


@pytest.mark.parametrize(
    ("node", "silent", "listeners"), [(2, 3, [0, 7]), (0, 3, [7]), (1, 0, [7]), (6, 7, [0]), (0, 7, [])]
)
def test_pod_tells_neither_itself_nor_the_silent_one(
    node: int, silent: int, listeners: list[int], tmp_path: Path
) -> None:
    watch = Network(tmp_path, nodes=8, node=node).watch
    assert list(watch.list_listeners(silent)) == listeners


def test_hint_of_a_peer_wakes_the_reader_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Network(tmp_path, nodes=64).watch
    reports: list[PeerReport] = []
    reader = threading.Thread(target=lambda: reports.append(watch.report_peers(8.0)))
    reader.start()
    services = Services([watch])
    port = MetricsEndpoint(RankReader(str(tmp_path)), lambda ranks: PodReport(), services.read_page).serve(
        0, "127.0.0.1"
    )
    send_hint(Address(socket.AF_INET, "127.0.0.1"), port, 40)
    reader.join(60)
    assert reports[0].hints == (40,)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 11)
    assert watch.report_peers(0.0).hints == ()


def test_hints_are_bounded(tmp_path: Path) -> None:
    watch = Network(tmp_path, nodes=64).watch
    for silent in (64, 99_999, *range(63)):
        watch.take_hint(silent)
    assert watch.report_peers(0.0).hints == tuple(range(MOST_HINTS))
