"""Begin with small batches: each epoch builds a DataLoader with larger ones."""

import os

import torch
import torch.distributed as dist
from common import SEED, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def build_loader(data, epoch):
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    sampler.set_epoch(epoch)
    return DataLoader(data, batch_size=16 + 8 * epoch, sampler=sampler, drop_last=True)


def save(path, **parts):
    state = {name: part if isinstance(part, int) else part.state_dict() for name, part in parts.items()}
    if dist.get_rank() == 0:
        torch.save(state, f"{path}~")
        os.replace(f"{path}~", path)


dist.init_process_group("gloo")
torch.manual_seed(SEED)
data = load_digits(960)
network = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
model = DistributedDataParallel(network)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
first = 0
if os.path.exists("curriculum.pt"):
    state = torch.load("curriculum.pt")
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"]
for epoch in range(first, 8):
    for images, labels in build_loader(data, epoch):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    save("curriculum.pt", network=network, optimizer=optimizer, epoch=epoch + 1)
dist.destroy_process_group()
