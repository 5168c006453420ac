"""An evicted pod, whatever its script does on SIGTERM: the other pods wait for the next one, and nothing is counted.

The ranks of all pods end after the same step, as those of the documented script: an all-reduced flag ends the loop.
"""

from __future__ import annotations

import operator
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.launcher_pods import LauncherPods, PodsFactory, launch_pods

pytestmark = pytest.mark.process

TRAIN = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

class Stopped(Exception):
    pass

def end():
    ENDING

asked = []
signal.signal(signal.SIGTERM, lambda *about: asked.append(1) if HANDLES else None)
dist.init_process_group("gloo", timeout=timedelta(seconds=200))
rank, world = dist.get_rank(), dist.get_world_size()
first = step = int(open("saved").read()) if os.path.exists("saved") else 0
print(f"begins at step {step}", flush=True)
while True:
    time.sleep(0.02)
    votes = torch.tensor([float(bool(asked)), float(os.path.exists("enough"))])
    dist.all_reduce(votes)
    step += 1
    if rank == 0:
        with open("saved.tmp", "w") as file:
            file.write(str(step))
        os.rename("saved.tmp", "saved")
        print(f"step {step}", flush=True)
    if step == first + 3:
        print(f"trains from step {first}", flush=True)
    if votes[0]:
        print(f"stops at step {step}", flush=True)
        end()
        break
    if votes[1]:
        print(f"done at step {step}", flush=True)
        break
"""
ENDINGS = {
    "exit 143": "sys.exit(143)",
    "exit 85": "dist.barrier(); sys.exit(85)",
    "exit 3": "os._exit(3)",
    "break": "pass",
    "exception": "raise Stopped('on request')",
    "killed": "",
}


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[PodsFactory]:
    with launch_pods(tmp_path) as factory:
        yield factory


def start_job(
    pods: PodsFactory, ending: str, *, waits: bool = True, forks: bool = True, **options: object
) -> LauncherPods:
    """Start the pods of a job. ``waits``: whether they wait for a lost pod; ``forks``: whether they fork ranks."""
    handles = bool(ENDINGS[ending])
    script = TRAIN.replace("ENDING", ENDINGS[ending] or "pass").replace("HANDLES", str(handles))
    config = {
        "restarts_without_progress": 1 if waits else None,
        "log_patterns": ("step (?P<step>[0-9]+)",),
        "warm_start": forks,
    }
    env = {} if handles else {"DDP_GRACE_SECONDS": "1"}
    job = pods("train.py", script=script, max_restarts=2, config=config, env=env, **options)
    job.start()
    until_all_train(job, [0] * len(job.running))
    return job


def until_all_train(job: LauncherPods, before: Sequence[int]) -> None:
    """Wait until the ranks of each pod have begun to train more often than before."""
    job.until(lambda: all(map(operator.gt, count_starts(job), before)), "all pods train")


def count_starts(job: LauncherPods) -> list[int]:
    """Return how often each pod has begun to train."""
    return [job.log(index).count("trains from step") for index in sorted(job.running)]


def evict(job: LauncherPods, *indices: int) -> None:
    """Stop pods as a kubelet does, start the next ones of their indices, and wait until all pods train."""
    before = count_starts(job)
    for index in indices:
        job.signal(index, signal.SIGTERM)
    for index in indices:
        ended = job.wait(index)
        assert (ended.code, ended.message["category"]) == (85, "Preempted"), ended.log
        (job.folder / f"port-{index}").unlink()
    job.start(*indices)
    until_all_train(job, before)


def check_nothing_counted(job: LauncherPods) -> None:
    """End the training, and check that no pod has found fault with the script, and that no step was repeated."""
    (job.folder / "enough").touch()
    ends = [job.wait(index) for index in sorted(job.running)]
    assert [end.code for end in ends] == [0] * len(ends), ends
    for end in ends:
        failure = end.message.get("lastFailure")
        assert failure is None or (failure["secondary"], failure.get("signature", "")) == (True, ""), end.message
    starts = re.findall(r"begins at step (\d+)", ends[0].log)
    stops = re.findall(r"stops at step (\d+)", ends[0].log)
    assert starts[1:] == stops or not stops


@pytest.mark.parametrize("evicted", [0, 1])
@pytest.mark.parametrize("ending", ENDINGS)
def test_eviction_restarts_peers_without_counting(pods: PodsFactory, ending: str, evicted: int) -> None:
    job = start_job(pods, ending)
    evict(job, evicted)
    check_nothing_counted(job)


@pytest.mark.parametrize("ending", ["exit 143", "break"])
def test_ranks_in_new_interpreters_restart_after_eviction_of_peer(pods: PodsFactory, ending: str) -> None:
    job = start_job(pods, ending, forks=False)
    evict(job, 1)
    check_nothing_counted(job)


@pytest.mark.parametrize("ending", ["exit 143", "break"])
def test_drain_of_two_pods_at_once_restarts_third_one(pods: PodsFactory, ending: str) -> None:
    job = start_job(pods, ending, nodes=3)
    evict(job, 1, 2)
    check_nothing_counted(job)


@pytest.mark.parametrize("ending", ["exit 143", "break", "exception"])
def test_growth_of_elastic_job_restarts_ranks_without_counting(pods: PodsFactory, ending: str) -> None:
    job = start_job(pods, ending, elastic=(1, 3))
    before = [*count_starts(job), 0]
    job.start(2)
    until_all_train(job, before)
    evict(job, 2)
    check_nothing_counted(job)


@pytest.mark.parametrize("ending", ["exit 143", "break"])
def test_peer_that_cannot_wait_ends_as_preempted(pods: PodsFactory, ending: str) -> None:
    job = start_job(pods, ending, waits=False)
    job.signal(1, signal.SIGTERM)
    ends = [job.wait(0), job.wait(1)]
    assert [(end.code, end.message["category"]) for end in ends] == [(85, "Preempted")] * 2
    assert ends[0].message["secondary"] is True
    assert ends[0].message["message"].startswith("pod 1 was asked to stop: ")


@pytest.mark.parametrize("ending", ["exit 143", "break"])
def test_rank_saves_undisturbed_after_another_rank_of_its_pod_has_ended(pods: PodsFactory, ending: str) -> None:
    slow = "stopped = len(asked); time.sleep(3) if rank == 0 else None; print(f'{len(asked) - stopped} more signals')"
    script = TRAIN.replace("    if votes[0]:\n", f"    if votes[0]:\n        {slow}\n")
    script = script.replace("ENDING", ENDINGS[ending]).replace("HANDLES", "True")
    job = pods("train.py", script=script, nproc=2, max_restarts=2, config={"restarts_without_progress": 1})
    job.start()
    until_all_train(job, [0, 0])
    job.signal(1, signal.SIGTERM)
    assert job.wait(1).code == 85
    job.until_logged(0, "[rank0]: 0 more signals")
    (job.folder / "port-1").unlink()
    job.start(1)
    job.until(lambda: job.log(0).count("trains from step") == 4, "both ranks of pod 0 train again")
    (job.folder / "enough").touch()
    assert [job.wait(index).code for index in (0, 1)] == [0, 0]


def test_exit_code_without_stop_request_is_counted(pods: PodsFactory) -> None:
    script = "import os, sys\nsys.exit(143 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)\n"
    job = pods("train.py", script=script, max_restarts=2, config={"restarts_without_progress": 1})
    ends = job.run()
    assert [end.code for end in ends] == [0, 0], ends
    assert any(end.message.get("lastFailure", {}).get("secondary") is False for end in ends), ends
