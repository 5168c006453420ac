"""Unreachable peers on the pod's page."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_pod.features.unreachable.launcher import UnreachablePeers
from ddp_pod.network.connections import Connection
from ddp_pod.network.master import MasterChecked
from tests.support.launcher_config import launcher_pod


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
