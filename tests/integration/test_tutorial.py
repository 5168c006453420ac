"""Run the script, the job and the commands of docs/tutorial.md on this machine."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.ddp_run import DdpRun
from tests.support.trainer_ranks import start
from tests.unit.test_docs import commands, fenced

pytestmark = pytest.mark.process

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


# Replaces torchrun: forked ranks, whose process group exists already.
BEFORE = "import sys; sys.argv = ['train.py', *arguments]; dist.init_process_group = lambda backend: None\n"


def test_tutorial_script_trains_with_torchrun_and_resumes_as_job(tmp_path: Path) -> None:
    (script,) = fenced(PAGE, "python")
    (job,) = fenced(PAGE, "yaml")
    claim = tmp_path / "ddp-runs" / "claims" / "spirals"
    claim.mkdir(parents=True)
    environ = {"DDP_CHECKPOINT_DIR": str(claim)}
    with start(tmp_path, ["--epochs", "2"], 2, environ, script=BEFORE + script) as ranks:
        assert ranks.codes() == [0, 0], ranks.output(0)
    assert "epoch 2/2: loss" in ranks.output(0)

    (tmp_path / "train.py").write_text(script)
    again = next(shlex.split(line) for line in commands(PAGE) if line.startswith("ddp run job.yaml --nodes"))
    # The options of the page's second command, with fewer epochs.
    with DdpRun(tmp_path, job, [*again[again.index("job.yaml") + 1 : -1], "5"]) as run:
        assert run.wait() == 0, run.output
        progress = run.read_status()["progress"]
        log = (run.run_folder / "logs" / "attempt-1-pod-0.log").read_text()
    assert (progress["epoch"], progress["percent"]) == (5, "100.0%")
    assert float(progress["loss"]) > 0
    assert "resume after epoch 2" in log
    assert "epoch 5/5" in log
    assert "epoch 2/5" not in log
