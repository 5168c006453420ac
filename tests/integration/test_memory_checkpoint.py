"""``MemoryCheckpoint`` in two ranks, each of which is a pod with its own folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.pod_python import POD_PYTHON
from tests.support.ports import HeldPort

pytestmark = pytest.mark.process

COMMON = """
import hashlib, os, sys, time
import torch
import torch.distributed as dist
from ddp_sdk.memory import MemoryCheckpoint

device = os.environ.get("DEVICE", "cpu")
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
"""
LOOP = """
step = memory.restore() or 0
print(f"rank {rank} begins after step {step}", flush=True)
for step in range(step, int(os.environ["STEPS"])):
    torch.manual_seed(1000 * step + rank)
    loss = model(torch.randn(16, 32, device=device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == int(os.environ.get("FAIL_RANK", -1)) and step == int(os.environ["FAIL_STEP"]):
        os.kill(os.getpid(), 9)
    if rank in (0, 1) if os.environ.get("SAVE_EVERYWHERE", "1") == "1" else rank == 0:
        memory.save(step + 1)
digest = hashlib.sha256()
for item in (model, optimizer):
    state = item.state_dict()
    for value in torch.utils._pytree.tree_leaves(state):
        if isinstance(value, torch.Tensor):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            digest.update(value.cpu().numpy().tobytes())
if rank == 0:
    print(f"final {step + 1} {digest.hexdigest()}", flush=True)
memory.close()
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # on a busy machine gloo's threads abort an interpreter that ends (pytorch/pytorch#190489)
"""
REPLICATED = (
    COMMON
    + """
inner = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.1)).to(device)
model = torch.nn.parallel.DistributedDataParallel(inner)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
memory = MemoryCheckpoint({"model": model, "optimizer": optimizer}, folder=os.environ["FOLDER"], interval=1)
"""
    + LOOP
)
SHARDED = (
    COMMON
    + """
from torch.distributed.fsdp import fully_shard

model = torch.nn.Sequential(torch.nn.Linear(32, 63), torch.nn.LayerNorm(63), torch.nn.Linear(63, 8)).to(device)
fully_shard(model[0])
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
memory = MemoryCheckpoint({"model": model, "optimizer": optimizer}, folder=os.environ["FOLDER"], interval=1)
"""
    + LOOP
)

# With the automatic interval save() does not wait for so slow a copy.
RAISING = (
    COMMON
    + """
from ddp_sdk.memory import writer

copy_memory = writer.copy_memory
def copy_slowly(address, source, size):
    time.sleep(0.05)
    copy_memory(address, source, size)
writer.copy_memory = copy_slowly

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
memory = MemoryCheckpoint({"model": model, "optimizer": optimizer}, folder=os.environ["FOLDER"])
first = memory.restore() or 0
print(f"begins after step {first}", flush=True)
for step in range(first, int(os.environ["STEPS"])):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    memory.save(step + 1)
if first == 0:
    raise RuntimeError("the script fails after its last step")
"""
)


class Group:
    """Ranks of a script, each the only one of its pod."""

    def __init__(self, script: str, folder: Path) -> None:
        self.script = folder / "train.py"
        self.script.write_text(script)
        self.memory = folder / "memory"
        self.output = ""

    def run(self, steps: int, *, ranks: int = 2, **variables: object) -> bool:
        """Train to a step. Returns whether all ranks succeeded."""
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "trainer"),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": "0",
            "FOLDER": str(self.memory),
            "STEPS": str(steps),
            **{name: str(value) for name, value in variables.items()},
        }
        with HeldPort() as held, ExitStack() as stack:
            env["MASTER_PORT"] = str(held.number)
            processes = []
            for rank in range(ranks):
                process = stack.enter_context(self._start({**env, "RANK": str(rank), "GROUP_RANK": str(rank)}))
                stack.callback(process.kill)
                processes.append(process)
            self.output = "\n".join(process.communicate(timeout=300)[0] for process in processes)
        return all(process.returncode == 0 for process in processes)

    def _start(self, env: dict[str, str]) -> subprocess.Popen[str]:
        command = [POD_PYTHON, str(self.script)]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def lose_pod(self, index: int) -> None:
        """Delete the memory of a pod."""
        shutil.rmtree(self.memory / f"pod-{index}")

    @property
    def final(self) -> str:
        [line] = [line for line in self.output.splitlines() if line.startswith("final ")]
        return line


@pytest.mark.parametrize("script", [REPLICATED, SHARDED], ids=["ddp", "fsdp2"])
def test_lost_pods_cost_no_completed_step(tmp_path: Path, script: str) -> None:
    undisturbed = Group(script, tmp_path)
    assert undisturbed.run(8), undisturbed.output
    shutil.rmtree(undisturbed.memory)

    group = Group(script, tmp_path)
    assert not group.run(8, FAIL_RANK=0, FAIL_STEP=3)
    group.lose_pod(0)
    assert not group.run(8, FAIL_RANK=1, FAIL_STEP=6)
    assert "training continues from step 3, copied in memory; 1 ranks received it from a peer" in group.output
    group.lose_pod(1)
    assert group.run(8), group.output
    assert "training continues from step 6, copied in memory; 1 ranks received it from a peer" in group.output
    assert group.output.count("begins after step 6") == 2
    assert group.final == undisturbed.final


def test_rank_that_raises_an_exception_completes_its_copy(tmp_path: Path) -> None:
    group = Group(RAISING, tmp_path)
    assert not group.run(3, ranks=1)
    assert "the script fails after its last step" in group.output
    assert group.run(3, ranks=1), group.output
    assert "begins after step 3" in group.output


def test_all_pods_lost_begins_anew(tmp_path: Path) -> None:
    group = Group(SHARDED, tmp_path)
    assert group.run(3), group.output
    shutil.rmtree(group.memory)
    assert group.run(3), group.output
    assert group.output.count("begins after step 0") == 2


def test_replicated_state_continues_with_fewer_ranks(tmp_path: Path) -> None:
    group = Group(REPLICATED, tmp_path)
    assert group.run(3), group.output
    group.lose_pod(0)
    (group.memory / "pod-1").rename(group.memory / "pod-0")
    assert group.run(5, ranks=1), group.output
    assert "begins after step 3" in group.output


def test_sharded_state_does_not_continue_with_fewer_ranks(tmp_path: Path) -> None:
    group = Group(SHARDED, tmp_path)
    assert group.run(3), group.output
    group.lose_pod(1)
    assert group.run(5, ranks=1), group.output
    assert "copies of 2 ranks do not fit 1; training continues from the disk" in group.output
    assert "begins after step 0" in group.output


def test_script_that_saves_in_one_rank_only_keeps_one_copy(tmp_path: Path) -> None:
    group = Group(REPLICATED, tmp_path)
    assert group.run(3, SAVE_EVERYWHERE=0), group.output
    assert "save() is not called by all ranks: pods whose ranks do not call it keep no copies" in group.output
    assert group.run(4, SAVE_EVERYWHERE=0), group.output
    assert group.output.count("begins after step 3") == 2
