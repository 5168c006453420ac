"""Fine-tune: the head alone in the first epoch, then the body too. The model is wrapped again after the change."""

import os

import torch
import torch.distributed as dist
from common import SEED, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.Tanh())
        self.head = nn.Linear(32, 10)

    def features(self, images):
        return self.body(images)

    def forward(self, images):
        return self.head(self.features(images))


def wrap(network, epoch):
    network.body.requires_grad_(epoch > 0)
    return DistributedDataParallel(network)


dist.init_process_group("gloo")
torch.manual_seed(SEED)
data = load_digits()
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, batch_size=32, sampler=sampler)
network = Classifier()
groups = [{"params": network.body.parameters(), "lr": 1e-3}, {"params": network.head.parameters(), "lr": 1e-2}]
optimizer = torch.optim.AdamW(groups)
first = 0
if os.path.exists("tuned.pt"):
    state = torch.load("tuned.pt")
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"]
model = wrap(network, first)
for epoch in range(first, 6):
    if epoch == 1:
        model = wrap(network, epoch)
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, "new.pt")
        os.replace("new.pt", "tuned.pt")
dist.destroy_process_group()
