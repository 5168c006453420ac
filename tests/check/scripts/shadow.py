"""Keep an average of the weights in a dictionary of an own class. Only rank 0 has it, and saves it."""

import os

import torch
import torch.distributed as dist
from common import SEED, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Shadow:
    """An average that follows faster in the beginning."""

    def __init__(self, network):
        self.values = {name: value.detach().clone() for name, value in network.named_parameters()}
        self.updates = 0

    def update(self, network):
        self.updates += 1
        decay = min(0.99, self.updates / (self.updates + 10))
        for name, value in network.named_parameters():
            self.values[name].lerp_(value.detach(), 1 - decay)


def main():
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    torch.manual_seed(SEED)
    data = load_digits()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    shadow = Shadow(network) if is_first else None
    epoch = 0
    if os.path.exists("shadow.pt"):
        state = torch.load("shadow.pt")
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        epoch = state["epoch"]
        if is_first:
            shadow.values = state["average"]
            shadow.updates = state["updates"]
    while epoch < 6:
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            if is_first:
                shadow.update(network)
        epoch += 1
        if is_first:
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            state["average"] = shadow.values
            state["updates"] = shadow.updates
            torch.save(state, "shadow.new")
            os.replace("shadow.new", "shadow.pt")
    dist.destroy_process_group()


main()
