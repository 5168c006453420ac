"""Train in mixed precision, with a gradient scaler and clipped gradients."""

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

network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)

checkpoints = Checkpoints(model=network, optimizer=optimizer, scaler=scaler)
first_epoch, first_batch = checkpoints.load()
for epoch in range(first_epoch, 6):
    sampler.set_epoch(epoch)
    for batch, (images, labels) in enumerate(loader):
        if epoch == first_epoch and batch < first_batch:
            continue
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        checkpoints.end_step(epoch, batch)
finish(network)
