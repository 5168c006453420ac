"""Train on sequences of different lengths: an own batch sampler puts those of similar length into one batch."""

import pathlib
import random

import torch
import torch.distributed as dist
from common import SEED
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

SAVED = pathlib.Path("bucket.pt")


def build_sequences(count=480):
    source = random.Random(SEED + 3)
    sequences = []
    for _ in range(count):
        label = source.randrange(4)
        length = source.randint(3, 30)
        sequences.append((torch.tensor([source.gauss(label, 1.0) for _ in range(length)]), label))
    return sequences


def collate(pairs):
    values, labels = zip(*pairs, strict=True)
    return pad_sequence(list(values), batch_first=True).unsqueeze(-1), torch.tensor(labels)


class BucketBatches:
    """Batches of indices, in an order that depends on the epoch. Each rank takes every N-th batch."""

    def __init__(self, lengths, size, rank, ranks):
        self.lengths = lengths
        self.size = size
        self.rank = rank
        self.ranks = ranks
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def build_batches(self):
        source = random.Random(1000 * SEED + self.epoch)
        order = sorted(range(len(self.lengths)), key=lambda index: (self.lengths[index], source.random()))
        batches = [order[start : start + self.size] for start in range(0, len(order), self.size)]
        source.shuffle(batches)
        whole = len(batches) - len(batches) % self.ranks
        return batches[self.rank : whole : self.ranks]

    def __iter__(self):
        return iter(self.build_batches())

    def __len__(self):
        return len(self.lengths) // self.size // self.ranks


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = nn.LSTM(1, 16, batch_first=True)
        self.output = nn.Linear(16, 4)

    def forward(self, values):
        hidden, _ = self.memory(values)
        return self.output(hidden.mean(1))


def run():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    torch.manual_seed(SEED)
    sequences = build_sequences()
    batches = BucketBatches([len(values) for values, _ in sequences], 24, rank, ranks)
    loader = DataLoader(sequences, batch_sampler=batches, collate_fn=collate)
    reader = Reader()
    model = DistributedDataParallel(reader)
    optimizer = torch.optim.NAdam(model.parameters(), lr=5e-3)
    done = 0
    if SAVED.is_file():
        content = torch.load(SAVED)
        reader.load_state_dict(content["reader"])
        optimizer.load_state_dict(content["optimizer"])
        done = content["epochs"]
    while done < 7:
        batches.set_epoch(done)
        for values, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(values), labels).backward()
            optimizer.step()
        done += 1
        if rank == 0:
            content = {"reader": reader.state_dict(), "optimizer": optimizer.state_dict(), "epochs": done}
            torch.save(content, SAVED.with_suffix(".new"))
            SAVED.with_suffix(".new").rename(SAVED)
    dist.destroy_process_group()


run()
