"""Training loops as users write them, unchanged under `ddp run`: the progress that the job shows."""

from __future__ import annotations

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
