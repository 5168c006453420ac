"""Evicted pods of the documented script: the operator's view of them, with real launchers under `ddp run`."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import ROOT
from tests.support.counts import read_counts
from tests.support.ddp_run import DdpRun
from tests.support.evicted_run import PROGRAM
from tests.unit.test_docs import fenced

pytestmark = [pytest.mark.process, pytest.mark.nightly]

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
ENDINGS = {
    "exit 143": "sys.exit(143)",
    "exit 85": "sys.exit(85)",
    "exit 7": "sys.exit(7)",
    "exit 0": "sys.exit(0)",
    "exception": "raise KeyboardInterrupt",
}


def build_job(nodes: int) -> str:
    """Return the page's job, which never ends by itself and has no restart to spare."""
    *others, job = yaml.safe_load_all(fenced(PAGE, "yaml")[0])
    job["spec"] |= {"nodes": nodes, "recovery": {"maxRestarts": 1}}
    job["spec"]["template"]["spec"]["containers"][0]["command"] = ["python", "train.py", "--epochs", "1000000"]
    return yaml.safe_dump_all([*others, job])


class Training:
    """A run of the page's job."""

    def __init__(self, run: DdpRun) -> None:
        self.run = run
        run.until(lambda: list(run.folder.glob("ddp-runs/*/status.yaml")), "the run begins")

    def read_epochs(self) -> list[int]:
        """Return the epochs that rank 0 has completed, in the order of the pods' logs."""
        logs = sorted((self.run.run_folder / "logs").glob("*-pod-0*.log"), key=lambda path: path.stat().st_mtime_ns)
        return [int(epoch) for path in logs for epoch in re.findall(r"^epoch (\d+)/", path.read_text(), re.MULTILINE)]

    def await_epochs(self, more: int) -> int:
        """Wait until this many further epochs are complete; return the last one."""
        begun = max(self.read_epochs(), default=0)
        return int(
            self.run.until(lambda: (last := max(self.read_epochs(), default=0)) >= begun + more and last, "epochs")
        )

    def evict(self, index: int, replaced: int) -> dict[str, Any]:
        """Evict a pod and wait until the job trains again; return the status. ``replaced``: evictions so far."""
        request = self.run.folder / f"evict-{index}"
        request.touch()
        self.run.until(lambda: not request.exists(), f"pod {index} is evicted")
        return dict(self.run.until(lambda: self._read_recovered(replaced), f"training after eviction {replaced}"))

    def _read_recovered(self, interruptions: int) -> dict[str, Any] | None:
        status = self.run.read_status()
        restarts = read_counts(status)
        done = restarts["replaced"] + restarts["free"]
        recovered = "recoverySeconds" in (status.get("lastRestart") or {})
        return status if done == interruptions and status["phase"] == "Running" and recovered else None


def start(folder: Path, nodes: int, ending: str) -> DdpRun:
    (script,) = fenced(PAGE, "python")
    assert "sys.exit(143)" in script
    (folder / "train.py").write_text(script.replace("sys.exit(143)", ENDINGS[ending]))
    return DdpRun(folder, build_job(nodes), ["--plain"], program=PROGRAM)


def check_eviction(status: dict[str, Any], index: int) -> None:
    """Check that nothing is counted, and that the status names the eviction."""
    assert (read_counts(status)["counted"], read_counts(status)["used"]) == (0, 0), status
    failure = status["lastFailure"]
    assert (failure["category"], failure["podIndex"]) == ("Preempted", index), failure
    assert "EvictionByEvictionAPI" in failure["message"], failure


@pytest.mark.parametrize(("nodes", "index"), [(2, 0), (2, 1), (1, 0)])
@pytest.mark.parametrize("ending", ENDINGS)
def test_evicted_pod_is_the_cause_and_not_counted(tmp_path: Path, ending: str, nodes: int, index: int) -> None:
    with start(tmp_path, nodes, ending) as run:
        job = Training(run)
        job.await_epochs(2)
        check_eviction(job.evict(index, 1), index)
        job.await_epochs(2)
        run.process.send_signal(signal.SIGTERM)
        run.wait()


def test_ten_evictions_in_a_row_are_not_counted_and_lose_no_epoch(tmp_path: Path) -> None:
    with start(tmp_path, 2, "exit 143") as run:
        job = Training(run)
        job.await_epochs(2)
        for number in range(10):
            check_eviction(job.evict(number % 2, number + 1), number % 2)
            job.await_epochs(1)
        status = run.read_status()
        assert status["attempt"] == 1, status
        epochs = job.read_epochs()
        assert sorted(epochs) == list(range(1, len(epochs) + 1)), "an epoch was repeated"
        run.process.send_signal(signal.SIGTERM)
        run.wait()
