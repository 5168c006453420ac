"""Train by a class whose settings are a dataclass, with a warm-up of the learning rate. It saves after each epoch."""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from common import SEED, load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


@dataclass
class Settings:
    epochs: int = 6
    batch_size: int = 32
    lr: float = 3e-3
    warmup: int = 10
    clip: float = 1.0
    folder: Path = Path("snapshots")


@dataclass
class Progress:
    epoch: int = 0
    step: int = 0
    losses: list = field(default_factory=list)


class Trainer:
    def __init__(self, settings):
        self.settings = settings
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.progress = Progress()
        network = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 10))
        self.model = DDP(network)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.lr, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.compute_factor)
        self.criterion = nn.CrossEntropyLoss()
        self.data = load_digits()
        self.sampler = DistributedSampler(self.data, seed=SEED, drop_last=True)
        self.loader = DataLoader(self.data, settings.batch_size, sampler=self.sampler)

    def compute_factor(self, step):
        return min(1.0, (step + 1) / self.settings.warmup)

    def restore(self):
        path = self.settings.folder / "last.pt"
        if not path.exists():
            return
        snapshot = torch.load(path, map_location="cpu")
        self.model.module.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.scheduler.load_state_dict(snapshot["scheduler"])
        self.progress = Progress(**snapshot["progress"])

    def save(self):
        if self.rank == 0:
            self.settings.folder.mkdir(exist_ok=True)
            snapshot = {
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "progress": asdict(self.progress),
            }
            torch.save(snapshot, self.settings.folder / "new.pt")
            os.replace(self.settings.folder / "new.pt", self.settings.folder / "last.pt")

    def train_batch(self, images, labels):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.criterion(self.model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.scheduler.step()
        self.progress.step += 1
        return loss

    def fit(self):
        while self.progress.epoch < self.settings.epochs:
            self.sampler.set_epoch(self.progress.epoch)
            for images, labels in self.loader:
                loss = self.train_batch(images, labels)
            self.progress.losses.append(loss.item())
            self.progress.epoch += 1
            self.save()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    trainer = Trainer(Settings())
    trainer.restore()
    trainer.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
