"""Accumulate the gradients of two batches, with one all-reduce for both."""

import contextlib

import torch
import torch.distributed as dist
from common import SEED, Checkpoints, finish, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

PARTS = 2

dist.init_process_group("gloo")
torch.manual_seed(SEED)
data = load_digits()
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, batch_size=16, sampler=sampler)

network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
model = DistributedDataParallel(network)
optimizer = torch.optim.Adam(model.parameters())

checkpoints = Checkpoints(model=network, optimizer=optimizer)
first_epoch, first_batch = checkpoints.load()
for epoch in range(first_epoch, 8):
    sampler.set_epoch(epoch)
    for batch, (images, labels) in enumerate(loader):
        if epoch == first_epoch and batch < first_batch:
            continue
        is_last = (batch + 1) % PARTS == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = cross_entropy(model(images), labels) / PARTS
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.end_step(epoch, batch)
finish(network)
