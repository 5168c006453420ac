"""Train a generator and a discriminator, each with its optimizer."""

import torch
import torch.distributed as dist
from common import SEED, Checkpoints, finish, load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(SEED)
data = load_digits()
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, batch_size=32, sampler=sampler, generator=torch.Generator())

generator = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64)))
discriminator = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
real = torch.ones(32, 1)
fake = torch.zeros(32, 1)

checkpoints = Checkpoints(
    draws_numbers=True,
    generator=generator,
    discriminator=discriminator,
    generator_optimizer=generator_optimizer,
    discriminator_optimizer=discriminator_optimizer,
)
torch.manual_seed(1 + dist.get_rank())
first_epoch, first_batch = checkpoints.load()
for epoch in range(first_epoch, 6):
    sampler.set_epoch(epoch)
    for batch, (images, _) in enumerate(loader):
        if epoch == first_epoch and batch < first_batch:
            continue
        discriminator_optimizer.zero_grad()
        cross_entropy(discriminator(images), real).backward()
        generated = generator(torch.randn(32, 8))
        cross_entropy(discriminator(generated.detach()), fake).backward()
        discriminator_optimizer.step()

        generator_optimizer.zero_grad()
        cross_entropy(discriminator(generated), real).backward()
        generator_optimizer.step()
        checkpoints.end_step(epoch, batch)
finish(generator)
