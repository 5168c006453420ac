"""Train a head for each task, which a set holds: each process has an order of its own."""

import torch
import torch.distributed as dist
from common import SEED, Checkpoints, finish, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

TASKS = {"depth", "normals", "edges", "pose", "segments"}


class Network(nn.Module):
    """One body with several heads."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 32)
        self.heads = nn.ModuleDict({task: nn.Linear(32, 10) for task in TASKS})  # fault

    def forward(self, images):
        hidden = torch.relu(self.body(images))
        return {task: self.heads[task](hidden) for task in sorted(TASKS)}


dist.init_process_group("gloo")
torch.manual_seed(SEED)
data = load_digits()
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, batch_size=32, sampler=sampler)
network = Network()
model = DistributedDataParallel(network)
optimizer = torch.optim.Adam(model.parameters())

checkpoints = Checkpoints(model=network, optimizer=optimizer)
first_epoch, first_batch = checkpoints.load()
for epoch in range(first_epoch, 6):
    sampler.set_epoch(epoch)
    for batch, (images, labels) in enumerate(loader):
        if epoch == first_epoch and batch < first_batch:
            continue
        optimizer.zero_grad()
        loss = sum(cross_entropy(out, (labels + len(task)) % 10) for task, out in model(images).items())
        loss.backward()
        optimizer.step()
        checkpoints.end_step(epoch, batch)
finish(network)
