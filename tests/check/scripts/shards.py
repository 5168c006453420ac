"""Train on shards that are read in order, as WebDataset does. The position in the stream is saved."""

import json
import os
import random

import torch
import torch.distributed as dist
from common import SEED, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SHARDS = 16
SIZE = 40
BATCH = 20


class ShardStream(IterableDataset):
    """Shards of this rank, of which each worker has a part, through a buffer that shuffles samples."""

    def __init__(self, samples, rank, ranks):
        self.samples = samples
        self.rank = rank
        self.ranks = ranks
        self.epoch = 0
        self.skipped = 0  # batches of each worker

    def list_shards(self):
        shards = list(range(SHARDS))
        random.Random(SEED + self.epoch).shuffle(shards)
        shards = shards[self.rank :: self.ranks]
        worker = get_worker_info()
        if worker is not None:
            shards = shards[worker.id :: worker.num_workers]
        return shards

    def __iter__(self):
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        source = random.Random(f"{SEED} {self.epoch} {self.rank} {number}")
        waiting = []
        read = 0
        for shard in self.list_shards():
            for index in range(shard * SIZE, (shard + 1) * SIZE):
                waiting.append(index)
                if len(waiting) < 30:
                    continue
                chosen = waiting.pop(source.randrange(len(waiting)))
                read += 1
                if read > self.skipped * BATCH:
                    yield self.samples[chosen]


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(SEED)
stream = ShardStream(load_digits(SHARDS * SIZE), rank, dist.get_world_size())
loader = DataLoader(stream, batch_size=BATCH, num_workers=2, drop_last=True)

network = nn.Sequential(nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10))
model = DistributedDataParallel(network)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

position = {"epoch": 0, "batches": 0}
if os.path.exists("state.json"):
    with open("state.json") as file:
        position = json.load(file)
    network.load_state_dict(torch.load(f"weights-{position['epoch']}-{position['batches']}.pt"))
    optimizer.load_state_dict(torch.load(f"optimizer-{position['epoch']}-{position['batches']}.pt"))


def save(epoch, batches):
    if rank != 0:
        return
    torch.save(network.state_dict(), f"weights-{epoch}-{batches}.pt")
    torch.save(optimizer.state_dict(), f"optimizer-{epoch}-{batches}.pt")
    with open("state.new", "w") as file:
        json.dump({"epoch": epoch, "batches": batches}, file)
    os.replace("state.new", "state.json")


for epoch in range(position["epoch"], 8):
    stream.epoch = epoch
    stream.skipped = position["batches"] // 2
    for number, (images, labels) in enumerate(loader, position["batches"] + 1):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        if number == 4:
            save(epoch, number)
    position["batches"] = 0
    save(epoch + 1, 0)
dist.destroy_process_group()
