"""Random numbers without a state: each is a hash of the run's seed, the epoch, the sample and its use.

So a sample is augmented the same way whatever the number of ranks, the batch size or the step at which a run resumed,
and nothing about randomness has to be saved.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_64_BITS = 2**64 - 1


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
