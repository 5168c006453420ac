"""Training loops as users write them, unchanged under `ddp run`: the progress that the job shows."""

from __future__ import annotations

import html
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.ddp_run import DdpRun, manifest

pytestmark = [pytest.mark.nightly, pytest.mark.process]

LOOPS = ROOT / "tests" / "support" / "training_loops.py"
TRAINS_SOON = 30
"""Steps until a job shows a rate; a loop runs ten per second."""


def run(folder: Path, loop: str, *options: str) -> DdpRun:
    command = [sys.executable, str(LOOPS), loop, *options]
    return DdpRun(folder, manifest(command, nodes=1, procPerNode=2, recovery={"maxRestarts": 0}))


INVISIBLE = 'for i in $(seq 1 40); do echo "batch $i/40 done"; sleep 1; done'


def test_shell_loop_shows_reason_and_pattern_in_output_status_summary_and_report(tmp_path: Path) -> None:
    with DdpRun(tmp_path, manifest(["sh", "-c", INVISIBLE], nodes=1)) as job:
        message = job.until(lambda: read_no_step_yet(job), "NoStepYet with the hint")
        assert job.wait() == 0, job.output
        report = (job.run_folder / "report.html").read_text()
    pattern = r"spec.metrics.logPatterns: ['batch\s*(?P<step>[0-9]+) */ *(?P<totalSteps>[0-9]+)']"
    assert pattern in message
    assert job.output.count(message) == 2, "while it runs, and in the summary"
    assert f"  progress:   {message}" in job.output
    assert html.escape(message) in report


def read_no_step_yet(job: DdpRun) -> str:
    """Return the message of NoStepYet once it has the launcher's explanation."""
    try:
        conditions = job.read_status()["conditions"]
    except (FileNotFoundError, KeyError, ValueError):
        return ""
    messages = [condition.get("message", "") for condition in conditions if condition["reason"] == "NoStepYet"]
    return next((message for message in messages if "no step is visible" in message), "")


@pytest.mark.parametrize(
    ("loop", "options", "steps", "has_total"),
    [
        ("cnn", ["--epochs=2"], 120, True),
        ("tutorial", [], 120, True),
        ("nano_gpt", ["--max_steps=120"], 120, True),
        ("gan", [], 120, True),
        ("lbfgs", [], 120, True),
        ("fsdp", ["--epochs=3"], 180, True),
        ("dots", [], 120, False),
        ("bars", ["--epochs=2"], 120, True),
        ("records", [], 120, True),
        ("lines_of_json", ["--max_steps", "120"], 120, True),
    ],
)
def test_unchanged_loop_shows_steps_rate_loss_and_total(
    tmp_path: Path, loop: str, options: list[str], steps: int, has_total: bool
) -> None:
    with run(tmp_path, loop, *options) as job:
        assert job.wait() == 0, job.output
        progress: dict[str, Any] = job.read_status()["progress"]
        rows = job.read_rows()
    assert (progress["step"], progress.get("percent")) == (steps, "100.0%"), job.output
    assert "eta" not in progress
    assert float(progress["stepsPerSecond"]) > 0
    assert float(progress["loss"]) > 0
    with_rate = [float(row["step"] or row["steps"]) for row in rows if row["steps_per_second"]]
    assert with_rate[0] <= TRAINS_SOON, rows
    shares = [float(row["progress"]) for row in rows[:-1] if row["progress"] and float(row["progress"]) < 1.0]
    assert bool(shares) == has_total, job.output
