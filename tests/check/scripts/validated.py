"""Validate after each epoch, lower the learning rate on a plateau, keep the best weights, and stop early."""

import copy
import math
import os

import torch
import torch.distributed as dist
from common import SEED, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset


def split(data):
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(SEED)).tolist()
    return Subset(data, order[:512]), Subset(data, order[512:])


@torch.no_grad()
def validate(network, loader):
    network.eval()
    total = torch.zeros(2)
    for images, labels in loader:
        total += torch.tensor([cross_entropy(network(images), labels, reduction="sum").item(), len(labels)])
    network.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(SEED)
train_data, held_out = split(load_digits())
sampler = DistributedSampler(train_data, drop_last=True)
loader = DataLoader(train_data, batch_size=32, sampler=sampler)
held_out_loader = DataLoader(held_out, batch_size=32, sampler=DistributedSampler(held_out, shuffle=False))

network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
best = {"loss": math.inf, "weights": None}
bad_epochs = 0
start = 0

if os.path.exists("run.pt"):
    state = torch.load("run.pt")
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    plateau.load_state_dict(state["plateau"])
    best = state["best"]
    bad_epochs = state["bad_epochs"]
    start = state["epoch"]

for epoch in range(start, 20):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    loss = validate(network, held_out_loader)
    plateau.step(loss)
    if loss < best["loss"]:
        best = {"loss": loss, "weights": copy.deepcopy(network.state_dict())}
        bad_epochs = 0
    else:
        bad_epochs += 1
    if rank == 0:
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "best": best}
        state |= {"plateau": plateau.state_dict(), "bad_epochs": bad_epochs, "epoch": epoch + 1}
        torch.save(state, "run.new")
        os.replace("run.new", "run.pt")
    if bad_epochs > 8:
        break
dist.destroy_process_group()
