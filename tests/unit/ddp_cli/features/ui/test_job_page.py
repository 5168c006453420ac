"""The life, the ranks and the settings of a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_cli.features.ui.compare import find_differences
from ddp_cli.features.ui.job_page import (
    JobPage,
    RankRow,
    describe_cost,
    format_settings,
    list_cards,
    list_ranks,
)
from ddp_cli.features.ui.run import LoggedEvent, PodFacts, RecordedRun, read_run
from ddp_operator.api.parse import parse_status
from ddp_operator.reading.pages import decode_report
from ddp_pod.contract.run_report import Stall, StalledRank
from tests.support.builders import NOW, resource
from tests.support.builders import page as build_report
from tests.unit.ddp_cli.features.ui.test_rows import TRAINING
from tests.unit.ddp_cli.features.ui.test_run import write_run

NO_STALL = Stall()
SLOW = {"rank": 2, "ratio": "1.7", "cause": "compute"}


def make(rows: list[tuple[float, float]], events: list[tuple[float, str]], end: float) -> RecordedRun:
    status = {
        "phase": "Failed",
        "startTime": "1970-01-01T00:00:00Z",
        "completionTime": f"1970-01-01T00:00:{end:02.0f}Z",
    }
    job = resource() | {"status": status}
    logged = [LoggedEvent(time, "Normal", reason, "") for time, reason in events]
    made = [{"time": time, "steps": step, "step": step} for time, step in rows]
    return RecordedRun(job, parse_status(job), made, logged, name="x", under_way=False)


def report(count: int, slow: int, stall: Stall = NO_STALL) -> PodFacts:
    counters = {"steps": 10, "step": 10, "stepSeconds": 2.0, "dataSeconds": 0.1}
    ranks = [{"rank": n, **counters, "computeSeconds": 1.5 if n == slow else 1.0} for n in range(count)]
    page = replace(decode_report(build_report(ranks=ranks).encode()), stall=stall)
    return PodFacts(0, node="node-a", report=page)


def with_pods(folder: Path, *pods: PodFacts, **status: Any) -> RecordedRun:
    """Return a run with these pods."""
    job = resource() | {"status": status}
    return replace(read_run(write_run(folder)), pods=pods, status=parse_status(job))


def test_slowest_rank_is_first_with_its_reason(tmp_path: Path) -> None:
    rows = list_ranks(with_pods(tmp_path, report(4, slow=2)))
    assert rows[0].rank == "2"
    assert rows[0].note == "its computation is slow"
    assert [row.note for row in rows[1:]] == ["", "", ""]
    assert (rows[0].node, rows[0].wait) == ("node-a", 0.2 - 0.16)


def test_tile_of_the_loss_has_the_last_value_of_its_chart() -> None:
    run = make([(14.0, 1.0), (20.0, 9.0)], [], 40.0)
    rows = [row | {"loss": 5.0 - number} for number, row in enumerate(map(dict, run.rows))]
    status = parse_status(resource() | {"status": {"phase": "Running", "progress": {"step": 8, "loss": "4.5"}}})
    cards = {card.name: card.value for card in list_cards(replace(run, rows=rows, status=status), NOW)}
    assert cards["loss"] == "4"


def test_loss_that_is_not_a_number_is_shown_although_its_chart_has_no_point() -> None:
    run = make([(14.0, 1.0)], [], 40.0)
    status = parse_status(resource() | {"status": {"phase": "Running", "progress": {"step": 8, "loss": "nan"}}})
    lost = replace(run, rows=[{"time": 14.0, "loss": 2.0}], status=status)
    assert ("loss", "nan", "") in list_cards(lost, NOW)


def test_total_of_zero_is_not_shown(tmp_path: Path) -> None:
    progress = {"step": 3, "totalSteps": 0, "epoch": 0, "epochs": 0}
    run = with_pods(tmp_path, phase="Running", progress=progress, nodes={"desired": 0})
    cards = [card for card in list_cards(run, NOW) if card.name in ("step", "epoch", "nodes")]
    assert cards == [("step", "3", ""), ("epoch", "0", ""), ("nodes", "0", "")]


def test_failed_rank_is_first_with_its_failure(tmp_path: Path) -> None:
    failure = {"attempt": 1, "rank": 3, "pod": "x-1-0", "exitCode": 1, "category": "UserError", "message": "m"}
    rows = list_ranks(with_pods(tmp_path, report(4, slow=2), phase="Failed", lastFailure=failure))
    assert [(row.rank, row.note) for row in rows[:2]] == [
        ("3", "UserError"), ("2", "its computation is slow"),
    ]  # fmt: skip


def test_own_work_of_a_rank_whose_data_is_not_measured_is_its_computation() -> None:
    row = RankRow("1", step_time=0.3, compute=0.1)
    assert (row.own, row.wait) == (0.1, None)


def test_slow_rank_has_a_cost_and_equal_ranks_have_none(tmp_path: Path) -> None:
    slow = list_ranks(with_pods(tmp_path, report(4, slow=2)))
    assert describe_cost(slow) == (
        "Since the ranks started, a step has taken 200 ms on average; without slow ranks, about 150 ms."
    )
    assert describe_cost(list_ranks(with_pods(tmp_path, report(4, slow=-1)))) == ""


def test_advice_about_a_slow_rank_names_its_pod_and_its_node() -> None:
    job = resource() | {"status": {"phase": "Running", "conditions": TRAINING, "stragglers": [SLOW]}}
    run = RecordedRun(job, parse_status(job), (), (), name="x", under_way=True)
    other = PodFacts(1, name="x-1-1", node="node-b", report=decode_report(build_report(ranks=[{"rank": 4}]).encode()))
    _, slow = JobPage(replace(run, pods=[other, report(4, slow=2)._replace(name="x-1-0")]), NOW).findings
    assert slow.what.startswith("Rank 2 works 1.7 times as long as its peers in each step: its computation is slow.")
    assert slow.todo.startswith("Rank 2 runs in pod x-1-0 on node-a. Look at its node")
    assert slow.is_about_ranks
    _, unread = JobPage(replace(run, pods=[other]), NOW).findings
    assert unread.todo.startswith("Look at its node")


def test_remark_of_a_slow_rank_is_the_observed_cause(tmp_path: Path) -> None:
    rows = list_ranks(with_pods(tmp_path, report(4, slow=2), stragglers=[SLOW | {"cause": "cpu"}]))
    assert rows[0].note == "it waits for a CPU"


def test_goodput_states_what_it_counts(tmp_path: Path) -> None:
    cards = {card.name: card for card in list_cards(read_run(write_run(tmp_path, goodput="0.846")), NOW)}
    assert cards["goodput"] == ("goodput", "85%", "of time in kept steps")


def test_hanging_rank_states_where_it_hangs(tmp_path: Path) -> None:
    stall = Stall(seconds=40, ranks=(StalledRank(3, "IO", "read in loader.py:7"),))
    rows = list_ranks(with_pods(tmp_path, report(4, slow=-1, stall=stall)))
    assert (rows[0].rank, rows[0].state, rows[0].note) == ("3", "waits for its storage", "read in loader.py:7")


def test_rank_for_which_its_peers_wait_is_before_them(tmp_path: Path) -> None:
    stall = Stall(seconds=40, ranks=(StalledRank(0, "Waiting", "all_reduce"), StalledRank(1, "IO", "read")))
    rows = list_ranks(with_pods(tmp_path, report(4, slow=2, stall=stall)))
    assert [(row.rank, row.is_conspicuous) for row in rows] == [("1", True), ("0", False), ("2", True), ("3", False)]


def test_pod_without_a_report_has_a_row(tmp_path: Path) -> None:
    (row,) = list_ranks(with_pods(tmp_path, PodFacts(5, node="n", state="ImagePullBackOff")))
    assert (row.pod, row.state) == ("5", "ImagePullBackOff")


def test_differences_name_options_and_settings(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    other = replace(run, resource=resource(nodes=7), facts={**run.facts, "commit": "def"})
    container = {"name": "trainer", "args": ["train.py", "--lr", "0.1", "--amp", "--seed=3"]}
    changed = {"name": "trainer", "args": ["train.py", "--lr", "0.2", "--seed=3"]}
    run.resource["spec"]["template"]["spec"]["containers"] = [container]
    other.resource["spec"]["template"]["spec"]["containers"] = [changed]
    found = {difference.name: difference.values for difference in find_differences([run, other])}
    assert found["args --lr"] == ["0.1", "0.2"]
    assert found["args --amp"] == ["set", ""]
    assert found["commit"] == ["abc1234 Fix <it>", "def"]
    other.resource["spec"]["template"]["spec"]["containers"][0]["image"] = "new"
    other.facts = {"image": "new"}
    assert [item.name for item in find_differences([run, other])].count("image") == 1
    assert not any("--seed" in name for name in found)


def test_settings_are_bounded() -> None:
    text = format_settings(resource() | {"status": {"message": "x" * 500_000}})
    assert len(text) < 300_000
    assert "cut here" in text
