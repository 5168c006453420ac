"""A layer that is replaced after the model was wrapped. ``sys.argv``: the folder of the records."""

import sys

import torch
import torch.distributed as dist
from torch import nn

from ddp_pod.features.check.recorder import Recorder
from ddp_pod.rank.groups import GroupRecorder

recorder = Recorder(sys.argv[1], 0, 1, GroupRecorder(sys.argv[1], 0))
recorder.watch(sys.modules["torch.optim.optimizer"])

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
model = nn.parallel.DistributedDataParallel(network, find_unused_parameters=True)
network[1] = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
recorder.end_step(optimizer)
dist.destroy_process_group()
