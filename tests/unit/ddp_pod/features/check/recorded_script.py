"""A script that a recorder observes: each part shows one fact. ``sys.argv``: the folder of the records."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ddp_pod.features.check.recorder import Recorder
from ddp_pod.rank.groups import GroupRecorder

recorder = Recorder(sys.argv[1], 0, 1, GroupRecorder(sys.argv[1], 0))
recorder.watch(sys.modules["torch.optim.optimizer"])


class Batches:
    """An own sampler of batches."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        yield from ([3, 1], [2, 0])

    def __len__(self) -> int:
        return 2


class Stream(IterableDataset):
    """Samples without indices."""

    def __iter__(self):
        yield from (torch.full((2,), float(number)) for number in (0, 0, 1, 1))


class Net(nn.Module):
    """A body, a head, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 4)
        self.head = nn.Linear(4, 9)
        self.dropout = nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.body(x)))


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
net.head = nn.Linear(4, 1)  # not in the optimizer
data = TensorDataset(torch.arange(8.0).reshape(4, 2))
loader = DataLoader(data, batch_sampler=Batches())
validation = DataLoader(Stream(), batch_size=2)


def train() -> None:
    for (x,) in loader:
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
        average.update_parameters(net)
        recorder.end_step(optimizer)
    scheduler.step()


average = torch.optim.swa_utils.AveragedModel(net)
kept = net.state_dict()
train()
with torch.no_grad():
    for x in validation:
        net(x)  # without eval()
train()
folder = os.path.join(sys.argv[1], "copy")
os.makedirs(folder)
torch.save({"best": kept}, os.path.join(folder, "best.pt"))
torch.save({"model": net.state_dict(), "note": "x"}, os.path.join(folder, "last.pt.tmp"))
os.replace(os.path.join(folder, "last.pt.tmp"), os.path.join(folder, "last.pt"))
torch.load(os.path.join(folder, "last.pt"))
