"""One replica of the model on each rank: DistributedDataParallel, or DataParallel for comparison."""

import inspect

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_sdk.errors import UserError, require
from ddp_trainer.distributed import DistributedConfig
from ddp_trainer.distributed.world import World

# Parameters that a message names.
_MOST_NAMES = 8


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
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=config.find_unused_parameters,
        **{sync: False},  # type: ignore[arg-type]
    )


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
