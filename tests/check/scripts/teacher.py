"""Distill a slow teacher with a center of its outputs, by learning rates computed before the training."""

import copy
import itertools
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, RandomSampler

SEED = int(os.environ.get("SEED", "0"))
EPOCHS = 5
FILES = ((0, 160), (160, 352))  # of ranks: samples of two files of unequal length


class TwoCrops(Dataset):
    """Two noisy parts of each signal."""

    def __init__(self, first, last):
        self.signals = torch.randn(352, 24, generator=torch.Generator().manual_seed(SEED))[first:last]

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, index):
        starts = torch.randint(8, (2,)).tolist()
        return [self.signals[index, start : start + 16] for start in starts]


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 24), nn.GELU())
        self.neck = nn.LayerNorm(24)
        self.head = nn.Linear(24, 12)

    def forward(self, crop):
        return self.head(self.neck(self.backbone(crop)))


class CenteredLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 12))

    def forward(self, student, teacher):
        targets = ((teacher - self.center) / 0.1).softmax(1)
        mean = teacher.mean(0, keepdim=True)
        dist.all_reduce(mean)
        self.center = 0.9 * self.center + 0.1 * mean / dist.get_world_size()
        return -(targets * (student / 0.2).log_softmax(1)).sum(1).mean()


def build_groups(student):
    decayed = [value for value in student.parameters() if value.dim() > 1]
    others = [value for value in student.parameters() if value.dim() <= 1]
    return [{"params": decayed}, {"params": others, "weight_decay": 0.0}]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(SEED)
    data = TwoCrops(*FILES[rank])
    order = torch.Generator()
    loader = DataLoader(data, 16, sampler=RandomSampler(data, generator=order), drop_last=True)
    steps = torch.tensor(len(loader))
    dist.all_reduce(steps, dist.ReduceOp.MIN)  # the ranks have files of unequal length
    steps = steps.item()
    rates = [0.01 * (1 + math.cos(math.pi * step / (EPOCHS * steps))) for step in range(EPOCHS * steps)]

    student = DistributedDataParallel(Student())
    teacher = copy.deepcopy(student.module).requires_grad_(False)
    criterion = CenteredLoss()
    optimizer = torch.optim.AdamW(build_groups(student))
    start = 0
    teacher.load_state_dict(student.module.state_dict())
    torch.manual_seed(SEED + 1 + rank)
    if os.path.exists("distilled.pth"):
        saved = torch.load("distilled.pth")
        student.load_state_dict(saved["student"])
        teacher.load_state_dict(saved["teacher"])
        criterion.load_state_dict(saved["criterion"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"]
        torch.set_rng_state(saved["random"][rank])
    for epoch in range(start, EPOCHS):
        order.manual_seed(10 * SEED + epoch)
        for number, (first, second) in enumerate(itertools.islice(loader, steps), epoch * steps):
            for group in optimizer.param_groups:
                group["lr"] = rates[number]
            with torch.no_grad():
                target = teacher(first)
            loss = criterion(student(second), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.module.parameters(), strict=True):
                    slow.mul_(0.97).add_(0.03 * fast)
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, torch.get_rng_state())
        if rank == 0:
            content = {
                "student": student.state_dict(),
                "teacher": teacher.state_dict(),
                "criterion": criterion.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch + 1,
                "random": states,
            }
            torch.save(content, "distilled.tmp")
            os.replace("distilled.tmp", "distilled.pth")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
