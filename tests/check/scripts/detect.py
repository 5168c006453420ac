"""Train by iterations with hooks, an endless sampler, and a thread that writes snapshots later."""

import copy
import glob
import os
import queue
import re
import signal
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

SEED = int(os.environ.get("SEED", "0"))


class Boxes(Dataset):
    def __init__(self):
        self.images = torch.rand(128, 1, 8, 8, generator=torch.Generator().manual_seed(SEED))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        return image, torch.stack([image.mean(), image.var(), image[0, 0].sum(), image[0, :, 0].sum()])


class TrainingSampler(Sampler):
    """Shuffled indices without an end; each rank has its part."""

    def __init__(self, size, first):
        self.size = size
        self.first = first

    def __iter__(self):
        source = torch.Generator().manual_seed(SEED)
        position = 0
        while True:
            for index in torch.randperm(self.size, generator=source).tolist():
                if position >= self.first and position % dist.get_world_size() == dist.get_rank():
                    yield index
                position += 1


class Hook:
    trainer = None

    def before_step(self):
        pass

    def after_step(self):
        pass


class Warmup(Hook):
    def before_step(self):
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = 0.02 * min(1.0, (self.trainer.iteration + 1) / 10)


class Best(Hook):
    lowest = None
    model = None

    def after_step(self):
        loss = self.trainer.loss.detach().clone()
        dist.all_reduce(loss)
        if self.lowest is None or loss < self.lowest:
            self.lowest = loss
            self.model = copy.deepcopy(self.trainer.network)
        if self.trainer.iteration % 8 == 7 and dist.get_rank() == 0:
            torch.save(self.model.state_dict(), "best.pth")


class Snapshots(Hook):
    """A thread writes the weights of each fifth iteration after the next one."""

    def __init__(self):
        self.waiting = queue.Queue()
        self.ready = threading.Event()
        threading.Thread(target=self.write, daemon=True).start()

    def write(self):
        while True:
            name, weights = self.waiting.get()
            self.ready.wait()
            torch.save(weights, name)
            self.waiting.task_done()

    def before_step(self):
        if self.trainer.iteration % 5 == 4:
            self.ready.clear()

    def after_step(self):
        if self.trainer.iteration % 5 == 4 and dist.get_rank() == 0:
            weights = {name: value.clone() for name, value in self.trainer.network.state_dict().items()}
            self.waiting.put((f"snapshot-{self.trainer.iteration}.pth", weights))
        else:
            self.ready.set()
            self.waiting.join()


class Checkpointer(Hook):
    def after_step(self):
        done = self.trainer.iteration + 1
        dist.all_reduce(self.trainer.stopping)
        if done % 4 == 0 or self.trainer.stopping:
            self.trainer.finish_after = done if self.trainer.stopping else self.trainer.iterations
            self.save(done)

    def save(self, done):
        trainer = self.trainer
        if dist.get_rank() == 0:
            content = {"model": trainer.network.state_dict(), "optimizer": trainer.optimizer.state_dict()}
            torch.save({**content, "iterations": trainer.iterations, "done": done}, "model.part")
            os.replace("model.part", f"model_{done:07}.pth")


class Trainer:
    def __init__(self, hooks):
        self.iterations = self.finish_after = 60
        self.iteration = 0
        self.stopping = torch.zeros(1)
        self.network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
        self.model = DistributedDataParallel(self.network)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.hooks = hooks
        for hook in hooks:
            hook.trainer = self

    def resume_or_load(self):
        paths = sorted(glob.glob("model_*.pth"), key=lambda path: int(re.search(r"\d+", path)[0]))
        dist.barrier()
        if paths:
            saved = torch.load(paths[-1], map_location="cpu")
            self.network.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.iteration = saved["done"]

    def train(self):
        data = Boxes()
        sampler = TrainingSampler(len(data), 8 * self.iteration * dist.get_world_size())
        batches = iter(DataLoader(data, batch_size=8, sampler=sampler, num_workers=2))
        while self.iteration < self.finish_after:
            for hook in self.hooks:
                hook.before_step()
            images, goals = next(batches)
            self.loss = nn.functional.l1_loss(self.model(images), goals)
            self.optimizer.zero_grad()
            self.loss.backward()
            self.optimizer.step()
            for hook in self.hooks:
                hook.after_step()
            self.iteration += 1


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    trainer = Trainer([Warmup(), Best(), Snapshots(), Checkpointer()])
    signal.signal(signal.SIGTERM, lambda *_: trainer.stopping.fill_(1))
    trainer.resume_or_load()
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
