"""Fit a function. Inputs are divided by statistics of all that was seen, which the ranks share."""

import os

import torch
import torch.distributed as dist
from common import SEED, load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class RunningScale:
    """Mean and deviation of each input so far."""

    def __init__(self):
        self.count = 0
        self.total = torch.zeros(64)
        self.squares = torch.zeros(64)

    def __call__(self, values):
        sums = torch.stack([values.sum(0), values.square().sum(0)])
        dist.all_reduce(sums)
        self.count += len(values) * dist.get_world_size()
        self.total += sums[0]
        self.squares += sums[1]
        mean = self.total / self.count
        deviation = (self.squares / self.count - mean.square()).clamp_min(1e-6).sqrt()
        return (values - mean) / deviation


def main(epochs=6):
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    data = load_digits()
    sampler = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, batch_size=40, sampler=sampler)
    network = nn.Sequential(nn.Linear(64, 16), nn.SiLU(), nn.Linear(16, 1))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adamax(model.parameters(), lr=5e-3)
    scale = RunningScale()
    start = 0
    if os.path.exists("fit.pth"):
        start = load(network, optimizer, scale)
    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)
        for values, goals in loader:
            scaled = scale(values)
            error = (model(scaled).squeeze(1) - goals.float()).square().mean()
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
        save(network, optimizer, scale, epoch)
    dist.destroy_process_group()


def load(network, optimizer, scale):
    content = torch.load("fit.pth")
    network.load_state_dict(content["network"])
    optimizer.load_state_dict(content["optimizer"])
    scale.count = content["count"]
    scale.total = content["total"]
    scale.squares = content["squares"]
    return content["epoch"] + 1


def save(network, optimizer, scale, epoch):
    if dist.get_rank() == 0:
        content = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        content |= {"count": scale.count, "total": scale.total, "squares": scale.squares}
        torch.save(content, "fit.pth.new")
        os.replace("fit.pth.new", "fit.pth")


main()
