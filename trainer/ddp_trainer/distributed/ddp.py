"""One replica of the model on each rank: DistributedDataParallel, and the compression of its gradients."""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.distributed import DistributedConfig
from ddp_trainer.distributed.world import World
from ddp_trainer.errors import UserError, require

# Parameters that a message names.
_MOST_NAMES = 8
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check(config: DistributedConfig, world: World) -> None:
    """Raise :class:`UserError` if the configuration asks for DataParallel in more than one process."""
    require(
        not (config.data_parallel and world.is_distributed),
        "distributed.data_parallel",
        f"DataParallel uses one process for all GPUs, but {world.size} processes run",
        "start one process, without torchrun",
    )


def replicate(model: nn.Module, config: DistributedConfig, world: World) -> nn.Module:
    """Return ``model`` on one rank; on more, wrap it so that backward averages gradients over all ranks."""
    check(config, world)
    if config.data_parallel:
        return nn.DataParallel(model)
    if not world.is_distributed:
        return model
    # Batch norm does not read its running statistics in training, and World.broadcast_buffers sends them before
    # validation. torch 2.13 renamed the argument and warns about the old name.
    parameters = inspect.signature(DistributedDataParallel).parameters
    sync = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
    options: dict[str, Any] = {sync: config.broadcast_buffers}

    bucket_mb = _choose_bucket_mb(config)
    if bucket_mb is not None:
        options["bucket_cap_mb"] = bucket_mb
    replica = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=config.bucket_view,
        find_unused_parameters=config.find_unused_parameters,
        **options,
    )

    if config.compression != "none":
        _compress(replica, config, world)
    return replica


def _choose_bucket_mb(config: DistributedConfig) -> float | None:
    """Return the size of DDP's buckets in MiB; None keeps DDP's default with its small first bucket.

    Compression is for slow links, which small buckets keep busy from the first gradients on: over 1 Gbit/s ResNet-18
    with bf16 gradients reaches 1.8 times plain DDP's images/s with 5 MiB, 1.6 times with 25 (tests/bench/trainer).
    """
    if config.bucket_mb is not None:
        return config.bucket_mb
    return None if config.compression == "none" else 5.0


def needs_all_gradients(replica: nn.Module, config: DistributedConfig) -> bool:
    """Return whether DDP waits for a gradient of each parameter in every step.

    DDP raises only in the next forward pass. By then the optimizer has stepped with gradients that differ by rank.
    """
    return isinstance(replica, DistributedDataParallel) and not config.find_unused_parameters


def missing_gradients(model: nn.Module, step: int) -> UserError:
    """Build the error of step ``step`` (from 0), which left parameters of ``model`` without a gradient."""
    names = [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return UserError(
        "distributed.find_unused_parameters",
        f"step {step + 1} gave no gradient to {', '.join(names[:_MOST_NAMES])}{more}, and DDP waits for all of them",
        "give --find-unused-parameters, or remove the parameters that the loss does not depend on",
    )


def _compress(replica: DistributedDataParallel, config: DistributedConfig, world: World) -> None:
    if world.device.type == "cpu" or config.backend == "gloo":
        replica.register_comm_hook(_DTYPES[config.compression], _cast_and_average)
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
    replica.register_comm_hook(None, hooks[config.compression])


def _cast_and_average(dtype, bucket):  # type: ignore[no-untyped-def]
    """Average a bucket over the ranks in ``dtype``, which halves the bytes sent.

    Torch's own hook requires NCCL; this one also runs on gloo. It divides before the sum, which could overflow fp16.
    It has no annotations because DDP rejects annotations that are strings.
    """
    gradients: torch.Tensor = bucket.buffer()
    small = gradients.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(small, async_op=True)
    assert work is not None

    def copy_back(_: torch.futures.Future[Any]) -> torch.Tensor:
        gradients.copy_(small)
        return gradients

    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(copy_back)
    return averaged
