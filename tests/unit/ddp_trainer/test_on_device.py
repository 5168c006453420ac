"""A step exchanges nothing between host and device, because a GPU would be idle meanwhile.

The device is torch's ``meta``, which has shapes but no values. Code that reads a value from it, or mixes it with the
CPU,
raises an exception or is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_sdk.meters import AsyncScalars
from ddp_trainer.config.presets import PRESETS
from ddp_trainer.config.run import resolve
from ddp_trainer.data.arrays import Datasets, ImageData
from ddp_trainer.data.augment import DRAWS, Augmentation
from ddp_trainer.data.sources import CachedSource, ImageForm, Normalize
from ddp_trainer.models import build_model
from ddp_trainer.models.layers import convert
from ddp_trainer.optim.novograd import NovoGrad
from ddp_trainer.precision import Precision
from ddp_trainer.tasks import build_task

DEVICE = torch.device("meta")
SHAPES = {"cifar10": (3, 32, 32), "fashion-mnist": (1, 28, 28), "digits": (1, 8, 8), "voc2012": (3, 64, 64)}
CLASSES = 21


class _Operations(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        if any(tensor.device != DEVICE for tensor in tensors):
            self._found.append(str(func))
        return out


class Crossings(TorchFunctionMode):
    """Records every operation on the CPU, and every tensor that is created from the host's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._operations = _Operations(self.found)

    def __enter__(self) -> Crossings:
        self._operations.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *about: Any) -> None:
        super().__exit__(*about)
        self._operations.__exit__(*about)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor, torch.from_numpy):
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


def datasets(name: str, count: int) -> Datasets:
    shape = SHAPES[name]
    images = torch.zeros(count, *shape, dtype=torch.uint8)
    masks = torch.zeros(count, *shape[1:], dtype=torch.uint8) if name == "voc2012" else None
    data = ImageData(images, torch.zeros(count, dtype=torch.int64) if masks is None else masks)
    return Datasets(data, data, CLASSES, (0.5,), (0.5,))


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("preset", [name for name in PRESETS if PRESETS[name].values["data"]["name"] in SHAPES])
def test_batch_is_built_on_device(preset: str, published: bool) -> None:
    config = resolve(preset, None, {}, as_published=published).data
    data = datasets(config.name, 6)
    augmentation = Augmentation.from_config(config, channels=data.in_channels, masks=config.name == "voc2012")
    assert isinstance(data.train, ImageData)
    source = CachedSource(data.train, ImageForm(augmentation, Normalize(data, DEVICE, torch.channels_last)), DEVICE)
    draws = np.zeros((6, DRAWS), np.float32) if augmentation.active else None
    source.group_size = 1
    batches = source.batches(torch.arange(6), draws, 2)
    next(batches)  # before it, the epoch's order and constant tensors are sent
    with Crossings() as crossings:
        batch = next(batches)
    assert crossings.found == []
    assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
    assert (batch.inputs.device, batch.targets.device) == (DEVICE, DEVICE)


@pytest.mark.parametrize("preset", ["digits-resnet", "cifar10-resnet18", "cifar10-wideresnet"])
def test_step_runs_on_device(preset: str) -> None:
    config = resolve(preset, None, {"model": {"widen": 1}})
    data = datasets(config.data.name, 2)
    task = build_task(data)
    with DEVICE:
        model = build_model(config.model, data.in_channels, CLASSES)
        images = torch.empty(2, *SHAPES[config.data.name])
        labels = torch.empty(2, dtype=torch.int64)
        totals = torch.zeros((), dtype=torch.float64)
    precision = Precision(resolve(preset, None, {"precision": {"name": "fp32"}}).precision, torch.device("cpu"))
    optimizer = NovoGrad(model.parameters(), weight_decay=0.1, grad_averaging=True)
    for _ in range(2):
        with Crossings() as crossings:
            outputs = model(images)
            loss = task.loss(outputs, labels)
            precision.backward(loss)
            norm = precision.step(optimizer, list(model.parameters()), 1.0)
            assert norm is not None
            AsyncScalars([loss, norm])
            with torch.inference_mode():
                totals = totals + task.totals(model(images), labels) + task.correct(outputs, labels).sum()
    assert crossings.found == []


@pytest.fixture
def ranks() -> Iterator[None]:
    """Two ranks without messages from the peer; the statistics of batch norm have a shape."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
    with torch.library._scoped_library("aten", "IMPL") as library:  # type: ignore[no-untyped-call]

        def statistics(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
            return x.new_empty(x.shape[1]), x.new_empty(x.shape[1])

        library.impl("batch_norm_update_stats", statistics, "Meta")
        yield
    dist.destroy_process_group()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_synchronised_batch_norm_runs_on_device(momentum: float | None, ranks: None) -> None:
    with DEVICE:
        layer = convert(nn.BatchNorm2d(4, momentum=momentum))
        images = torch.empty(2, 4, 6, 6, requires_grad=True)
    with Crossings() as crossings:
        layer(images).sum().backward()
    assert crossings.found == []
    assert images.grad is not None


def test_watch_records_copies_and_host_reads() -> None:
    with Crossings() as crossings:
        torch.tensor([1, 2], device=DEVICE)
        torch.zeros(2).to(DEVICE)
    assert crossings.found == ["tensor", "aten.zeros.default", "aten._to_copy.default"]
    with pytest.raises(RuntimeError, match="meta"):
        torch.zeros((), device=DEVICE).item()
