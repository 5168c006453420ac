"""Read a stream by stages, in workers that stay: shards by rank and worker, and an epoch that they share."""

import itertools
import multiprocessing
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

SEED = int(os.environ.get("SEED", "0"))
SHARDS = 12
SAMPLES = 32


class Pipeline(IterableDataset):
    def __init__(self, *stages):
        self.stages = stages
        self.epoch = multiprocessing.Value("i", 0)
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()

    def __iter__(self):
        items = iter(range(SHARDS))
        for stage in self.stages:
            items = stage(self, items)
        return iter(items)


def permute(pipeline, shards):
    shards = list(shards)
    random.Random(f"{SEED} {pipeline.epoch.value}").shuffle(shards)
    return shards


def split_by_rank(pipeline, shards):
    return itertools.islice(shards, pipeline.rank, None, pipeline.ranks)


def split_by_worker(_, shards):
    worker = get_worker_info()
    return itertools.islice(shards, worker.id, None, worker.num_workers)


def read(_, shards):
    for shard in shards:
        source = torch.Generator().manual_seed(1000 * SEED + shard)
        for values in torch.randn(SAMPLES, 8, generator=source):
            yield {"values": values, "label": values.abs().sum().ge(6).long()}


def shuffle(pipeline, samples, size=24):
    source = random.Random(f"{pipeline.epoch.value} {pipeline.rank} {get_worker_info().id}")
    kept = []
    for sample in samples:
        kept.append(sample)
        if len(kept) == size:
            yield kept.pop(source.randrange(size))
    source.shuffle(kept)
    yield from kept


def batched(_, samples, size=16):
    samples = iter(samples)
    while len(part := list(itertools.islice(samples, size))) == size:
        yield default_collate(part)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    stream = Pipeline(permute, split_by_rank, split_by_worker, read, shuffle, batched)
    loader = DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=True)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    first = 0
    if os.path.exists("stream.pt"):
        saved = torch.load("stream.pt")
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
    for epoch in range(first, 6):
        stream.epoch.value = epoch
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch["values"]), batch["label"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            saved = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(saved, "stream.new")
            os.replace("stream.new", "stream.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
