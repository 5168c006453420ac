"""Train with an exponential moving average of the weights, and evaluate it after each epoch."""

import torch
import torch.distributed as dist
from common import SEED, Checkpoints, finish, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, random_split

dist.init_process_group("gloo")
torch.manual_seed(SEED)
train_data, test_data = random_split(load_digits(), [0.9, 0.1])
sampler = DistributedSampler(train_data, drop_last=True)
loader = DataLoader(train_data, batch_size=32, sampler=sampler)
test_loader = DataLoader(test_data, batch_size=32)

network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
model = DistributedDataParallel(network)
average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

checkpoints = Checkpoints(model=network, average=average, optimizer=optimizer)
first_epoch, first_batch = checkpoints.load()
for epoch in range(first_epoch, 6):
    sampler.set_epoch(epoch)
    for batch, (images, labels) in enumerate(loader):
        if epoch == first_epoch and batch < first_batch:
            continue
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        average.update_parameters(network)
        checkpoints.end_step(epoch, batch)
    average.eval()
    with torch.no_grad():
        right = sum(int((average(images).argmax(1) == labels).sum()) for images, labels in test_loader)
    print(f"epoch {epoch + 1}: accuracy {right / len(test_data):.2f}", flush=True)
finish(average)
