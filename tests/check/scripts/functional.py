"""Train weights that are no part of a module, with functional_call and an own all-reduce."""

import os

import torch
import torch.distributed as dist
from common import SEED, EpochOrder, load_digits
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def average(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


dist.init_process_group("gloo")
torch.manual_seed(SEED)
data = load_digits()
order = EpochOrder(len(data), dist.get_rank(), dist.get_world_size())
loader = DataLoader(data, batch_size=32, sampler=order)
skeleton = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
weights = {name: value.detach().clone().requires_grad_() for name, value in skeleton.named_parameters()}
for value in weights.values():
    dist.broadcast(value.data, src=0)
optimizer = torch.optim.Rprop(weights.values(), lr=1e-3)

start = 0
if os.path.exists("weights.pt"):
    saved = torch.load("weights.pt")
    for name, value in weights.items():
        value.data.copy_(saved["weights"][name])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["epoch"]
for epoch in range(start, 7):
    order.epoch = epoch
    for images, labels in loader:
        loss = cross_entropy(functional_call(skeleton, weights, images), labels)
        optimizer.zero_grad()
        loss.backward()
        average([value.grad for value in weights.values()])
        optimizer.step()
    if dist.get_rank() == 0:
        kept = {name: value.detach().clone() for name, value in weights.items()}
        torch.save({"weights": kept, "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, "weights.new")
        os.replace("weights.new", "weights.pt")
dist.destroy_process_group()
