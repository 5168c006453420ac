"""``MemoryCheckpoint`` in two processes, each of which stands for a pod. This process is one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trainer_ranks import run_as_rank

BEGINNING = """
import os
import shutil
from ddp_sdk.memory import MemoryCheckpoint, checkpoint, ranks as module
rank, folder = world.rank, os.path.join(arguments[0], "memory")
os.environ |= {"JOB_COMPLETION_INDEX": str(rank), "LOCAL_RANK": "0"}

class Run:
    def __init__(self, sharded):
        torch.manual_seed(rank if sharded else 0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        objects = {"model": self.model, "optimizer": self.optimizer}
        self.memory = MemoryCheckpoint(objects, folder=folder, interval=1, sharded=sharded)

    def train(self, steps):
        for step in range(1, steps + 1):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 4)).square().mean().backward()
            self.optimizer.step()
            self.memory.save(step)

    def close(self):
        self.memory.close()
        dist.barrier()
"""
LOST_POD = """
for sharded in (False, True):
    first = Run(sharded)
    assert first.memory.restore() is None
    first.train(3)
    first.close()
    if rank == 1:
        shutil.rmtree(os.path.join(folder, "pod-1"))
    dist.barrier()
    again = Run(sharded)
    assert again.memory.restore() == 3
    if not sharded:  # the buffers of rank 0, which differ
        world.broadcast_buffers(first.model)
        assert torch.equal(again.model[1].running_mean, first.model[1].running_mean)
    assert torch.equal(again.model[0].weight, first.model[0].weight)
    assert len(again.optimizer.state) == len(first.optimizer.state)
    again.close()
    shutil.rmtree(os.path.join(folder, f"pod-{rank}"))
    dist.barrier()
"""
NO_ROOM_IN_ONE_POD = """
available, checkpoint.find_available = checkpoint.find_available, lambda path: 1 << (10 if rank else 40)
run = Run(True)
run.memory.restore()
run.train(2)
run.close()
checkpoint.find_available = available
assert Run(True).memory.restore() is None
"""
ONE_RANK_SAVES = """
seconds, module._SECONDS_FOR_PEERS = module._SECONDS_FOR_PEERS, 0.1
for sharded in (True, False):
    run = Run(sharded)
    run.memory.restore()
    run.train(2 if rank == 0 else 0)
    run.close()
    again = Run(sharded)
    assert again.memory.restore() == (None if sharded else 2)
    again.close()
module._SECONDS_FOR_PEERS = seconds
"""
NO_CONNECTION = """
seconds, module._SECONDS_FOR_PEERS = module._SECONDS_FOR_PEERS, 1.0
ring = checkpoint.Ring

def refuse(*_):
    raise RuntimeError("refused")

checkpoint.Ring = refuse if rank else ring
run = Run(True)
run.memory.restore()
run.train(2)
run.close()
module._SECONDS_FOR_PEERS, checkpoint.Ring = seconds, ring
assert Run(True).memory.restore() is None
"""


@pytest.mark.parametrize(
    ("script", "own", "message"),
    [
        (LOST_POD, 0, "training continues from step 3, copied in memory; 1 ranks received it from a peer"),
        (LOST_POD, 1, ""),
        (NO_ROOM_IN_ONE_POD, 1, "the copies need 1 MiB of memory"),
        (ONE_RANK_SAVES, 0, "save() is not called by all ranks: pods whose ranks do not call it keep no copies"),
        (NO_CONNECTION, 0, "no more copies: the neighbouring pod does not respond: "),
    ],
    ids=["sends to the lost pod", "is the lost pod", "no room in one pod", "one rank saves", "no connection"],
)
def test_pods_agree_on_copies(
    script: str,
    own: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", str(own))
    run_as_rank(own, tmp_path, BEGINNING + script, 2, monkeypatch)
    assert message in capfd.readouterr().err
