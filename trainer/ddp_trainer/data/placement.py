"""Where a dataset is held: decoded on the device, decoded in host memory, or on disk."""

from __future__ import annotations

import torch

from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets, FileData, ImageData, check_labels
from ddp_trainer.data.augment import Augmentation
from ddp_trainer.data.sources import CachedSource, Normalise, Source, StreamedSource
from ddp_trainer.errors import UserError
from ddp_trainer.machine import available_cpus, available_memory

# Share of the free memory that data may take; the rest is the model's, the activations' and the other processes'.
_SHARE = 0.4


def build_source(
    data: ImageData | FileData,
    datasets: Datasets,
    config: DataConfig,
    augmentation: Augmentation,
    device: torch.device,
    memory_format: torch.memory_format,
    processes: int = 1,
) -> Source:
    """A source of batches from ``data``, held where ``config.cache`` says, or as near to the device as it fits.

    ``processes`` share this machine's memory. Raises :class:`UserError` where the data do not fit where they must.
    """
    normalise = Normalise(datasets, device, memory_format)
    where = choose(data, config.cache, device, processes)
    if where != "none" and isinstance(data, FileData):
        data = data.read_all(threads=max(1, available_cpus() // processes))
        check_labels("the", data, datasets.num_classes)
    if isinstance(data, ImageData) and (where == "device" or (where == "host" and device.type == "cpu")):
        return CachedSource(data, augmentation, normalise, device)
    return StreamedSource(data, augmentation, normalise, device, config.workers)


def choose(data: ImageData | FileData, cache: str, device: torch.device, processes: int) -> str:
    """``device``, ``host`` or ``none``: as asked, or, for ``auto``, the first of these where the data fit.

    Raises :class:`UserError` where they do not fit where they must.
    """
    if cache == "none":
        return cache
    host_room = available_memory() * _SHARE / processes
    in_host = isinstance(data, ImageData) or data.nbytes <= host_room
    gpu_room = torch.cuda.mem_get_info(device)[0] * _SHARE if device.type == "cuda" else 0.0
    in_device = in_host if device.type == "cpu" else in_host and data.nbytes <= gpu_room
    fits = {"device": in_device, "host": in_host, "auto": True}[cache]
    if not fits:
        raise UserError(
            "data.cache",
            f"{data.nbytes / 2**20:.0f} MiB of decoded images don't fit into {_SHARE:.0%} of the free memory, "
            f"{host_room / 2**20:.0f} MiB a process here"
            + (f", {gpu_room / 2**20:.0f} MiB on the GPU" if gpu_room else ""),
            "give --data-cache auto or none",
        )
    if cache != "auto":
        return cache
    return "device" if in_device else "host" if in_host else "none"
