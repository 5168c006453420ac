"""Train without DistributedDataParallel: the script averages the gradients."""

import torch
import torch.distributed as dist
from common import Checkpoints, finish, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
data = load_digits()
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, batch_size=32, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

checkpoints = Checkpoints(model=model, optimizer=optimizer)
first_epoch, first_batch = checkpoints.load()
for epoch in range(first_epoch, 6):
    sampler.set_epoch(epoch)
    for batch, (images, labels) in enumerate(loader):
        if epoch == first_epoch and batch < first_batch:
            continue
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        checkpoints.end_step(epoch, batch)
finish(model)
