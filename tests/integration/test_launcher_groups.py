"""Process groups of two real pods: whether their ranks train together, and what keeps a rank waiting."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launcher_pods import PodEnd, PodsFactory, launch_pods

pytestmark = pytest.mark.process

SCRIPT = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

mode = sys.argv[1]
rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
wait = timedelta(seconds=8)


def train(group=True):
    model = torch.nn.Linear(4, 1)
    model = torch.nn.parallel.DistributedDataParallel(model) if group else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def init_and_train(index=0):
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=wait)
    train()
    dist.destroy_process_group()


if mode == "late" and rank == 1:
    time.sleep(25)
if mode == "address":
    os.environ["MASTER_PORT"] = "1"
if mode in ("together", "late", "address"):
    dist.init_process_group("gloo", timeout=wait)
if mode == "local":
    dist.init_process_group("gloo", rank=local, world_size=size, timeout=wait)
if mode == "multiplied":
    dist.init_process_group("gloo", rank=rank, world_size=2 * size, timeout=wait)
if mode == "own group":
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
if mode == "nothing":
    sys.exit()
if mode == "child" and __name__ == "__main__":
    torch.multiprocessing.spawn(init_and_train, nprocs=1)
    sys.exit()
if mode != "child":
    train(group=dist.is_initialized())
    if dist.is_initialized():
        dist.destroy_process_group()
"""
NESTED = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=1 train.py together"


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[PodsFactory]:
    with launch_pods(tmp_path, SCRIPT) as create:
        yield create


def run(pods: PodsFactory, *command: str) -> list[PodEnd]:
    return pods(*command, env={"OMP_NUM_THREADS": "1"}).run()


@pytest.mark.parametrize(
    ("command", "state"),
    [
        (["python", "train.py", "together"], "Together"),
        (["python", "train.py", "child"], "Together"),
        (["bash", "-c", f"exec 3>&1; {sys.executable} train.py together"], "Together"),
        (["python", "train.py", "alone"], "Alone"),
        (["python", "train.py", "own group"], "Separate"),
        (["bash", "run.sh"], "Separate"),
        (["env", "A=1", "bash", "-lc", f"cd . && {NESTED} | tee log"], "Separate"),
        (["python", "-c", f"import subprocess; subprocess.run({NESTED.split()}, check=True)"], "Separate"),
        (["python", "train.py", "nothing"], "Unknown"),
        (["bash", "-c", f"{sys.executable} -I train.py alone"], "Unknown"),
    ],
    ids=[
        "group",
        "spawned",
        "in bash",
        "no group",
        "size 1",
        "torchrun in a script",
        "torchrun behind a pipe",
        "subprocess",
        "none",
        "isolated",
    ],
)
def test_ranks_that_end_report_whether_they_trained_together(
    pods: PodsFactory, tmp_path: Path, command: list[str], state: str
) -> None:
    (tmp_path / "run.sh").write_text(f"set -e\n{NESTED}\n")
    for end in run(pods, *command):
        assert (end.code, end.message["groups"]["state"]) == (0, state), end.log
        assert end.message["groups"]["worldSize"] == 2


@pytest.mark.parametrize(
    ("mode", "culprit", "words"),
    [
        ("wrapper", None, ["127.0.0.1:1, which is not the job's store"]),
        ("late", 1, ["rank 1 has not called init_process_group", "train.py:"]),
        ("local", 1, ["joined as rank 0", "none as rank 1"]),
        ("multiplied", None, ["waits for 4 ranks, the job has 2"]),
        ("address", None, ["127.0.0.1:1, which is not the job's store"]),
    ],
)
def test_wait_that_the_script_causes_ends_as_user_error(
    pods: PodsFactory, mode: str, culprit: int | None, words: list[str]
) -> None:
    command = ["python", "train.py", mode]
    if mode == "wrapper":
        command = ["bash", "-c", f"export MASTER_PORT=1; {sys.executable} train.py together"]
    job = pods(*command, max_restarts=3, config={"restarts_without_progress": 3})
    job.start()
    end = job.wait(0)  # the operator ends the other pod
    message = end.message
    assert (end.code, message["category"], message["secondary"], message["restarts"]) == (81, "UserError", False, 0)
    assert all(word in message["message"] for word in words), message
    assert message["remedy"]
    assert culprit is None or (message["rank"], message["podIndex"]) == (culprit, culprit)
