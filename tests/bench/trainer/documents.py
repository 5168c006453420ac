"""The documents' own training loops, rewritten from their description, as the baseline of the measurement.

Their slow parts are kept: PIL decodes and augments images one by one in DataLoader's workers (if a document gives no
number of workers, in the training process). A step copies them to the device on demand and computes in fp32 and NCHW.
The first family waits for the device after every step to add up its loss. Models are the trainer's, with the presets'
values ``--as-published``. On a CPU, where torch's SyncBatchNorm does not run, the trainer's replaces it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from ddp_trainer.config.run import RunConfig
from ddp_trainer.data.published import find_reader
from ddp_trainer.distributed.world import World
from ddp_trainer.imports import import_torchvision
from ddp_trainer.machine import available_cpus
from ddp_trainer.models import build_model
from ddp_trainer.models.layers import convert

_CLASSES = {"cifar10": (3, 10), "fashion-mnist": (1, 10), "voc2012": (3, 21)}
_WORKERS = {"cifar10-resnet50": 10}
# The loops that add up the loss as a number after every step.
_WAITING = ("cifar10-resnet50", "cifar10-resnet18", "voc2012-deeplabv3-resnet101")


class DocumentsLoop:
    """One document's loop on this rank. ``data_parallel`` spreads a batch over all GPUs of this process."""

    def __init__(self, config: RunConfig, world: World, *, half: bool = False, data_parallel: bool = False) -> None:
        self.config = config
        self.world = world
        self.device = world.device
        self.batch_size = config.data.batch_size
        channels, classes = _CLASSES[config.data.name]
        torch.manual_seed(config.seed)
        if self.device.type == "cuda":
            torch.backends.cudnn.deterministic = config.precision.deterministic
        model = build_model(config.model, channels, classes).to(self.device)
        if config.model.sync_batchnorm and world.is_distributed:
            cuda = self.device.type == "cuda"
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if cuda else convert(model)  # type: ignore[no-untyped-call]
        if world.is_distributed:
            model = nn.parallel.DistributedDataParallel(
                model, device_ids=[self.device] if self.device.type == "cuda" else None
            )
        elif data_parallel:
            model = nn.DataParallel(model)
        self.model = model
        optim = config.optim
        self.optimizer: torch.optim.Optimizer
        if optim.name == "novograd":
            self.optimizer = LoopNovoGrad(model.parameters(), optim.lr, *optim.betas, average=optim.grad_averaging)
        else:
            self.optimizer = torch.optim.SGD(
                model.parameters(), lr=optim.lr, momentum=optim.momentum, weight_decay=optim.weight_decay
            )
        self.criterion = nn.CrossEntropyLoss(ignore_index=255)
        self.scaler = torch.amp.GradScaler(self.device.type) if half else None
        self.loader = _build_loader(config, world)
        self.prefetched = 2 * self.loader.num_workers

    def steps(self) -> Iterator[float]:
        """Take a step at each request for the next item; an item is the seconds of waiting for the batch."""
        epoch = 0
        running_loss = 0.0
        correct: Any = 0
        self.model.train()
        waits_each_step = self.config.preset in _WAITING
        while True:
            if isinstance(self.loader.sampler, DistributedSampler):
                self.loader.sampler.set_epoch(epoch)
            batches = iter(self.loader)
            while True:
                started = time.perf_counter()
                batch = next(batches, None)
                if batch is None:
                    break
                waited = time.perf_counter() - started
                images = batch[0].to(self.device)
                labels = batch[1].to(self.device)
                loss, outputs = self._step(images, labels)
                if waits_each_step:
                    running_loss += loss.item()
                if self.config.train_accuracy:
                    correct = correct + (outputs.max(1)[1] == labels).sum()
                yield waited
            epoch += 1

    def _step(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self.optimizer.zero_grad()
        if self.scaler is None:
            outputs = self.model(images)
            loss = self.criterion(outputs, labels)
            loss.backward()
            self.optimizer.step()
            return loss, outputs
        with torch.autocast(self.device.type, torch.float16):
            outputs = self.model(images)
            loss = self.criterion(outputs, labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss, outputs


def _build_loader(config: RunConfig, world: World) -> DataLoader[Any]:
    dataset = _build_dataset(config)
    distributed: DistributedSampler[Any] | None = None
    if world.is_distributed:
        distributed = DistributedSampler(dataset, world.size, world.rank)
    workers = min(_WORKERS.get(config.preset, 0), available_cpus())
    return DataLoader(
        dataset,
        batch_size=config.data.batch_size,
        sampler=distributed,
        shuffle=distributed is None,
        num_workers=workers,
        pin_memory=workers > 0 and world.device.type == "cuda",
        drop_last=config.data.drop_last,
    )


def _build_dataset(config: RunConfig) -> Any:
    import_torchvision()
    from torchvision import datasets, transforms

    folder = config.data.dir
    size = config.data.image_size
    half = [transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.5,) * 3)]
    if config.data.name == "fashion-mnist":
        return datasets.FashionMNIST(folder, transform=transforms.ToTensor())
    if config.data.name == "voc2012":
        fit = transforms.Resize((size, size))
        nearest = transforms.Resize((size, size), transforms.InterpolationMode.NEAREST)
        return datasets.VOCSegmentation(
            folder,
            image_set="train",
            transform=transforms.Compose([fit, transforms.ToTensor()]),
            target_transform=transforms.Compose([nearest, _to_classes]),
        )
    first: list[Callable[[Any], Any]] = {
        "cifar10-resnet50": [transforms.RandomCrop(32), transforms.RandomHorizontalFlip()],
        "cifar10-resnet18": [],
        "cifar10-wideresnet": [
            transforms.RandomHorizontalFlip(),
            transforms.RandomRotation(10),
            transforms.RandomAffine(0, shear=10, scale=(0.8, 1.2)),
            transforms.ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2),
        ],
    }[config.preset]
    return find_reader(verify=False)(folder, transform=transforms.Compose([*first, *half]))


def _to_classes(mask: Any) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.array(mask)).long()


class LoopNovoGrad(torch.optim.Optimizer):
    """NovoGrad one tensor after the other, which reads from the device for each whether it is the first step.

    The arithmetic is the trainer's; the form is that of the library in the document.
    """

    def __init__(self, parameters: Any, lr: float, beta1: float, beta2: float, *, average: bool) -> None:
        super().__init__(parameters, {"lr": lr})
        self.beta1 = beta1
        self.beta2 = beta2
        self.average = average

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                    state["square"] = torch.zeros((), device=parameter.device)
                gradient = parameter.grad
                square = state["square"]
                now = gradient.pow(2).sum()
                if square == 0:
                    square.copy_(now)
                else:
                    square.mul_(self.beta2).add_(now, alpha=1 - self.beta2)
                gradient = gradient / (square.sqrt() + 1e-8)
                if self.average:
                    gradient.mul_(1 - self.beta1)
                state["mean"].mul_(self.beta1).add_(gradient)
                parameter.add_(state["mean"], alpha=-group["lr"])
