"""The FSDP sample under ``ddp run``: a killed rank, and another number of ranks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.ddp_run import DdpRun

pytestmark = pytest.mark.process

SAMPLE = (ROOT / "deploy" / "samples" / "fsdp.yaml").read_text(encoding="utf-8")
# Rank 1 kills itself after its seventh step, once.
KILL = """
            marker = folder / "killed"
            if rank == 1 and step == 6 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), 9)
"""


def run_job(folder: Path, text: str, *options: str) -> str:
    """Run the job to its end; return the log of pod 0. The claim remains in ``folder``."""
    folder.mkdir(exist_ok=True)
    with DdpRun(folder, text, ["--quiet", "--cpu", *options]) as run:
        assert run.wait() == 0, run.output
        log = (run.run_folder / "logs" / "attempt-1-pod-0.log").read_text()
        shutil.rmtree(run.run_folder)  # DdpRun expects one run in the folder
        return log


def read_losses(log: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"step (\d+)/\d+: loss (\S+)", log)}


def list_checkpoints(folder: Path) -> dict[str, int]:
    """The number of shards of each checkpoint."""
    claim = folder / "ddp-runs" / "claims" / "fsdp-checkpoints"
    return {path.name: len(list(path.glob("*.distcp"))) for path in sorted(claim.glob("step-*"))}


def test_fsdp_sample_resumes_exactly_after_killed_rank_and_with_fewer_ranks(tmp_path: Path) -> None:
    arguments = ("--", "--steps", "12", "--save-every", "3")
    whole = run_job(tmp_path / "whole", SAMPLE, *arguments)
    assert "resume after" not in whole
    assert list_checkpoints(tmp_path / "whole") == {"step-000000009": 2, "step-000000012": 2}

    killed_text = SAMPLE.replace("            optimizer.step()\n", f"            optimizer.step(){KILL}")
    assert killed_text != SAMPLE
    killed = run_job(tmp_path / "killed", killed_text, *arguments)
    assert "resume after step 6" in killed
    assert read_losses(killed) == read_losses(whole)

    fewer = run_job(tmp_path / "whole", SAMPLE, "--nodes", "1", "--", "--steps", "15", "--save-every", "3")
    assert "resume after step 12" in fewer
    assert read_losses(fewer).keys() == {15}
    assert list_checkpoints(tmp_path / "whole") == {"step-000000012": 2, "step-000000015": 1}
