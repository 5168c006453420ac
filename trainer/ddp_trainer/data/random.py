"""Random numbers without a state: each is a hash of the run's seed, the epoch, the sample and its use.

So a sample is augmented the same way whatever the number of ranks, the batch size or the step at which a run resumed,
and nothing about randomness has to be saved.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea, Flood: "Fast splittable random number generators", 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from several whole numbers, for example run seed, step and rank."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = _mix(state * _GOLDEN + np.uint64(part & 0xFFFFFFFFFFFFFFFF) + _GOLDEN)
    return int(state[0] >> np.uint64(1))


def uniforms(samples: NDArray[np.int64], width: int, *parts: int) -> NDArray[np.float32]:
    """Numbers in [0, 1), of shape (len(samples), width): row i depends on ``samples[i]`` and ``parts`` alone."""
    key = np.uint64(derive_seed(*parts))
    counters = samples.astype(np.uint64)[:, None] * np.uint64(width) + np.arange(width, dtype=np.uint64)
    bits = _mix(np.asarray((counters + np.uint64(1)) * _GOLDEN + key, dtype=np.uint64))
    # The top 24 bits are as many as float32 holds exactly.
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
