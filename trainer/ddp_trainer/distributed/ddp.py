"""One replica of the model on each rank: DistributedDataParallel, and how its gradients travel."""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.distributed import DistributedConfig
from ddp_trainer.distributed.world import World
from ddp_trainer.errors import UserError, require

# As many parameters are named in a message.
_MOST_NAMES = 8
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def uses_gloo(config: DistributedConfig, device: torch.device) -> bool:
    """Whether gradients travel through gloo."""
    return device.type == "cpu" or config.backend == "gloo"


def check(config: DistributedConfig, world: World) -> None:
    """Raise :class:`UserError` for a compression that the collectives cannot do, or for two ways to replicate."""
    require(
        not (config.data_parallel and world.is_distributed),
        "distributed.data_parallel",
        f"DataParallel is one process for all GPUs, and there are {world.size}",
        "start one process, without torchrun",
    )
    require(
        config.compression != "powersgd" or not uses_gloo(config, world.device),
        "distributed.compression",
        "PowerSGD needs nccl, and these ranks talk through gloo",
        "use --compression bf16, or run on GPUs",
    )


def replicate(model: nn.Module, config: DistributedConfig, world: World) -> nn.Module:
    """``model`` itself on one rank, else wrapped so that backward averages gradients over all ranks."""
    check(config, world)
    if config.data_parallel:
        return nn.DataParallel(model)
    if not world.is_distributed:
        return model
    # Batch norm does not read its statistics in training, and they are sent before they are used
    # (World.broadcast_buffers). torch 2.13 has a new name for this and warns at the old one.
    known = inspect.signature(DistributedDataParallel).parameters
    sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {sync: config.broadcast_buffers}
    # The size of buckets in MiB is DDP's own, 25 after a first one of 1, where it will do; one that is given counts for
    # the first bucket too. Where the link is slow enough for compression, the wire should be busy from the first
    # gradients on: over 1 Gbit/s ResNet-18 with bf16 gradients makes 1.8 times plain DDP's images/s with buckets of
    # 5 MiB, 1.6 times with 25 (tests/bench/trainer).
    size = config.bucket_mb or (None if config.compression == "none" else 5.0)
    if size is not None:
        options["bucket_cap_mb"] = size
    replica = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=config.bucket_view,
        static_graph=config.static_graph,
        find_unused_parameters=config.find_unused_parameters,
        **options,
    )
    if config.compression != "none":
        _compress(replica, config, world)
    return replica


def needs_all_gradients(replica: nn.Module, config: DistributedConfig) -> bool:
    """Whether each parameter must get a gradient in every step, because DDP waits for all of them.

    DDP says so only in the forward pass after a step without one: by then the optimiser has made a step with gradients
    that are not the same on all ranks.
    """
    is_ddp = isinstance(replica, DistributedDataParallel)
    return is_ddp and not (config.find_unused_parameters or config.static_graph)


def missing_gradients(model: nn.Module, step: int) -> UserError:
    """The error of step ``step`` (from 0), which has left parameters of ``model`` without a gradient."""
    names = [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return UserError(
        "distributed.find_unused_parameters",
        f"step {step + 1} gave no gradient to {', '.join(names[:_MOST_NAMES])}{more}, and DDP waits for all of them",
        "give --find-unused-parameters, or take what the loss does not depend on out of the model",
    )


def _compress(replica: DistributedDataParallel, config: DistributedConfig, world: World) -> None:
    if config.compression == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        state = powersgd.PowerSGDState(None, matrix_approximation_rank=config.powersgd_rank)
        replica.register_comm_hook(state, powersgd.powerSGD_hook)
    elif uses_gloo(config, world.device):
        replica.register_comm_hook(_DTYPES[config.compression], _cast_and_average)
    else:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
        replica.register_comm_hook(None, hooks[config.compression])


def _cast_and_average(dtype, bucket):  # type: ignore[no-untyped-def]
    """Average a bucket over the ranks in ``dtype``: half the bytes on the wire.

    What torch's own hooks do, which insist on nccl. Divided before the sum, which may then not overflow fp16. Without
    annotations, because DDP refuses those that are text.
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
