"""Average the weights of the last epochs (SWA), with its schedule, and validate the average."""

import torch
import torch.distributed as dist
from common import SEED, Checkpoints, finish, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, random_split

BEGIN = 1

dist.init_process_group("gloo")
torch.manual_seed(SEED)
train_data, test_data = random_split(load_digits(), [512, 128], generator=torch.Generator().manual_seed(SEED))
sampler = DistributedSampler(train_data, drop_last=True)
loader = DataLoader(train_data, batch_size=32, sampler=sampler)
test_loader = DataLoader(test_data, batch_size=64)

network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
model = DistributedDataParallel(network)
average = AveragedModel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)

checkpoints = Checkpoints(network=network, average=average, optimizer=optimizer, schedule=schedule)
first_epoch, _ = checkpoints.load()
for epoch in range(first_epoch, 6):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    if epoch >= BEGIN:
        average.update_parameters(network)
        schedule.step()
    with torch.no_grad():
        right = sum(int((average(images).argmax(1) == labels).sum()) for images, labels in test_loader)
    print(f"epoch {epoch + 1}: {right} of {len(test_data)} are right", flush=True)
    checkpoints.end_if_stopped(epoch + 1, 0)
    checkpoints.save(epoch + 1, 0)
finish(average)
