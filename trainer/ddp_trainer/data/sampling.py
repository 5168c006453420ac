"""The samples of a rank, their order, and their random numbers.

The order is that of DistributedSampler, and can start anywhere in the epoch. Random numbers have no state: each is a
hash of the run's seed, the epoch, the sample and a stream number. The augmentation of a sample does not depend on the
number of ranks, the batch size or the step from which a run resumed, and no generator has to be saved.
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
    """Return the indices of this rank's training samples in ``epoch``, int64.

    With ``consumed == 0`` these are the indices of ``DistributedSampler(shuffle=True)`` for this rank. Otherwise all
    ranks together have already used that many samples of the epoch, at any world size, and share the rest. All ranks
    get the same number: without ``drop_last`` the first samples of the epoch are repeated at its end.
    """
    # All ranks share this order, of which each takes every world_size-th index. DistributedSampler would return a list,
    # which takes fifty times as long while the device is idle.
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
    """Return the length of :func:`train_order` for a whole epoch."""
    return length // world_size if drop_last else -(-length // world_size)


def validation_order(length: int, *, rank: int, world_size: int) -> Tensor:
    """Return the indices of this rank's validation samples: every sample is on exactly one rank, without padding."""
    return torch.arange(length)[rank::world_size]


def _mix(x: Any) -> Any:
    """Compute the output function of SplitMix64 (Steele, Lea, Flood: "Fast splittable random number generators", 2014).

    ``x`` is an integer of 64 bits, or an array of uint64.
    """
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _64_BITS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _64_BITS
    return x ^ (x >> 31)


def derive_seed(*parts: int) -> int:
    """Derive a 63-bit seed from several integers, for example run seed, step and rank.

    Every step needs one: Python's integers take a twentieth of the time of NumPy arrays of one element.
    """
    state = 0
    for part in parts:
        state = _mix((state * _GOLDEN + part + _GOLDEN) & _64_BITS)
    return state >> 1


def uniforms(samples: NDArray[np.int64], width: int, *parts: int) -> NDArray[np.float32]:
    """Return numbers in [0, 1), (len(samples), width); row i depends only on ``samples[i]`` and ``parts``."""
    key = np.uint64(derive_seed(*parts))
    counters = samples.astype(np.uint64)[:, None] * np.uint64(width) + np.arange(width, dtype=np.uint64)
    bits: NDArray[np.uint64] = _mix((counters + np.uint64(1)) * np.uint64(_GOLDEN) + key)
    # float32 represents 24 bits exactly.
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
