"""The sample under `ddp run`: real digits, two pods over gloo, and all documented files of the run folder."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

from ddp_trainer.config.presets import PRESETS
from tests.support import ROOT
from tests.support.ddp_run import DdpRun

pytestmark = pytest.mark.process

EPOCHS = PRESETS["digits-resnet"].values["epochs"]
SAMPLE = (ROOT / "deploy" / "samples" / "digits.yaml").read_text()


def read_page(run: DdpRun) -> str:
    """Return the page at the printed address, once it shows training."""
    result = re.search(r"curl (http://\S+)", run.output)
    if result is None:
        return ""
    try:
        with urllib.request.urlopen(result[1], timeout=60) as answer:
            page: str = answer.read().decode()
    except OSError:
        return ""
    return page if 'ddp_loss{rank="0"' in page else ""


def test_sample_trains_and_writes_status_metrics_report_and_logs(tmp_path: Path) -> None:
    with DdpRun(tmp_path, SAMPLE) as run:
        page = run.until(lambda: read_page(run), "a metrics page with a loss")
        assert run.wait() == 0, run.output
        status = run.read_status()
        rows = run.read_rows()
        folder = run.run_folder
    assert re.search(r"^ddp_samples_total\{.*\} [1-9]", page, re.MULTILINE)
    assert "ddp_launcher_phase" in page

    assert status["phase"] == "Succeeded"
    assert status["nodes"] == {"desired": 2, "ready": 0, "spares": 0, "succeeded": 2, "failed": 0}
    assert (status["progress"]["epoch"], status["progress"]["percent"]) == (EPOCHS, "100.0%")
    assert 0.95 <= float(status["progress"]["valAccuracy"]) <= 1
    # Only rank 0 prints, so that every line exists once.
    logs = "".join(path.read_text() for path in (folder / "logs").iterdir())
    for epoch in range(1, EPOCHS + 1):
        assert logs.count(f"epoch {epoch}/{EPOCHS} validation:") == 1

    assert rows
    assert rows[-1]["step"] == f"{float(status['progress']['step'])}"
    assert float(rows[-1]["loss"]) > 0
    assert float(rows[-1]["validation_accuracy"]) == pytest.approx(float(status["progress"]["valAccuracy"]), abs=1e-3)
    report = (folder / "report.html").read_text()
    assert ">Succeeded</span>" in report
    assert all(f'"id":"{chart}"' in report for chart in ("loss", "rate", "accuracy", "learning-rate"))
    assert "report.html (open it in a browser)" in run.output
    assert sorted(path.name for path in (folder / "reports").iterdir()) == [
        "attempt-1-pod-0.json",
        "attempt-1-pod-1.json",
    ]
    assert all(path.stat().st_size for path in (folder / "logs").iterdir())
    assert (folder / "job.yaml").read_text() == SAMPLE
    assert "kind: Job" in (folder / "objects.yaml").read_text()
    assert "Succeeded" in (folder / "events.log").read_text()
    # Without a terminal: a limited number of plain lines, each with its time.
    assert "\x1b" not in run.output
    assert re.search(r"^\d\d:\d\d:\d\d (Running|Succeeded)  .*loss", run.output, re.MULTILINE)
    assert "digits: Succeeded" in run.output
