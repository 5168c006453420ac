"""The output of `ddp run` while the job runs: reasons for waiting, and the ranks' lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_cli.local.screen import LogFile, describe_wait, format_line
from ddp_operator.api.status import Condition, Progress, Status, Straggler
from ddp_operator.decide.report import Page
from ddp_pod.contract.progress import RankProgress
from ddp_pod.contract.run_report import Stall
from tests.support.builders import NOW


def running(kind: str, value: str, reason: str, message: str = "", *, progress: Progress | None = None) -> Status:
    condition = Condition(type=kind, status=value, reason=reason, message=message, last_transition_time=NOW)  # type: ignore[arg-type]
    return Status(phase="Running", conditions=(condition,), progress=progress)


LOADING = running("Rendezvoused", "False", "WaitingForWorkers", "2/2 pods running; workers have not started yet")


@pytest.mark.parametrize(
    ("phase", "description"),
    [("", "importing torch"), ("Starting", "importing torch"), ("WaitingForMaster", "waiting for all pods")],
)
def test_line_names_loading_step_before_workers_start(phase: str, description: str) -> None:
    assert describe_wait(LOADING, Page(phase=phase), 4, spoken=False) == f"starting 4 processes: {description} …"


@pytest.mark.parametrize("page", [Page(ranks=(RankProgress(step=3.0),), phase="Running"), Page(phase="Done")])
def test_loading_is_over_when_the_page_shows_it_before_the_status(page: Page) -> None:
    assert describe_wait(LOADING, page, 4, spoken=True) == ""


def test_screen_waits_for_first_output_of_script() -> None:
    joined = running("Rendezvoused", "True", "AllRanksJoined")
    assert describe_wait(joined, Page(), 1, spoken=False) == "1 process started; no output of the script yet"
    assert describe_wait(joined, Page(), 1, spoken=True) == ""


def test_reason_for_waiting_precedes_output() -> None:
    unplaced = running("Scheduled", "False", "Unschedulable", "1 Insufficient nvidia.com/gpu\nmore")
    assert describe_wait(unplaced, Page(), 1, spoken=True) == "1 Insufficient nvidia.com/gpu"
    assert "workers have not started" in describe_wait(LOADING, Page(restarts=1), 1, spoken=True)


def test_last_step_before_restart_is_no_present_position() -> None:
    restarted = running("Rendezvoused", "True", "AllRanksJoined", progress=Progress(step=62))
    told = "restarted in the same pods; no step since"
    assert describe_wait(restarted, Page(restarts=1), 1, spoken=True) == told
    stepping = Page(ranks=(RankProgress(step=3.0),), phase="Running", restarts=1)
    assert describe_wait(restarted, stepping, 1, spoken=True) == ""


@pytest.mark.parametrize(
    ("line", "procs", "single", "everyone"),
    [
        ("epoch 1", 1, "epoch 1", "[rank 2] epoch 1"),
        ("[rank4]: 10%\r20%\r", 2, None, "[rank 4] 20%"),
        ("[rank2]: epoch 1", 2, "epoch 1", "[rank 2] epoch 1"),
        ("W1122 torch/distributed says", 2, None, "[pod 2] W1122 torch/distributed says"),
        ("E1122 21:53 9 torch/distributed/elastic/x", 1, None, "[rank 2] E1122 21:53 9 torch/distributed/elastic/x"),
        ("[launcher] preflight: dns 0.0 ms", 1, None, "[rank 2] [launcher] preflight: dns 0.0 ms"),
    ],
)
def test_line_has_rank_prefix_only_for_several_ranks(line: str, procs: int, single: str | None, everyone: str) -> None:
    file = LogFile(1, 2, Path("attempt-1-pod-2.log"))
    assert format_line(line, file, procs, "2") == single
    assert format_line(line, file, procs, "all") == everyone


def test_awaited_rank_is_named_before_the_job_stalls() -> None:
    told = "rank 1 is in validate (train.py:12); rank 0 waits in all_reduce 7"
    page = Page(phase="Running", ranks=(RankProgress(step=4.0),), stall=Stall(awaited=told))
    assert describe_wait(Status(phase="Running"), page, 2, spoken=True) == told


def test_slow_rank_is_named_while_the_job_trains() -> None:
    slow = Status(phase="Running", stragglers=(Straggler(rank=3, ratio="23.0", cause="compute"),))
    told = "rank 3 works 23.0 times as long as its peers in each step"
    assert describe_wait(slow, Page(phase="Running", ranks=(RankProgress(step=4.0),)), 4, spoken=True) == told
    assert describe_wait(slow, Page(phase="Rendezvous"), 4, spoken=True) == ""
