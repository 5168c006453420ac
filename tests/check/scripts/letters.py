"""Train a language model with tied weights and dropout. The last group of accumulated batches may be shorter."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import SEED, EpochOrder
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

LETTERS = 27
LENGTH = 16
GROUP = 4
CHECKPOINT = "letters.ckpt"


class Windows(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(SEED + 40)
        self.text = torch.randint(LETTERS, (size,), generator=generator)

    def __len__(self):
        return (len(self.text) - 1) // LENGTH

    def __getitem__(self, index):
        window = self.text[index * LENGTH : (index + 1) * LENGTH + 1]
        return window[:-1], window[1:]


class Letters(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, width)
        self.mixer = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, LETTERS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, letters):
        hidden, _ = self.mixer(self.embedding(letters))
        return self.head(self.dropout(hidden))


def compute_loss(model, letters, following):
    return F.cross_entropy(model(letters).flatten(0, 1), following.flatten())


dist.init_process_group(backend="gloo")
rank = dist.get_rank()
torch.manual_seed(SEED)
data = Windows(7000)
order = EpochOrder(len(data), rank, dist.get_world_size())
loader = DataLoader(data, batch_size=8, sampler=order, generator=torch.Generator())
network = Letters()
model = DistributedDataParallel(network)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

torch.manual_seed(SEED + 100 * (rank + 1))
start = 0
if os.path.isfile(CHECKPOINT):
    saved = torch.load(CHECKPOINT)
    network.load_state_dict(saved["network"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["epoch"]
    torch.set_rng_state(saved["random"][rank])

for epoch in range(start, 14):
    order.epoch = epoch
    last = len(loader) - 1
    for number, (letters, following) in enumerate(loader):
        ends_group = number % GROUP == GROUP - 1 or number == last
        with nullcontext() if ends_group else model.no_sync():
            (compute_loss(model, letters, following) / GROUP).backward()
        if ends_group:
            optimizer.step()
            optimizer.zero_grad()
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, torch.get_rng_state())
    if rank == 0:
        saved = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
        saved |= {"epoch": epoch + 1, "random": states}
        torch.save(saved, CHECKPOINT + ".part")
        os.rename(CHECKPOINT + ".part", CHECKPOINT)
dist.destroy_process_group()
