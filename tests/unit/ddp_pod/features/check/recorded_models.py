"""Two models with equal names, of which one is called beside its wrapper. ``sys.argv``: the folder of the records."""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddp_pod.features.check.recorder import Recorder
from ddp_pod.rank.groups import GroupRecorder

recorder = Recorder(sys.argv[1], 0, 1, GroupRecorder(sys.argv[1], 0))
recorder.watch(sys.modules["torch.optim.optimizer"])

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
first = nn.Linear(2, 1, bias=False)
wrapped = DistributedDataParallel(first)
second = nn.Linear(2, 1, bias=False)
optimizer = torch.optim.SGD([first.weight, second.weight], lr=0.1)
delivered = iter(DataLoader(TensorDataset(torch.arange(6.0).reshape(3, 2))))
kept = {}
for (x,) in delivered:
    optimizer.zero_grad()
    (first(x) + second(x).square()).sum().backward()
    optimizer.step()
    recorder.end_step(optimizer)
    if not kept:
        kept = {"copy": first.state_dict().copy(), "cpu": {n: v.cpu() for n, v in first.state_dict().items()}}
        kept["list"] = [first.weight.data]
        shallow = copy.copy(first)
        deep = copy.deepcopy(first)
folder = os.path.join(sys.argv[1], "copy")
os.makedirs(folder)
first.load_state_dict(kept["cpu"])
second.load_state_dict(kept["cpu"])
kept |= {"shallow": shallow.state_dict(), "whole": [shallow], "deep": deep.state_dict()}
for name, state in kept.items():
    torch.save(state, os.path.join(folder, f"{name}.pt"))
torch.save(first.state_dict(), os.path.join(folder, "last.pt"))
dist.destroy_process_group()
