"""Train with objects that count the calls of their special methods, and write the counts of each rank to a file.

Some of these methods raise for an object that is incomplete, as those of torchmetrics do.
"""

import json
import os
import sys
from collections import Counter

import torch
import torch.distributed as dist
from common import SEED, Checkpoints, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

COUNTS = Counter()
DIRECT = "by the hooks: "
RESULTS = {
    "__hash__": object.__hash__,
    "__eq__": lambda self, other: self is other,
    "__bool__": lambda self: True,
    "__len__": lambda self: 1,
    "__iter__": lambda self: iter(()),
    "__repr__": object.__repr__,
    "__str__": object.__repr__,
    "__getattribute__": object.__getattribute__,
}


def note(kind, name):
    COUNTS[f"{kind} {name}"] += 1
    if sys._getframe(2).f_globals["__name__"].startswith("ddp_launcher"):
        COUNTS[f"{DIRECT}{kind} {name}"] += 1


def count(kind, name, base):
    """Return a special method that counts its calls and has the result of the base class."""
    result = getattr(base, name) if name in ("__len__", "__iter__") and hasattr(base, name) else RESULTS[name]

    def method(self, *arguments):
        note(kind, name)
        return result(self, *arguments)

    return method


def counted(kind, base):
    """Return a class of this kind whose special methods count."""

    def find(self, name):
        note(kind, "__getattr__")
        if hasattr(base, "__getattr__"):
            return base.__getattr__(self, name)
        raise AttributeError(name)

    def read_class(self):
        note(kind, "__class__")
        return type(self)

    methods = {name: count(kind, name, base) for name in RESULTS}
    return type(kind.title(), (base,), {**methods, "__getattr__": find, "__class__": property(read_class)})


class Metric(counted("metric", nn.Module)):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.defaults = ["seen"]

    def __hash__(self):
        note("metric", "__hash__")
        return hash((id(self), *self.defaults))  # raises in the base class's constructor

    def forward(self, scores):
        self.seen += len(scores)


class Network(counted("module", nn.Module)):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.scale = Scale(torch.ones(10))
        self.metric = Metric()

    def forward(self, batch):
        scores = self.layers(batch.images) * self.scale
        self.metric(scores.detach())
        return scores


class Scale(counted("parameter", nn.Parameter)):
    pass


class Loss(counted("loss", torch.Tensor)):
    pass


class Digits(counted("dataset", Dataset)):
    def __init__(self):
        self.data = load_digits()

    def __len__(self):
        note("dataset", "__len__")
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Batch(counted("batch", object)):
    def __init__(self, items):
        self.images = torch.stack([image for image, _ in items])
        self.labels = torch.stack([label for _, label in items])


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(SEED)
data = Digits()
sampler = counted("sampler", DistributedSampler)(data, drop_last=True)
loader = DataLoader(data, batch_size=32, sampler=sampler, collate_fn=Batch)

network = Network()
model = DistributedDataParallel(network)
optimizer = counted("optimizer", torch.optim.Adam)(model.parameters(), lr=0.01)
scheduler = counted("scheduler", torch.optim.lr_scheduler.CosineAnnealingLR)(optimizer, T_max=100)

checkpoints = Checkpoints(model=network, optimizer=optimizer, scheduler=scheduler)
first_epoch, first_batch = checkpoints.load()
for epoch in range(first_epoch, int(os.environ.get("EPOCHS", "6"))):
    sampler.set_epoch(epoch)
    for index, batch in enumerate(loader):
        if (epoch, index) < (first_epoch, first_batch):
            continue
        optimizer.zero_grad()
        loss = cross_entropy(model(batch), batch.labels)
        loss.as_subclass(Loss).backward()
        optimizer.step()
        scheduler.step()
        checkpoints.end_step(epoch, index)

with open(f"counts-{rank}.json", "w") as file:
    json.dump(COUNTS, file)
dist.destroy_process_group()
