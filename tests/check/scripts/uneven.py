"""Train on data that the ranks cannot share equally: `Join` lets a rank without data take part in the collectives."""

import torch
import torch.distributed as dist
from common import SEED, Checkpoints, finish, load_digits
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(SEED)
data = load_digits(samples=288)
share = Subset(data, range(128)) if rank == 0 else Subset(data, range(128, 288))
generator = torch.Generator()
loader = DataLoader(share, batch_size=32, shuffle=True, generator=generator)

network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

checkpoints = Checkpoints(model=network, optimizer=optimizer)
first_epoch, _ = checkpoints.load()
for epoch in range(first_epoch, 8):
    generator.manual_seed(epoch)
    with Join([model]):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
    checkpoints.end_if_stopped(epoch + 1, 0)
    checkpoints.save(epoch + 1, 0)
finish(network)
