"""Which samples a rank sees, in which order: DistributedSampler's, with a beginning anywhere in the epoch."""

import torch
from torch import Tensor


def train_order(
    length: int, *, seed: int, epoch: int, rank: int, world_size: int, consumed: int = 0, drop_last: bool = False
) -> Tensor:
    """Indices of this rank's training samples in ``epoch``, int64.

    With ``consumed == 0`` these are the indices of ``DistributedSampler(shuffle=True)`` for this rank. Otherwise all
    ranks together have already used that many samples of the epoch, at whatever world size, and the rest is dealt out.
    Ranks get equally many: without ``drop_last`` some samples of the epoch's beginning come again at its end.
    """
    # The order that all ranks share, of which rank r of w takes every w-th. The sampler itself hands it out as a list,
    # which takes fifty times as long, while the device has nothing to do.
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch))
    rest = order[consumed:]
    surplus = len(rest) % world_size
    if surplus and drop_last:
        rest = rest[: len(rest) - surplus]
    elif surplus:
        padding = world_size - surplus
        rest = torch.cat([rest, order.repeat(-(-padding // len(order)))[:padding]])
    return rest[rank::world_size]


def samples_per_rank(length: int, world_size: int, drop_last: bool) -> int:
    """Length of :func:`train_order` for a whole epoch."""
    return length // world_size if drop_last else -(-length // world_size)


def validation_order(length: int, *, rank: int, world_size: int) -> Tensor:
    """Indices of this rank's validation samples: every sample on exactly one rank, so without padding."""
    return torch.arange(length)[rank::world_size]
