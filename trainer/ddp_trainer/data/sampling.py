"""Which samples a rank sees, in which order, and random numbers for them.

The order is DistributedSampler's, with a beginning anywhere in the epoch. Random numbers have no state: each is a hash
of the run's seed, the epoch, the sample and its use. So a sample is augmented the same way whatever the number of
ranks, the batch size or the step at which a run resumed, and nothing about randomness has to be saved.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_64_BITS = 2**64 - 1


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


def _mix(x: Any) -> Any:
    """The output function of SplitMix64 (Steele, Lea, Flood: "Fast splittable random number generators", 2014).

    ``x`` is a whole number of 64 bits, or an array of them (uint64).
    """
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _64_BITS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _64_BITS
    return x ^ (x >> 31)


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from several whole numbers, for example run seed, step and rank.

    Every step needs one: with Python's own numbers it takes a twentieth of what NumPy's arrays of one number take.
    """
    state = 0
    for part in parts:
        state = _mix((state * _GOLDEN + part + _GOLDEN) & _64_BITS)
    return state >> 1


def uniforms(samples: NDArray[np.int64], width: int, *parts: int) -> NDArray[np.float32]:
    """Numbers in [0, 1), of shape (len(samples), width): row i depends on ``samples[i]`` and ``parts`` alone."""
    key = np.uint64(derive_seed(*parts))
    counters = samples.astype(np.uint64)[:, None] * np.uint64(width) + np.arange(width, dtype=np.uint64)
    bits: NDArray[np.uint64] = _mix((counters + np.uint64(1)) * np.uint64(_GOLDEN) + key)
    # The top 24 bits are as many as float32 holds exactly.
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
