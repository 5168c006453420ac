"""Train on images with random noise of NumPy and random masks, whose random states are saved."""

import os

import numpy as np
import torch
import torch.distributed as dist
from common import SEED, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image, label = self.data[index]
        return image + torch.from_numpy(np.random.normal(0, 0.1, 64)).float(), label


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, images):
        mask = torch.rand_like(images) > 0.2
        return self.layers(images * mask)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(SEED)
data = Noisy(load_digits())
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, batch_size=32, sampler=sampler, generator=torch.Generator())
network = Masked()
model = DistributedDataParallel(network)
optimizer = torch.optim.RAdam(model.parameters(), lr=5e-3)
torch.manual_seed(SEED + 1 + rank)
np.random.seed(SEED + 1 + rank)

start = 0
if os.path.exists("augmented.pt"):
    saved = torch.load("augmented.pt", weights_only=False)
    network.load_state_dict(saved["network"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["torch"][rank])
    np.random.set_state(saved["numpy"][rank])
    start = saved["epoch"]
for epoch in range(start, 6):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, (torch.get_rng_state(), np.random.get_state()))
    if rank == 0:
        saved = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        saved["torch"] = [pair[0] for pair in states]
        saved["numpy"] = [pair[1] for pair in states]
        torch.save(saved, "augmented.new")
        os.replace("augmented.new", "augmented.pt")
dist.destroy_process_group()
