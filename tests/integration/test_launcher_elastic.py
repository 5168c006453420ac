"""Pods of an elastic job are added and removed: the ranks resume at the new size from the last checkpoint."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launcher_pods import LauncherPods

pytestmark = pytest.mark.process

# Rank 0 saves the step, and nothing else. All ranks agree on the step after which a SIGTERM ends them.
TRAIN = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

asked = []
signal.signal(signal.SIGTERM, lambda *about: asked.append(1))
dist.init_process_group("gloo", timeout=timedelta(seconds=200))
rank, world = dist.get_rank(), dist.get_world_size()
step = int(open("saved").read()) if os.path.exists("saved") else 0
print(f"world {world} begins at step {step}", flush=True)
while True:
    time.sleep(0.02)
    votes = torch.tensor([float(bool(asked)), float(os.path.exists("enough"))])
    dist.all_reduce(votes)
    step += 1
    if rank == 0 and (votes.any() or step % 10 == 0):
        with open("saved.tmp", "w") as file:
            file.write(str(step))
        os.rename("saved.tmp", "saved")
    if votes[0]:
        print(f"world {world} stops at step {step}", flush=True)
        dist.barrier()
        sys.exit(85)
    if rank == 0:
        print(f"step {step}", flush=True)
    if votes[1]:
        print(f"world {world} is done at step {step}", flush=True)
        break
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[LauncherPods]:
    (tmp_path / "train.py").write_text(TRAIN)
    patterns = {"log_patterns": ("step (?P<step>[0-9]+)",)}
    made = LauncherPods(tmp_path, ["train.py"], elastic=(1, 4), config=patterns)
    yield made
    made.stop()


def test_a_job_grows_shrinks_and_loses_a_pod_without_losing_steps(job: LauncherPods, tmp_path: Path) -> None:
    job.start()
    job.until_logged(0, "world 2 begins at step 0")
    assert "world 1 begins" not in job.log(0)  # it has waited for both, although one would be enough

    begun = time.monotonic()
    job.start(2)
    # The rendezvous waits only briefly for a late pod, so that a round without it may come first.
    job.until(lambda: all("world 3 begins" in job.log(index) for index in range(3)), "all three begin together")
    print(f"2 -> 3 pods: {time.monotonic() - begun:.1f} s")

    begun = time.monotonic()
    job.signal(2, signal.SIGTERM)
    grown = job.log(0).rindex("world 3 begins")
    job.until(lambda: "world 2 begins" in job.log(0)[grown:], "the others go on with two pods")
    print(f"3 -> 2 pods: {time.monotonic() - begun:.1f} s")
    assert job.wait(2).code == 85
    logs = "".join(job.log(index) for index in range(3))  # a late pod misses a round
    stops = {int(step) for step in re.findall(r"world \d stops at step (\d+)", logs)}
    starts = [int(step) for step in re.findall(r"world \d begins at step (\d+)", job.log(0))]
    assert starts == sorted(starts)
    assert set(starts) <= {0, *stops}  # no step is repeated

    begun = time.monotonic()
    job.signal(1, signal.SIGKILL)
    shrunk = job.log(0).rindex("world 2 begins")
    job.until(lambda: "world 1 begins" in job.log(0)[shrunk:], "the last one goes on alone")
    print(f"a killed pod of 2: {time.monotonic() - begun:.1f} s")
    [last_step] = re.findall(r"step (\d+)$", job.log(0).partition("world 1 begins")[0], re.MULTILINE)[-1:]
    shown = re.search(r"^ddp_launcher_restart_step (\d+)$", job.page(), re.MULTILINE)
    assert shown is not None, job.page()
    assert int(last_step) - int(shown[1]) in (0, 1)
    (tmp_path / "enough").touch()
    last = job.wait(0)
    assert last.code == 0, last.log
    assert "world 1 is done" in last.log
    # The ranks of a round that another change of size overtakes do not start.
    assert last.message["restarts"] >= last.log.count(" begins at step ") - 1 >= 3
