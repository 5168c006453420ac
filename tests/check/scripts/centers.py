"""Train with a loss that has parameters of its own: a center for each class. It is wrapped as the network is."""

import os

import torch
import torch.distributed as dist
from common import SEED, load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Wrapped
from torch.utils.data import DataLoader, DistributedSampler


class CenterLoss(nn.Module):
    def __init__(self, classes, width):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(classes, width))

    def forward(self, points, labels):
        distances = torch.cdist(points, self.centers)
        return nn.functional.cross_entropy(-distances, labels)


def train(epochs):
    data = load_digits()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    criterion = CenterLoss(10, 8)
    model = Wrapped(network)
    loss_model = Wrapped(criterion)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    center_optimizer = torch.optim.SGD(criterion.parameters(), lr=0.5)
    parts = {"network": network, "criterion": criterion, "first": optimizer, "second": center_optimizer}
    begin = 0
    if os.path.exists("centers.pt"):
        content = torch.load("centers.pt")
        for name, part in parts.items():
            part.load_state_dict(content[name])
        begin = content["epoch"]
    for epoch in range(begin, epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = loss_model(model(images), labels)
            optimizer.zero_grad()
            center_optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            center_optimizer.step()
        if dist.get_rank() == 0:
            content = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**content, "epoch": epoch + 1}, "centers.new")
            os.replace("centers.new", "centers.pt")


dist.init_process_group("gloo")
torch.manual_seed(SEED)
train(6)
dist.destroy_process_group()
