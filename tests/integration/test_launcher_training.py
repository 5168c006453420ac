"""The launcher with real torchrun agents and gloo: two pods train, fail, restart in the same pods."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launcher_pods import PodsFactory, launch_pods

pytestmark = pytest.mark.process

TRAIN = """
import os, sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index * index


dist.init_process_group("gloo")
rank, restart = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
node = os.environ["JOB_COMPLETION_INDEX"]
print(f"rank {rank} of {dist.get_world_size()} on node {node}: sum {total.item()}, restart {restart}", flush=True)
if sys.argv[1:] == ["raise"] and rank == 1:
    raise ValueError("the data is \\u00e4 mess")
dist.all_reduce(total)
dist.destroy_process_group()
squares = [int(square) for square in DataLoader(Squares(), num_workers=1)]
print(f"rank {rank} is done: {squares}", flush=True)
"""

# The same without a process group, to test the agents: torch's import is most of a rank's time.
ALONE = """
import os, sys, time
rank = int(os.environ["RANK"])
print(f"rank {rank} of {os.environ['WORLD_SIZE']} begins", flush=True)
again = os.path.exists(f"begun-{rank}")
open(f"begun-{rank}", "w").close()
if sys.argv[1] == "raise" or not again:
    while not os.path.exists("begun-0"):
        time.sleep(0.05)
    if rank == 1:
        raise RuntimeError("only the first time" if sys.argv[1] == "raise once" else "always")
    time.sleep(600)  # as a rank does whose peer has left a collective
print(f"rank {rank} is done, restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
"""

LOOP = """
enough = torch.zeros(1)
while enough == 0:
    enough += os.path.exists("enough")
    dist.all_reduce(enough)
"""


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[PodsFactory]:
    with launch_pods(tmp_path, TRAIN) as factory:
        yield factory


def test_two_pods_train_plain_script(pods: PodsFactory) -> None:
    job = pods("python", "train.py")
    first, second = job.run()
    assert (first.code, second.code) == (0, 0), first.log + second.log
    assert "rank 0 of 2 on node 0: sum 3.0" in first.log
    assert "rank 1 of 2 on node 1: sum 3.0" in second.log
    assert "rank 0 is done: [0, 1, 4, 9]" in first.log
    assert first.message["category"] == ""
    assert first.message["version"] == 2
    assert second.message["groups"]["state"] == "Together"


def test_script_without_group_and_step_reports_unknown(pods: PodsFactory) -> None:
    job = pods("python", "train.py", script="import torch.distributed; print('no GPU'); raise SystemExit(0)")
    for end in job.run():
        assert (end.code, end.message["groups"]["state"]) == (0, "Unknown"), end.log


def test_failed_pod_reports_cause_and_peer_fails_secondarily(pods: PodsFactory) -> None:
    secondary, root = pods("train.py", "raise").run()
    assert root.code == 81
    assert root.message["message"] == "ValueError: the data is ä mess"
    assert root.message["category"] == "UserError"
    assert root.message["rank"] == 1
    assert (root.message["podIndex"], root.message["localRank"], root.message["exitCode"]) == (1, 0, 1)
    assert "train.py" in root.message["traceback"]
    assert "ddp-launcher-" not in root.message["traceback"]
    assert root.message["secondary"] is False
    assert "ValueError: the data is ä mess" in root.log.rpartition("---- UserError")[2]
    assert secondary.code == 86
    assert secondary.message["secondary"] is True
    assert secondary.message["category"] == "Network"


def test_worker_failing_once_is_restarted_in_place(pods: PodsFactory) -> None:
    command = "torchrun", "--monitor-interval=0.2", "train.py", "raise once"
    first, second = pods(*command, script=ALONE, max_restarts=2).run()
    assert (first.code, second.code) == (0, 0), first.log + second.log
    assert second.message["restarts"] == 1
    assert first.message["restarts"] == 1
    failure = second.message["lastFailure"]
    assert (failure["message"], failure["restarts"]) == ("RuntimeError: only the first time", 1)
    assert "restarting the workers in the same pods, restart 1: RuntimeError: only the first time" in second.log
    assert second.log.count("rank 1 of 2 begins") == 2
    assert "rank 0 is done, restart 1" in first.log  # and not 0, which torchrun has where only peers have failed
    assert "rank 1 is done, restart 1" in second.log


def test_repeated_exception_without_progress_ends_pod_within_budget(pods: PodsFactory) -> None:
    job = pods("train.py", "raise", script=ALONE, max_restarts=5)
    job.start()
    failing = job.wait(1)
    assert failing.code == 81
    assert failing.log.count("rank 1 of 2 begins") == 2
    line = ALONE[: ALONE.index("raise RuntimeError")].count("\n") + 1
    assert failing.message["signature"] == f"RuntimeError at train.py:{line}"
    assert (failing.message["repeated"], failing.message["restarts"]) == (True, 1)
    assert f"not restarted: RuntimeError at train.py:{line} occurred twice without progress in between" in failing.log


def test_static_rendezvous_with_two_workers_per_pod(pods: PodsFactory) -> None:
    first, second = pods("python", "-u", "train.py", backend="static", nproc=2).run()
    assert (first.code, second.code) == (0, 0), first.log + second.log
    assert "[rank1]: rank 1 of 4 on node 0: sum 10.0" in first.log
    assert "[rank2]: rank 2 of 4 on node 1: sum 10.0" in second.log


def test_rank_that_raised_is_reported_of_two_local_ranks(pods: PodsFactory) -> None:
    (pod,) = pods("train.py", "raise", nodes=1, nproc=2, script=ALONE).run()
    assert pod.code == 82
    assert (pod.message["rank"], pod.message["localRank"]) == (1, 1)
    assert pod.message["message"].startswith("RuntimeError")
    assert pod.message["secondary"] is False


def test_pods_wait_for_late_master_and_log_it(pods: PodsFactory) -> None:
    job = pods("train.py", script="import os; print('rank', os.environ['RANK'], flush=True)")
    job.start(1)
    job.until_logged(1, f"waiting for master 127.0.0.1:{job.port} (nothing listens there yet")
    job.start(0)
    assert (job.wait(0).code, job.wait(1).code) == (0, 0), job.log(0) + job.log(1)
    assert "rank 1" in job.log(1)


def test_training_continues_with_replacement_of_killed_master(pods: PodsFactory) -> None:
    script = TRAIN.replace("dist.all_reduce(total)\ndist.destroy", LOOP + "dist.destroy")
    job = pods("train.py", script=script, max_restarts=1, config={"restarts_without_progress": 1})
    job.start()
    job.until(lambda: "sum 3.0" in job.log(0) and "sum 3.0" in job.log(1), "both ranks train")
    job.signal(0, signal.SIGKILL)
    job.wait(0)
    job.start(0)
    job.until(lambda: job.log(0).count("sum 3.0") == job.log(1).count("sum 3.0") == 2, "both ranks train again")
    (job.folder / "enough").touch()
    first = job.wait(0)
    second = job.wait(1)
    assert (first.code, second.code) == (0, 0), first.log + second.log
    assert "rank 0 of 2 on node 0" in first.log
    assert second.message["restarts"] == 1
