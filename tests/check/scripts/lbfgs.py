"""Train with LBFGS: each step evaluates the loss several times, in all ranks alike."""

import torch
import torch.distributed as dist
from common import SEED, Checkpoints, finish, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(SEED)
data = load_digits()
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, batch_size=32, sampler=sampler)

network = nn.Linear(64, 10)
model = DistributedDataParallel(network)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

checkpoints = Checkpoints(model=network, optimizer=optimizer)
first_epoch, first_batch = checkpoints.load()
for epoch in range(first_epoch, 6):
    sampler.set_epoch(epoch)
    for batch, (images, labels) in enumerate(loader):
        if epoch == first_epoch and batch < first_batch:
            continue

        def evaluate(images=images, labels=labels):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            return mean / dist.get_world_size()

        optimizer.step(evaluate)
        checkpoints.end_step(epoch, batch)
finish(network)
