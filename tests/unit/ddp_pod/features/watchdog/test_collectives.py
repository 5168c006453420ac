"""What a rank reports of its collectives, and what the launcher believes of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_pod.base.pod import WorkerRecord
from ddp_pod.features.watchdog import collectives
from ddp_pod.features.watchdog.collectives import Collective, CollectivesRequest, RankCollectives, parse_report
from ddp_pod.rank.collectives import start_reporter
from tests.support.launcher_config import launcher_pod

WORKERS = [WorkerRecord(pid=os.getpid(), rank=4, local_rank=0, restart=0, world_size=8, kind="script")]


def entry(number: int, group: tuple[str, str], operation: str, *, retired: bool = True, **other: Any) -> dict[str, Any]:
    return {
        "process_group": group,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": f"nccl:{operation}",
        "input_sizes": [[3, 4]],
        "retired": retired,
        "time_created_ns": number,
        **other,
    }


WORLD = ("0", "default_pg")
MESH = ("7", "mesh_tp")
UNNAMED = ("2", "undefined")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """The two recorders of a PyTorch with NCCL."""
    recorded: dict[str, list[dict[str, Any]]] = {"all": [], "nccl": []}

    def dump(name: str) -> bytes:
        return json.dumps({"entries": recorded[name]} if recorded[name] else {}).encode()

    module = SimpleNamespace(
        _dump_fr_trace_json=lambda: dump("all"),
        _dump_nccl_trace_json=lambda: dump("nccl"),
    )
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module)  # type: ignore[arg-type]
    return recorded


def test_rank_reports_first_operation_that_has_not_ended(tmp_path: Path, recorder: dict[str, Any]) -> None:
    pod = launcher_pod(tmp_path)
    (tmp_path / "groups").mkdir()
    start_reporter(str(tmp_path / "groups" / "0.collectives"))
    recorder["all"] += [entry(1, WORLD, "barrier", input_sizes=[]), entry(2, UNNAMED, "broadcast", retired=False)]
    recorder["nccl"] += [entry(3, WORLD, "all_reduce", retired=False), entry(4, WORLD, "all_gather", retired=False)]
    found = CollectivesRequest(pod, WORKERS).read()[0]
    assert [group.last.name for group in found.groups] == [
        "all_gather 4 of the default group",
        "broadcast 2 of group 2",
    ]
    assert found.pending is not None
    assert found.pending.text == "all_reduce 3 of the default group, shape [3, 4]"

    recorder["all"].clear()
    recorder["nccl"][:] = [entry(5, MESH, "send 0->1", is_p2p=True, p2p_seq_id=9)]
    found = CollectivesRequest(pod, WORKERS).read()[0]
    assert found.pending is None
    assert found.last is not None
    assert found.last.name == "send 0->1 9 of group mesh_tp"


def test_rank_without_thread_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_SECONDS", 1e9)
    (tmp_path / "groups").mkdir()
    assert CollectivesRequest(launcher_pod(tmp_path), WORKERS).read() == {}
    os.mkfifo(tmp_path / "groups" / "0.collectives")
    assert CollectivesRequest(launcher_pod(tmp_path), WORKERS).read() == {}, "nobody reads the pipe"


VALID = {"operation": "all_reduce", "sequence": 7, "group": "default_pg", "sizes": [[2]]}


def report(**changes: Any) -> dict[str, Any]:
    return {"groups": [{"name": "0", "last": {**VALID, **changes}, "pending": None}]}


def test_valid_report_is_parsed() -> None:
    assert parse_report(report()).last == Collective("all_reduce", 7, "the default group", ["[2]"])


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"groups": None},
        {"groups": [None]},
        {"groups": [{}]},
        report(operation="\x1b[2J"),
        report(operation=7),
        report(operation="a" * 100),
        report(group='x"} 1\n'),
        report(sequence="many"),
        report(sizes=[[None]]),
        report(sizes=7),
    ],
)
def test_invalid_report_counts_as_none(raw: dict[str, Any]) -> None:
    assert parse_report(raw) == RankCollectives()
