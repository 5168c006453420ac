"""docs/tutorial.md, as it is typed: its script and its job, on this machine."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.ddp_run import DdpRun
from tests.support.trainer_ranks import start
from tests.unit.test_docs import commands, fenced

pytestmark = pytest.mark.process

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


# Instead of torchrun: forked ranks, whose process group is there already.
BEFORE = "import sys; sys.argv = ['train.py', *arguments]; dist.init_process_group = lambda backend: None\n"


def test_the_tutorials_script_trains_and_goes_on_as_a_job(tmp_path: Path) -> None:
    (script,), (job,) = fenced(PAGE, "python"), fenced(PAGE, "yaml")
    claim = tmp_path / "ddp-runs" / "claims" / "spirals"
    claim.mkdir(parents=True)
    environ = {"DDP_CHECKPOINT_DIR": str(claim)}
    with start(tmp_path, ["--epochs", "2"], 2, environ, script=BEFORE + script) as ranks:
        assert ranks.codes() == [0, 0], ranks.output(0)
    assert "epoch 2/2: loss" in ranks.output(0)

    (tmp_path / "train.py").write_text(script)
    (tmp_path / "job.yaml").write_text(job)
    (replace,) = (line for line in commands(PAGE) if line.startswith("sed "))
    subprocess.run(["bash", "-c", replace], cwd=tmp_path, check=True)
    local = (tmp_path / "local.yaml").read_text()
    assert f"{tmp_path}/train.py" in local
    _, again = (shlex.split(line) for line in commands(PAGE) if line.startswith("ddp run local.yaml"))
    # The options of the page's second command, with fewer epochs.
    with DdpRun(tmp_path, local, [*again[again.index("local.yaml") + 1 : -1], "3"]) as run:
        assert run.wait() == 0, run.output
        progress, log = run.read_status()["progress"], (run.run_folder / "logs" / "attempt-1-pod-0.log").read_text()
    assert (progress["epoch"], progress["percent"]) == (3, "100.0%")
    assert float(progress["loss"]) > 0
    assert float(progress["samplesPerSecond"]) > 0
    assert "goes on after epoch 2" in log
    assert "epoch 3/3" in log
    assert "epoch 2/3" not in log
