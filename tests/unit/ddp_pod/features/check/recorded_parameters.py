"""Parameters that no module has, as torch.func trains them. ``sys.argv``: the folder of the records."""

import sys

import torch
from torch import nn
from torch.func import functional_call

from ddp_pod.features.check.recorder import Recorder
from ddp_pod.rank.groups import GroupRecorder

recorder = Recorder(sys.argv[1], 0, 1, GroupRecorder(sys.argv[1], 0))
recorder.watch(sys.modules["torch.optim.optimizer"])

skeleton = nn.Linear(2, 1)
skeleton.requires_grad_(False)
weights = {name: value.clone().requires_grad_() for name, value in skeleton.named_parameters()}
optimizer = torch.optim.SGD(weights.values(), lr=0.1)
functional_call(skeleton, weights, torch.ones(1, 2)).sum().backward()
optimizer.step()
recorder.end_step(optimizer)
