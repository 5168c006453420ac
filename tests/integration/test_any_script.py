"""Training loops as users write them, unchanged under `ddp run`: the progress that the job shows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from tests.support.ddp_run import DdpRun, manifest
from tests.support.unchanged_loops import LOOPS, UNCHANGED_LOOPS

pytestmark = [pytest.mark.nightly, pytest.mark.process]

TRAINS_SOON = 30
"""Steps until a job shows a rate; a loop runs ten per second."""


def run(folder: Path, loop: str, *options: str) -> DdpRun:
    command = [sys.executable, str(LOOPS), loop, *options]
    return DdpRun(folder, manifest(command, nodes=1, procPerNode=2, recovery={"maxRestarts": 0}))


@pytest.mark.parametrize(
    ("line", "has_total"),
    [
        ("[{step:5}/{total}] loss={loss:.4f} (12.3 it/s)", True),
        ("step {step}/{total} | loss: {loss:.4f}", True),
        ("Step {step} of {total} - train loss {loss:.4f}", True),
        ("Epoch {next_epoch}, Step {step}, Loss: {loss:.4f}", False),
        ("{{'step': {step}, 'loss': {loss:.4f}}}", False),
        ('{{"loss": {loss:.4f}, "lr": 0.1, "step": {step}}}', False),
        ("iter {step}: loss {loss:.4f}, time 275.05ms", False),
        ("INFO:root:global_step={step} train/loss={loss:.4f} grad_norm=0.5", False),
        ("2026-11-24 14:01:07,123 INFO {step}/{total} loss={loss:.4f}", True),
        ("Epoch [{next_epoch}/{epochs}], Step [{batch}/{of_epoch}], Loss: {loss:.4f}", True),
        ("Train: {epoch} [ {batch:3}/{of_epoch} (  7%)]  Loss: {loss:.4f} (1.23)  Time: 0.522s, 15.3/s", True),
        ("Train Epoch: {next_epoch} [{samples}/640 (7%)]\tLoss: {loss:.4f}", True),
        ("Epoch: [{epoch}]  [ {batch}/{of_epoch}]  eta: 0:00:00  lr: 0.1  loss: {loss:.4f} (0.5000)", True),
        ("| epoch {next_epoch:3} | {batch:5}/  {of_epoch} batches | lr 20.00 | loss {loss:.4f} | ppl 9.1", True),
        ("\r 33%|###  | {step}/{total} [00:04<00:09, 12.34it/s, loss={loss:.4f}]", True),
    ],
)
def test_unchanged_loop_with_usual_line_shows_steps_total_and_printed_loss(
    tmp_path: Path, line: str, has_total: bool
) -> None:
    with run(tmp_path, "lines", "--epochs", "2", "--line", line) as job:
        assert job.wait() == 0, job.output
        progress: dict[str, Any] = job.read_status()["progress"]
        rows = job.read_rows()
    assert (progress["step"], progress["percent"], progress["loss"]) == (80, "100.0%", "1.08"), job.output
    shown = [row for row in rows if row["step"]]
    assert float(shown[0]["step"]) <= TRAINS_SOON, rows
    under_way = [row for row in rows if row["progress"] and float(row["progress"]) < 1.0]
    assert bool(under_way) == has_total, job.output
    totals = [float(row["step"]) / float(row["progress"]) for row in under_way]
    # Lines of samples are compared with a counter that is up to a step ahead, so the first totals are estimates.
    assert totals == pytest.approx([80.0] * len(totals), rel=0.1 if "samples" in line else 0.001), job.output


def test_shell_script_that_starts_python_shows_steps_and_total(tmp_path: Path) -> None:
    loop = f"{sys.executable} {LOOPS} records --epochs 1"
    (tmp_path / "train.sh").write_text(f"set -e\n{sys.executable} -c 'import torch'\n{loop}\n")
    with DdpRun(tmp_path, manifest(["bash", "train.sh"], nodes=1, procPerNode=2)) as job:
        assert job.wait() == 0, job.output
        progress: dict[str, Any] = job.read_status()["progress"]
        rows = job.read_rows()
    assert (progress["step"], progress["totalSteps"], progress["percent"]) == (60, 60, "100.0%"), job.output
    assert [row for row in rows if row["progress"] and float(row["progress"]) < 1.0], job.output


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
    assert escape(message) in report


def read_no_step_yet(job: DdpRun) -> str:
    """Return the message of NoStepYet once it has the launcher's explanation."""
    try:
        conditions = job.read_status()["conditions"]
    except (FileNotFoundError, KeyError, ValueError):
        return ""
    messages = [condition.get("message", "") for condition in conditions if condition["reason"] == "NoStepYet"]
    return next((message for message in messages if "no step is visible" in message), "")


@pytest.mark.parametrize(("loop", "options", "steps", "has_total"), UNCHANGED_LOOPS)
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
