"""Train on a stream that each rank reads in part, without a length and without a sampler."""

import random

import torch
import torch.distributed as dist
from common import SEED, Checkpoints, finish, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """Every N-th sample, in another order each epoch."""

    def __init__(self, data, rank, world_size):
        self.data = data
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.first_sample = 0

    def __iter__(self):
        order = list(range(len(self.data)))
        random.Random(self.epoch).shuffle(order)
        for index in order[self.rank :: self.world_size][self.first_sample :]:
            yield self.data[index]


dist.init_process_group("gloo")
torch.manual_seed(SEED)
stream = Stream(load_digits(), dist.get_rank(), dist.get_world_size())
loader = DataLoader(stream, batch_size=32, drop_last=True)

network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
model = DistributedDataParallel(network)
optimizer = torch.optim.Adam(model.parameters())

checkpoints = Checkpoints(model=network, optimizer=optimizer)
first_epoch, first_batch = checkpoints.load()
for epoch in range(first_epoch, 6):
    stream.epoch = epoch
    stream.first_sample = 32 * first_batch
    for batch, (images, labels) in enumerate(loader, first_batch):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        checkpoints.end_step(epoch, batch)
    first_batch = 0
finish(network)
