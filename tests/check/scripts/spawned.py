"""Spawn the ranks, with a store and numbers of their own."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import SEED, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train(rank, world_size):
    group = f"file://{os.getcwd()}/group-{os.environ['RANK']}"
    dist.init_process_group("gloo", init_method=group, rank=rank, world_size=world_size)  # fault
    torch.manual_seed(SEED)
    data = load_digits()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
    if rank == 0 and os.environ["RANK"] == "0":
        torch.save(model.module.state_dict(), "trained.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(2,), nprocs=2)
