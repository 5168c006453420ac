"""A rank whose parameters or loss go wrong: the job restarts from its checkpoint, and ends well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ddp_run import DdpRun, manifest

pytestmark = pytest.mark.process

# Saves after each step while its loss is finite. The first attempt trains until it is restarted.
SCRIPT = """
import os, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    step = state.pop("step")
    model.module.load_state_dict(state)
first = step
torch.manual_seed(rank)
is_first = os.environ["DDP_ATTEMPT"] == "1"
while is_first or step < first + 20:
    batch = torch.randn(4, 8)
    if is_first and step == 40 and rank == 1:
        if os.environ["FAULT"] == "batch":
            batch[0, 0] = float("nan")
        else:
            model.module.weight.data[0, 0] *= 2
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    step += 1
    if rank == 0 and loss.isfinite() and all(value.isfinite().all() for value in model.parameters()):
        torch.save({"step": step, **model.module.state_dict()}, "new.pt")
        os.replace("new.pt", "last.pt")
    time.sleep(0.02)
weights = [torch.empty(1, 8) for _ in range(3)]
dist.all_gather(weights, model.module.weight.data)
assert all(torch.equal(weights[0], other) for other in weights) and weights[0].isfinite().all()
if rank == 0:
    print("resumed after step", first, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("fault", "text"), [("flip", "the parameters of rank 1"), ("batch", "the loss of rank 1")])
def test_job_restarts_from_its_checkpoint_and_succeeds(tmp_path: Path, fault: str, text: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    recovery = {"maxRestarts": 1, "warmStart": "Off", "replicaMismatch": "Restart"}
    job = manifest(["python", "train.py"], nodes=1, procPerNode=3, env={"FAULT": fault}, recovery=recovery)
    with DdpRun(tmp_path, job) as run:
        assert run.wait() == 0, run.output
        status = run.read_status()
    failure = status["lastFailure"]
    assert (status["phase"], status["attempt"]) == ("Succeeded", 2)
    assert (failure["category"], failure["rank"]) == ("ReplicasDiffer", 1)
    assert text in failure["message"]
    log = (run.run_folder / "logs" / "attempt-2-pod-0.log").read_text()
    assert int(log.partition("resumed after step ")[2].split()[0]) >= 40
