"""What a run's folder has, as series and tables."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ddp_cli.features.ui.job_page import list_ranks
from ddp_cli.features.ui.run import (
    LoggedEvent,
    Mark,
    RecordedRun,
    find_marks,
    read_run,
    split_step_time,
)
from ddp_cli.local.folder import COLUMNS, RunFolder
from ddp_operator.api.parse import parse_status
from ddp_operator.decide.pace import Rates
from ddp_operator.decide.report import Page
from ddp_pod.contract.progress import RankProgress
from tests.support.builders import NOW, resource
from tests.support.builders import page as build_report

FAILURE = {
    "attempt": 1,
    "rank": 1,
    "pod": "train-1-1",
    "exitCode": 1,
    "category": "UserError",
    "message": "ValueError: <script>alert(1)</script>",
    "traceback": "Traceback …\nValueError",
    "remedy": "look at the data",
}
RANKS = [
    {"rank": 1, "steps": 10, "stepSeconds": 2.0, "dataSeconds": 0.5, "computeSeconds": 1.0},
    {"rank": 0, "steps": 10, "stepSeconds": "broken", "dataSeconds": 0},
]


def rows(count: int = 12) -> list[dict[str, float]]:
    """A run whose workers are restarted in the same pods halfway, and whose last row is of attempt 2."""
    made = [
        {
            "time": 1000.0 + n, "attempt": 1.0, "epoch": 1.0, "step": float(n), "loss": 2.0 / (n + 1),
            "samples_per_second": 100.0 + n, "checkpoint_step": n // 4 * 4.0,
            "steps": float(n if n < count // 2 else n - count // 2),
        }
        for n in range(count)
    ]  # fmt: skip
    for row in made:
        row |= {"step_seconds": row["steps"], "data_seconds": row["steps"] / 4, "compute_seconds": row["steps"] / 2}
    made[-1]["attempt"] = 2.0
    return made


def write_run(folder: Path, *, phase: str = "Failed", figures: bool = True, **status: Any) -> Path:
    run = RunFolder.create(folder, "train", NOW)
    state = {"phase": phase, "attempt": 2, "nodes": {"desired": 2}, "lastFailure": FAILURE} | status
    run.write_status(resource() | {"status": state})
    run.write_event(datetime.fromtimestamp(1010.6, UTC), "Warning", "FailureUserError", "attempt 1: <b>boom</b>")
    run.write_facts({"commit": "abc1234 Fix <it>", "versions": "torch 2.9.0"})
    run.write(run.reports / "attempt-2-pod-0.json", build_report(ranks=RANKS))
    run.write(run.reports / "attempt-1-pod-0.json", build_report(ranks=[RANKS[0] | {"steps": 99}]))
    if figures:
        for row in rows():
            progress = RankProgress()
            progress.update({field: row[name] for name, field in COLUMNS.items() if field and name in row})
            rates = Rates(samples=row["samples_per_second"])
            run.write_row(datetime.fromtimestamp(row["time"], UTC), int(row["attempt"]), Page(ranks=(progress,)), rates)
    return run.path


class TestRun:
    def test_restart_is_matched_with_late_event(self) -> None:
        events = [
            LoggedEvent(1000.0, "Normal", "Started", "attempt 1"),
            LoggedEvent(1009.0, "Warning", "FailureUnknown", "killed"),  # in place: reported by the next page
            LoggedEvent(1010.5, "Warning", "FailureOOM", "memory"),
            LoggedEvent(1010.5, "Normal", "Disrupted", "attempt 2"),
            LoggedEvent(1020.0, "Warning", "FailureOOM", "again"),  # no step followed it
        ]
        assert find_marks(rows(), events, 1000.0) == [
            Mark(5.0, "restart", "killed", "restarted in attempt 1"),
            Mark(10.5, "OOM", "memory", "restarted as attempt 2", 2),
            Mark(20.0, "OOM", "again"),
        ]

    def test_process_has_no_row_after_its_last_step_but_what_was_measured_later(self) -> None:
        made = [
            {"time": 1000.0 + n, "step": min(n, 3.0), "loss": 4.0 - min(n, 3.0), "samples_per_second": 9.0 - 2 * n}
            for n in range(1, 6)
        ]
        made[-1] |= {"validation_loss": 0.5, "checkpoint_step": 3.0}
        job = resource() | {"status": {"phase": "Failed", "completionTime": "1970-01-01T00:16:46Z"}}
        run = RecordedRun(job, parse_status(job), made, (), name="x", under_way=False)
        assert [row["time"] for row in run.rows] == [1001.0, 1002.0, 1003.0]
        assert [row["samples_per_second"] for row in run.rows] == [7.0, 5.0, 3.0]
        assert run.rows[-1]["validation_loss"] == 0.5
        assert (run.checkpoints, run.end) == ([(2.0, 3.0)], 5.0)

    def test_run_without_a_known_end_ends_at_its_last_row_even_if_it_hung(self) -> None:
        job = resource() | {"status": {"phase": "Running"}}
        made = [{"time": 1000.0 + n, "step": min(n, 3.0)} for n in range(304)]
        run = RecordedRun(job, parse_status(job), made, (), name="x", under_way=False)
        assert (run.rows[-1]["time"], run.end) == (1003.0, 303.0)

    @pytest.mark.parametrize(
        ("phase", "attempt", "restart", "result"),
        [
            ("Failed", 2, None, "the job failed"),
            ("Failed", 2, LoggedEvent(1010.0, "Normal", "RestartedInPlace", ""), "the job failed"),
            ("Failed", 2, LoggedEvent(1040.0, "Normal", "RestartedInPlace", ""), ""),
            ("Failed", 3, None, ""),  # no step followed the failure, but an attempt did
            ("Running", 2, None, ""),
        ],
    )
    def test_last_failure_ended_a_failed_run_if_nothing_followed(
        self, phase: str, attempt: int, restart: LoggedEvent | None, result: str
    ) -> None:
        job = resource() | {"status": {"phase": phase, "attempt": attempt, "lastFailure": FAILURE | {"attempt": 2}}}
        events = [LoggedEvent(time, "Warning", "FailureOOM", "") for time in (1009.0, 1010.5, 1040.5)]
        events += [restart] if restart is not None else []
        run = RecordedRun(job, parse_status(job), rows(), events, name="x", under_way=True)
        assert [mark.result for mark in run.marks] == ["restarted in attempt 1", "restarted as attempt 2", result]

    def test_recalled_restart_did_not_end_the_job(self) -> None:
        restart = {"attempt": 2, "time": "1970-01-01T00:17:20Z", "cause": "UserError"}
        status = {"phase": "Failed", "attempt": 2, "lastFailure": FAILURE | {"attempt": 2}, "lastRestart": restart}
        job = resource() | {"status": status}
        run = RecordedRun(job, parse_status(job), rows()[:3], (), name="x", under_way=False)
        assert [(mark.label, mark.result) for mark in run.marks] == [("UserError", "")]

    def test_mark_keeps_the_attempt_in_the_text_of_the_user(self) -> None:
        events = [
            LoggedEvent(1020.0, "Warning", "FailureOOM", f"{start}at attempt 7: x") for start in ("attempt 1: ", "")
        ]
        assert [mark.cause for mark in find_marks(rows(6), events, 1000.0)][-2:] == ["at attempt 7: x"] * 2

    def test_restart_after_a_row_without_an_attempt_began_none(self) -> None:
        made = [{"time": 1000.0, "steps": 5.0}, {"time": 1001.0, "steps": 1.0, "attempt": 1.0}]
        assert find_marks(made, (), 1000.0) == [Mark(0.0, "restart", "", "restarted in attempt 1")]

    def test_step_time_is_split_between_rows_of_one_process(self) -> None:
        found = split_step_time(rows())
        assert len(found) == 9  # twelve rows, without the steps over the restarts
        assert [found[0][name] for name in ("time", "data", "compute", "wait")] == [1001.0, 250.0, 500.0, 250.0]

    def test_ranks_are_of_last_attempt(self, tmp_path: Path) -> None:
        run = read_run(write_run(tmp_path))
        rows = sorted(list_ranks(run), key=lambda row: row.rank)
        assert [(row.rank, row.step_time) for row in rows] == [("0", None), ("1", 0.2)]
        assert (rows[1].data, rows[1].compute, rows[1].wait) == (0.05, 0.1, pytest.approx(0.05))

    def test_broken_folders_are_refused_in_one_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"status\.yaml is missing"):
            read_run(tmp_path)
        for text in ("- 1", "{status: {attempt: two}}", "{"):
            (tmp_path / "status.yaml").write_text(text)
            with pytest.raises(ValueError, match=r"status\.yaml: invalid"):
                read_run(tmp_path)
