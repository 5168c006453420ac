"""What the launcher takes from a report of NCCL's RAS."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_pod.base.pod import WorkerRecord
from ddp_pod.contract.plan import WatchdogConfig
from ddp_pod.progress.rank_progress import RankReader
from ddp_pod.watchdog import monitor, ras
from ddp_pod.watchdog.collectives import RankCollectives
from ddp_pod.watchdog.ras import RasQuery, describe_report, read_report
from ddp_pod.watchdog.stall import RankActivity, RankStall
from tests.support import PATIENCE
from tests.support.launcher_config import launcher_pod
from tests.support.ras_server import RasServer, rank, render_report

PID = 7
BEHIND = (4, [rank(0, PID, AllReduce=57), rank(3, 8, AllReduce=56), rank(1, 9, AllReduce=57)], {})
HEALTHY = (4, [rank(0, PID, AllReduce=57), rank(3, 8, AllReduce=57)], {})
Serve = Callable[..., RasServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[RasServer] = []

    def start(report: str, **options: Any) -> RasServer:
        servers.append(RasServer(lambda: report, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def find(server: RasServer, pids: set[int] = frozenset({PID}), world_size: int = 4) -> str:  # type: ignore[assignment]
    host, _, port = server.address.rpartition(":")
    return describe_report(read_report(host, int(port)), pids, world_size)


@pytest.mark.parametrize(
    ("communicators", "finding"),
    [
        ([BEHIND], "rank 3 launched up to AllReduce 56, the others up to 57"),
        ([HEALTHY], ""),
        ([(4, [rank(0, PID)], {2: 5})], "rank 2 did not respond"),
        ([(9, [rank(0, PID)], dict.fromkeys(range(1, 9), 5))], "ranks 1, 2, 3, 4, … of a communicator of 9 did not respond"),  # noqa: E501
        (
            [(2, [rank(0, PID, AllGather=4), rank(1, 8, AllGather=3)], {}), HEALTHY],
            "rank 1 of a communicator of 2 launched up to AllGather 3, the others up to 4",
        ),
        (
            [(2, [rank(0, 1, Reduce=1), rank(1, 2)], {}), BEHIND, (3, [rank(0, 3)], {1: 1})],
            "rank 3 launched up to AllReduce 56, the others up to 57; "
            "rank 1 of a communicator of 3 did not respond",
        ),
        ([], ""),
    ],
)  # fmt: skip
def test_finding_names_missing_ranks_and_those_behind(serve: Serve, communicators: Any, finding: str) -> None:
    assert find(serve(render_report(*communicators))) == finding


def test_report_of_nccl_2_28_lacks_a_comma(serve: Serve) -> None:
    report = render_report((4, [rank(0, PID)], {2: 5, 1: 6}), has_comma=False)
    assert find(serve(report)) == "ranks 1, 2 did not respond"


def test_report_of_another_job_on_the_node_is_ignored(serve: Serve) -> None:
    assert find(serve(render_report(BEHIND)), pids={99}) == ""


def test_rank_that_is_stopped_does_not_answer_and_another_does(serve: Serve) -> None:
    assert find(serve(render_report(BEHIND), silent=1)).startswith("rank 3 ")


@pytest.mark.parametrize(
    ("report", "options"),
    [
        ("NCCL version 2.27.5 compiled with CUDA 12.9\n", {"has_json": False}),
        (render_report(BEHIND) + " " * 100_000, {}),
        ('{"communicators": [{"size": "x"}]}', {}),
        ("[" * 5000, {}),
        ('{"communicators": 3}', {}),
    ],
    ids=["older NCCL", "too long", "no number", "nested", "no list"],
)
def test_unusable_report_is_no_finding(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, report: str, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(ras, "_MOST_BYTES", 50_000)
    server = serve(report, **options)
    with pytest.raises((ValueError, TypeError, KeyError, RecursionError)):
        find(server)
    monkeypatch.setenv("NCCL_RAS_ADDR", server.address)
    assert RasQuery({PID}, 4).finding == ""


@pytest.mark.parametrize(
    ("node", "state", "is_asked"), [(0, "Waiting", True), (1, "Behind", True), (1, "Waiting", False)]
)
def test_finding_is_in_report_and_failure_of_the_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Serve, node: int, state: str, is_asked: bool
) -> None:
    report = render_report((2, [rank(0, os.getpid(), AllReduce=2), rank(1, 8, AllReduce=1)], {}))
    monkeypatch.setenv("NCCL_RAS_ADDR", serve(report).address)
    pod = launcher_pod(tmp_path, nodes=2, node=node, watchdog=WatchdogConfig(30, 300, 1000, "Report"))
    stalls = monitor.StallMonitor(pod, RankReader(str(tmp_path)), is_stopping=lambda: False)
    worker = WorkerRecord(os.getpid(), node, 0, 0, world_size=2)
    stalled = monitor.StalledWorker(worker, RankActivity(node, 0, state, "rank 0 is in a"), "Stack", RankCollectives())
    monkeypatch.setattr(stalls, "_examine", lambda *_, **__: [stalled])
    stalls._open_stall(RankStall(0.0, "no step for 300 s"), [worker], 300.0)

    deadline = time.monotonic() + PATIENCE
    while is_asked and not stalls.describe().ras and time.monotonic() < deadline:
        time.sleep(0.02)
    finding = "rank 1 launched up to AllReduce 1, the others up to 2" if is_asked else ""
    assert stalls.describe().ras == finding
    error = stalls._build_error(RankStall(0.0, "no step for 300 s"), stalled, is_root_cause=True)
    assert error["message"] == "no step for 300 s: rank 0 is in a" + (f"; NCCL RAS: {finding}" if finding else "")
