"""A trainer with callbacks: arguments of a dataclass, folders checkpoint-N, and the best weights in the end."""

import argparse
import copy
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclasses.dataclass
class TrainingArguments:
    output_dir: str = "results"
    num_train_epochs: int = 3
    per_device_train_batch_size: int = 16
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    save_steps: int = 4
    seed: int = int(os.environ.get("SEED", "0"))


class Waves(Dataset):
    def __init__(self, seed):
        self.values = torch.rand(400, 8, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        values = self.values[index]
        return {"values": values, "labels": torch.stack([values.sin().sum(), values.norm()])}


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, values):
        return values + torch.tanh(self.mix(self.norm(values)))


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Residual(8) for _ in range(4)])
        self.head = nn.Linear(8, 2)

    def forward(self, values, labels):
        for layer in self.layers:
            values = layer(values)
        return nn.functional.mse_loss(self.head(values), labels)


class BoldDriver:
    """Raise the learning rate while the loss of an epoch falls, and halve it otherwise."""

    last = float("inf")

    def on_epoch_end(self, trainer, loss):
        factor = 1.05 if loss < self.last else 0.5
        for group in trainer.optimizer.param_groups:
            group["lr"] *= factor
        self.last = loss


class KeepBest:
    best = None
    lowest = float("inf")

    def on_epoch_end(self, trainer, loss):
        if loss < self.lowest:
            self.lowest = loss
            self.best = copy.deepcopy(trainer.model.module.state_dict())


class Trainer:
    def __init__(self, args, model, data):
        self.args = args
        self.rank = dist.get_rank()
        self.stopping = torch.zeros(1)
        self.model = DistributedDataParallel(model)
        self.optimizer = self.build_optimizer()
        self.sampler = DistributedSampler(data, seed=args.seed)
        self.loader = DataLoader(data, args.per_device_train_batch_size, sampler=self.sampler, drop_last=True)
        self.driver = BoldDriver()
        self.keeper = KeepBest()
        self.state = {"global_step": 0, "epoch": 0, "batch": 0, "finished": False}

    def build_optimizer(self):
        weights = dict(self.model.module.named_parameters())
        decayed = {name for name in weights if name.endswith("mix.weight")}
        groups = [
            {"params": [weights[name] for name in sorted(decayed)], "weight_decay": self.args.weight_decay},
            {"params": [value for name, value in weights.items() if name not in decayed], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.args.learning_rate)

    def save(self):
        if self.rank == 0:
            folder = Path(self.args.output_dir, f"checkpoint-{self.state['global_step']}")
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.model.module.state_dict(), folder / "model.pt")
            torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
            torch.save([self.keeper.best, self.keeper.lowest, self.driver.last], folder / "callbacks.pt")
            Path(folder, "trainer_state.json").write_text(json.dumps(self.state))

    def load(self):
        folders = Path(self.args.output_dir).glob("checkpoint-*/trainer_state.json")
        found = sorted((int(file.parent.name.split("-")[1]), file.parent) for file in folders)
        dist.barrier()
        if found:
            folder = found[-1][1]
            self.state = json.loads(Path(folder, "trainer_state.json").read_text())
            self.model.module.load_state_dict(torch.load(folder / "model.pt"))
            self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
            self.keeper.best, self.keeper.lowest, self.driver.last = torch.load(folder / "callbacks.pt")

    def train(self):
        self.load()
        while self.state["epoch"] < self.args.num_train_epochs:
            self.sampler.set_epoch(self.state["epoch"])
            loss = self.train_epoch()
            total = loss.detach().clone()
            dist.all_reduce(total)
            self.state.update(epoch=self.state["epoch"] + 1, batch=0)
            for callback in (self.driver, self.keeper):
                callback.on_epoch_end(self, total.item())
        self.model.module.load_state_dict(self.keeper.best)
        if self.rank == 0:
            torch.save(self.model.module.state_dict(), "final.pt")

    def train_epoch(self):
        loss = torch.zeros(1)
        for number, inputs in enumerate(self.loader):
            if number < self.state["batch"]:
                continue
            loss = self.training_step(inputs)
            self.state["batch"] = number + 1
            self.state["global_step"] += 1
            dist.all_reduce(self.stopping)
            if self.stopping or self.state["global_step"] % self.args.save_steps == 0:
                self.save()
            if self.stopping:
                dist.destroy_process_group()
                sys.exit(143)
        return loss

    def training_step(self, inputs):
        self.model.train()
        loss = self.model(**inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def main():
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(TrainingArguments):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    args = TrainingArguments(**vars(parser.parse_args()))
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    trainer = Trainer(args, Regressor(), Waves(args.seed))
    signal.signal(signal.SIGTERM, lambda *_: trainer.stopping.fill_(1))
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
