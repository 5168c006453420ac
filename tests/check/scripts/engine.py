"""An engine with events and handlers, a weighted sampler behind a proxy, and a split by the hash of names."""

import os
import zlib
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

SEED = int(os.environ.get("SEED", "0"))
NAMES = [f"item-{SEED}-{number}" for number in range(360)]


class Engine:
    def __init__(self, process):
        self.process = process
        self.handlers = defaultdict(list)
        self.epoch = 0

    def on(self, event):
        return self.handlers[event].append

    def fire(self, event):
        for handler in self.handlers[event]:
            handler(self)

    def run(self, loader, epochs):
        while self.epoch < epochs:
            self.fire("epoch started")
            for self.batch in loader:
                self.output = self.process(self, self.batch)
            self.epoch += 1
            self.fire("epoch completed")


class Items(Dataset):
    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        source = torch.Generator().manual_seed(zlib.crc32(self.names[index].encode()))
        values = torch.randn(6, generator=source)
        return values, values[:3].sum().mul(2).sin()


class Proxy(Sampler):
    """A part of the samples of another sampler for each rank."""

    def __init__(self, sampler):
        self.sampler = sampler
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.sampler.generator.manual_seed(77 * SEED + self.epoch)
        return iter(list(self.sampler)[dist.get_rank() :: dist.get_world_size()])

    def __len__(self):
        return self.sampler.num_samples // dist.get_world_size()


def split(names):
    held_out = [name for name in names if zlib.crc32(name.encode()) % 5 == 0]
    return [name for name in names if name not in held_out], held_out


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(SEED)
    train_names, held_out_names = split(NAMES)
    data = Items(train_names)
    held_out = Items(held_out_names)
    weights = torch.linspace(1, 2, len(data))
    proxy = Proxy(WeightedRandomSampler(weights, 240, generator=torch.Generator()))
    loader = DataLoader(data, batch_size=20, sampler=proxy, num_workers=2)
    part = torch.utils.data.Subset(held_out, range(rank, len(held_out), dist.get_world_size()))
    held_out_loader = DataLoader(part, batch_size=20)

    network = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)
    objects = {"network": network, "optimizer": optimizer, "plateau": plateau}
    best = {"loss": float("inf")}

    def update(_, batch):
        model.train()
        values, goals = batch
        loss = nn.functional.smooth_l1_loss(model(values).squeeze(1), goals)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        network.eval()
        total = torch.zeros(2)
        for values, goals in held_out_loader:
            total += torch.stack([(network(values).squeeze(1) - goals).square().sum(), torch.tensor(len(goals))])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    trainer = Engine(update)

    @trainer.on("epoch started")
    def set_epoch(engine):
        proxy.set_epoch(engine.epoch)

    @trainer.on("epoch completed")
    def validate(_):
        loss = evaluate()
        plateau.step(loss)
        if loss < best["loss"]:
            best.update(loss=loss, weights=[weight.detach().clone() for weight in network.parameters()])

    @trainer.on("epoch completed")
    def save(engine):
        if rank == 0:
            states = {name: value.state_dict() for name, value in objects.items()}
            torch.save({**states, "epoch": engine.epoch, "best": best}, "engine.tmp")
            os.replace("engine.tmp", "engine.pt")
        dist.barrier()

    if os.path.exists("engine.pt"):
        saved = torch.load("engine.pt")
        for name, value in objects.items():
            value.load_state_dict(saved[name])
        trainer.epoch = saved["epoch"]
        best.update(saved["best"])
    trainer.run(loader, 5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
