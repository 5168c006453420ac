"""`ddp report --run N` on a job of `ddp dev`: a former run, the present one, and the runs that it names."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ddp_cli.__main__ import main
from ddp_cli.features.ui.cluster_job import ClusterData, read_job
from ddp_cli.features.ui.job_page import JobPage
from ddp_cli.features.ui.pages import select_run
from ddp_cli.features.ui.render import render_saved
from ddp_cli.features.ui.run import RecordedRun
from ddp_operator.api.kubeobjects import format_time
from ddp_pod.contract.failure_record import Failure
from ddp_pod.contract.progress import RankProgress
from ddp_pod.contract.report import PodReport
from ddp_pod.contract.run_report import DevRun
from tests.support.builders import NOW, resource

START = int(NOW.timestamp())


def at(seconds: int) -> str:
    return format_time(NOW + timedelta(seconds=seconds))


def points(start: int, loss: float) -> list[str]:
    rows = [f"{START + start + n},{10 * n},{loss}" for n in (1, 2)]
    return ["time,step,loss", *rows]


FAILURE = Failure("OOM", rank=1, pod_index=1, message="CUDA out of memory", remedy="lower the batch")
FORMER = (
    PodReport(
        restarts=2,
        ranks=(RankProgress(step=20.0, loss=0.4),),
        dev=DevRun(run=4, result="Failed", started=START + 200, ended=START + 210, failure=FAILURE),
    ),
    PodReport(dev=DevRun(run=2, result="Stopped", started=START + 100, ended=START + 110)),
)
DEV = {
    "run": 5,
    "result": "Succeeded",
    "startTime": at(300),
    "completionTime": at(330),
    "releaseTime": at(2130),
}
JOB = resource("digits", namespace="ml") | {
    "status": {
        "phase": "Held", "attempt": 1, "nodes": {"desired": 2}, "startTime": at(0), "points": points(300, 0.77),
        "progress": {"step": 20, "loss": "0.77"}, "dev": DEV,
        "conditions": [
            {"type": "Progressing", "status": "False", "reason": "Held", "lastTransitionTime": at(330), "message": "m"}
        ],
    }
}  # fmt: skip
EVENTS = [
    {
        "reason": reason,
        "message": message,
        "type": "Normal",
        "involvedObject": {"kind": "DDPTrainingJob", "name": "digits"},
        "lastTimestamp": at(time),
    }
    for reason, message, time in (("FailureOOM", "during run 4", 205), ("Held", "after run 5", 330))
]


def select(number: int) -> RecordedRun:
    return select_run(read_job(JOB, ClusterData(EVENTS), NOW + timedelta(seconds=400)), number, lambda: FORMER)


@pytest.mark.parametrize(
    ("number", "points", "events", "facts", "absent"),
    [
        (4, [], ["during run 4"], [">Failed<", "CUDA out of memory", "lower the batch"], "0.77"),
        (5, [(1.0, 0.77), (2.0, 0.77)], ["after run 5"], [">Succeeded<", "Run 5 succeeded"], "CUDA"),
        (2, [], [], [">Stopped<", "Run 2 was stopped"], "CUDA"),
    ],
)
def test_page_has_only_what_belongs_to_run(
    number: int, points: list[Any], events: list[str], facts: list[str], absent: str
) -> None:
    run = select(number)
    assert [(row["time"] - run.start, row["loss"]) for row in run.rows if "loss" in row] == points
    assert [event.message for event in run.events] == events
    page = render_saved(JobPage(run, NOW + timedelta(seconds=400)))
    for fact in (*facts, f"digits, run {number}"):
        assert fact in page
    assert absent not in page


@pytest.mark.parametrize("number", [0, 1, 3, 6, -1])
def test_unknown_run_is_refused_with_known_ones(number: int) -> None:
    with pytest.raises(ValueError, match=f"no report of run {number}: .* --run: 2, 4, 5$"):
        select(number)


def test_job_without_runs_is_refused() -> None:
    plain = JOB | {"status": {"phase": "Succeeded"}}
    with pytest.raises(ValueError, match="remove --run"):
        select_run(read_job(plain, ClusterData(), NOW), 1)


def test_each_run_of_this_machine_has_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "ddp-runs" / "digits-20260101-120000"
    folder.mkdir(parents=True)
    (folder / "status.yaml").write_text(json.dumps(JOB))
    assert main(["report", "digits", "--run", "5"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.name == "report-5.html"
    assert "Run 5 succeeded" in path.read_text(encoding="utf-8")
    assert main(["report", "digits", "--run", "4"]) == 2
    error = capsys.readouterr().err
    assert "no report of run 4: pod 0 keeps the last ten while it runs; choose one of these with --run: 5" in error
