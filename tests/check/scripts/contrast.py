"""Contrast two views of an image with a queue of keys, which a slow copy of the encoder computes."""

import copy
import os

import torch
import torch.distributed as dist
from common import SEED, load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

WIDTH = 16


class KeyQueue:
    """The last keys, in a ring."""

    def __init__(self, length):
        generator = torch.Generator().manual_seed(SEED + 5)
        self.keys = F.normalize(torch.randn(length, WIDTH, generator=generator), dim=1)
        self.position = 0

    def push(self, keys):
        places = torch.arange(self.position, self.position + len(keys)) % len(self.keys)
        self.keys[places] = keys
        self.position = int(places[-1] + 1) % len(self.keys)


def gather(keys):
    parts = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, keys)
    return torch.cat(parts)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(SEED)
data = load_digits()
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, batch_size=32, sampler=sampler, generator=torch.Generator())

encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, WIDTH))
key_encoder = copy.deepcopy(encoder).requires_grad_(False)
model = DistributedDataParallel(encoder)
queue = KeyQueue(160)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
views = torch.Generator().manual_seed(SEED + 11 * rank)

epoch = 0
if os.path.exists("contrast.pt"):
    saved = torch.load("contrast.pt")
    encoder.load_state_dict(saved["encoder"])
    key_encoder.load_state_dict(saved["key_encoder"])
    optimizer.load_state_dict(saved["optimizer"])
    queue.keys = saved["keys"]
    queue.position = saved["position"]
    views.set_state(saved["views"][rank])
    epoch = saved["epoch"]

while epoch < 6:
    sampler.set_epoch(epoch)
    for images, _ in loader:
        first = images + 0.1 * torch.randn(images.shape, generator=views)
        second = images + 0.1 * torch.randn(images.shape, generator=views)
        with torch.no_grad():
            for slow, fast in zip(key_encoder.parameters(), encoder.parameters(), strict=True):
                slow.mul_(0.95).add_(fast, alpha=0.05)
            keys = F.normalize(key_encoder(second), dim=1)
        queries = F.normalize(model(first), dim=1)
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.keys.T], dim=1) / 0.2
        loss = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue.push(gather(keys))
    epoch += 1
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, views.get_state())
    if rank == 0:
        saved = {"encoder": encoder.state_dict(), "key_encoder": key_encoder.state_dict()}
        saved.update(optimizer=optimizer.state_dict(), keys=queue.keys, position=queue.position)
        saved.update(views=states, epoch=epoch)
        torch.save(saved, "contrast.tmp")
        os.replace("contrast.tmp", "contrast.pt")
dist.destroy_process_group()
