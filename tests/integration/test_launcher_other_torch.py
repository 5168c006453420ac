"""Pods with the oldest supported Python and torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.launcher_pods import LauncherPods

pytestmark = pytest.mark.process

TRAIN = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
if "fail" in sys.argv and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] in sys.argv:
    raise KeyError("a cause")
dist.barrier()
dist.destroy_process_group()
print("sum", int(one), sys.version_info[:2], torch.__version__, flush=True)
"""


@pytest.fixture
def oldest() -> str:
    python = os.environ.get("DDP_OLDEST_PYTHON", "")
    if not python:
        pytest.skip("DDP_OLDEST_PYTHON names no Python 3.9 with torch 2.2; `make torch-versions` makes one")
    return python


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def run(job: LauncherPods) -> tuple[int, ...]:
    try:
        ended = job.run()
    finally:
        job.stop()
    print(*(one.log for one in ended), sep="\n")
    return tuple(one.code for one in ended)


class TestOldest:
    """Python 3.9 and torch 2.2, in pods passed by hand."""

    def job(self, python: str, folder: Path, *arguments: str, **options: object) -> LauncherPods:
        about = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
        print("torch", about.stdout, about.stderr)
        return LauncherPods(folder, ["train.py", *arguments], python=python, warm=False, **options)  # type: ignore[arg-type]

    def test_job_trains_on_other_versions_of_torch(self, oldest: str, folder: Path) -> None:
        job = self.job(oldest, folder, nproc=2)
        assert run(job) == (0, 0)
        assert "sum 4 (3, 9) 2.2." in job.log(0)

    def test_restarts_in_place_after_a_failure(self, oldest: str, folder: Path) -> None:
        job = self.job(oldest, folder, "fail", "0", max_restarts=1)
        assert run(job) == (0, 0)
        assert "restarting the workers in the same pods, restart 1: KeyError: 'a cause'" in job.log(1)

    def test_ends_with_the_cause(self, oldest: str, folder: Path) -> None:
        job = self.job(oldest, folder, "fail", "0", "1")
        try:
            job.start()
            ended = job.wait(1)
        finally:
            job.stop()
        assert (ended.code, ended.message["message"]) == (82, "KeyError: 'a cause'"), ended.log

    def test_job_is_elastic_on_other_versions_of_torch(self, oldest: str, folder: Path) -> None:
        job = self.job(oldest, folder, elastic=(1, 2))
        assert run(job) == (0, 0)
        assert "sum 2 (3, 9) 2.2." in job.log(0)
