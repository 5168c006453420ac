"""Train with FSDP2. Each rank saves its shards to a new folder, with torch.distributed.checkpoint."""

import pathlib
import signal
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import SEED, finish, load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions as Options
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
stop = torch.zeros(1)
signal.signal(signal.SIGTERM, lambda *_: stop.fill_(1))
torch.manual_seed(SEED)
data = load_digits()
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, batch_size=32, sampler=sampler)

mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def save(step):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"checkpoints/{step}")


steps = 0
saved = [int(file.parent.name) for file in pathlib.Path("checkpoints").glob("*/.metadata")]
dist.barrier()
if saved:
    steps = max(saved)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=f"checkpoints/{steps}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

batches = len(loader)
for epoch in range(steps // batches, 6):
    sampler.set_epoch(epoch)
    for batch, (images, labels) in enumerate(loader):
        if epoch * batches + batch < steps:
            continue
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        steps += 1
        dist.all_reduce(stop)
        if stop or steps % 4 == 0:
            save(steps)
        if stop:
            dist.destroy_process_group()
            sys.exit(143)


class Whole:
    """The model with whole weights."""

    def state_dict(self):
        return get_model_state_dict(model, options=Options(full_state_dict=True, cpu_offload=True))


finish(Whole())
