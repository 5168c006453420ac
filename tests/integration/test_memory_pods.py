"""``MemoryCheckpoint`` in pods with real launchers and agents."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launcher_pods import LauncherPods

pytestmark = pytest.mark.process

# A copy takes longer than the time from the end of a step to the failure of a rank.
SLOW_COPIES = """
import os, sys, time
import torch
import torch.distributed as dist
from ddp_sdk.memory import MemoryCheckpoint, writer

copy_memory = writer.copy_memory
def copy_slowly(address, source, size):
    time.sleep(0.1)
    copy_memory(address, source, size)
writer.copy_memory = copy_slowly

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
memory = MemoryCheckpoint({"model": model, "optimizer": optimizer}, interval=1)
first = memory.restore() or 0
print(f"rank {rank} begins after step {first}", flush=True)
for step in range(first, 6):
    if rank == 1 and step == 4 and first == 0:
        while not os.path.exists("saved-4"):  # rank 0 may be slower, and a step that it has not made cannot be kept
            time.sleep(0.005)
        os.kill(os.getpid(), 9)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    memory.save(step + 1)
    if rank == 0:
        open(f"saved-{step + 1}", "w").close()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def memory_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ddp-test-", dir="/dev/shm") as folder:
        yield folder


@pytest.mark.parametrize(("nodes", "nproc"), [(2, 1), (1, 2)])
def test_rank_killed_during_a_copy_costs_no_completed_step(
    nodes: int, nproc: int, memory_folder: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SLOW_COPIES)
    env = {"DDP_MEMORY_DIR": memory_folder}
    pods = LauncherPods(tmp_path, ["train.py"], nodes=nodes, nproc=nproc, max_restarts=1, env=env)
    try:
        pods.start()
        ends = [pods.wait(index) for index in range(nodes)]
    finally:
        pods.stop()
    logs = "".join(end.log for end in ends)
    assert [end.code for end in ends] == [0] * nodes, logs
    assert sorted(re.findall(r"begins after step (\d+)", logs)) == ["0", "0", "4", "4"]
