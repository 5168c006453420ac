"""Train a network with dropout and a learning rate schedule. Everything that a resumed run needs is saved."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from common import SEED, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 6
SAVE_EVERY = 4
PATH = "checkpoint.pt"

dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()
stop = torch.zeros(1)
signal.signal(signal.SIGTERM, lambda *_: stop.fill_(1))
torch.manual_seed(SEED)

data = load_digits()
sampler = DistributedSampler(data, drop_last=True)
# Its own generator: a new iterator then leaves the global random state unchanged.
loader = DataLoader(data, batch_size=32, sampler=sampler, generator=torch.Generator())

network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)

first_epoch = 0
first_batch = 0
torch.manual_seed(1 + rank)
if os.path.exists(PATH):
    state = torch.load(PATH)
    network.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    first_epoch = state["epoch"]
    first_batch = state["batch"]
    torch.set_rng_state(state["random"][rank])


def save(epoch, batch):
    random_states = [None] * world_size
    dist.all_gather_object(random_states, torch.get_rng_state())
    if rank == 0:
        state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
        state.update(scheduler=scheduler.state_dict(), random=random_states, epoch=epoch, batch=batch + 1)
        torch.save(state, PATH + ".new")
        os.replace(PATH + ".new", PATH)


for epoch in range(first_epoch, EPOCHS):
    sampler.set_epoch(epoch)
    for batch, (images, labels) in enumerate(loader):
        if epoch == first_epoch and batch < first_batch:
            continue
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        dist.all_reduce(stop)
        if stop or (batch + 1) % SAVE_EVERY == 0:
            save(epoch, batch)
        if stop:
            dist.destroy_process_group()
            sys.exit(143)

if rank == 0:
    torch.save(network.state_dict(), "trained.pt")
dist.destroy_process_group()
