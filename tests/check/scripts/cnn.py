"""Train a network with BatchNorm and a frozen layer on scikit-learn's digits."""

import torch
import torch.distributed as dist
from common import SEED, Checkpoints, finish
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(SEED)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels))
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, batch_size=90, sampler=sampler)

frozen = nn.Conv2d(1, 4, 3)
frozen.requires_grad_(False)
network = nn.Sequential(frozen, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
model = DistributedDataParallel(network)
optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad])

checkpoints = Checkpoints(model=network, optimizer=optimizer)
first_epoch, first_batch = checkpoints.load()
for epoch in range(first_epoch, 6):
    sampler.set_epoch(epoch)
    for batch, (images, labels) in enumerate(loader):
        if epoch == first_epoch and batch < first_batch:
            continue
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        checkpoints.end_step(epoch, batch)
finish(network)
