"""The memory of a rank's samples: digests of its parameters and batches after some of its steps.

A sample has a place by the largest power of two that divides its step: it stays the longer, the rarer such steps are.
So launchers that read the memory at different times find samples of equal steps.
"""

from typing import Any, NamedTuple

from ...rank.counters import FEATURE_NUMBERS

REPLICAS_FILE = "replicas.json"
"""In the pod's folder: the samples of its ranks, for peer pods."""
_LEVELS = 24  # powers of two
_FIELDS = 8
_NUMBERS = 2 * _LEVELS * _FIELDS
assert _NUMBERS <= FEATURE_NUMBERS
MOST_SAMPLES = 2 * _LEVELS


class ReplicaSample(NamedTuple):
    """What a rank began an iteration with, after ``step`` steps of its process.

    ``part``: of the parameters; ``digest``: of this part; ``key``: equal for ranks whose parameters are to be equal;
    ``batch``: a digest of the inputs; ``data``: equal for ranks whose batches are to differ; 0: unknown, of all four;
    ``shares``: whether a wrapper shares the gradients; ``lost``: the step since which the loss is not finite, counting
    absurd losses just before; negative if the last loss before it had grown; 0: it is finite, or the step is unknown.
    """

    step: int
    part: int
    digest: int
    key: int
    batch: int
    data: int
    shares: int
    lost: int = 0


def write_sample(slot: Any, sample: ReplicaSample) -> None:
    """Write a sample in the last numbers of a rank's slot."""
    start = len(slot) - _NUMBERS + _find_place(sample.step)
    entry = slot[start : start + _FIELDS].cast("B").cast("q")
    entry[0] = 0  # a reader ignores it meanwhile
    for index, number in enumerate(sample[1:], 1):
        entry[index] = number
    entry[0] = sample.step + 1


def read_samples(slot: Any) -> list[ReplicaSample]:
    """Return the samples in a slot. Two equal readings show that none was written meanwhile."""
    memory = slot[len(slot) - _NUMBERS :].cast("B").cast("q")
    first = memory.tolist()
    second = memory.tolist()
    samples = []
    for start in range(0, _NUMBERS, _FIELDS):
        step, *values = second[start : start + len(ReplicaSample._fields)]
        if step > 0 and first[start : start + _FIELDS] == second[start : start + _FIELDS]:
            samples.append(ReplicaSample(step - 1, *values))
    return samples


def _find_place(step: int) -> int:
    """Return the place of a step's sample. Two steps in a row, the first of which is even, have one level."""
    pair = step // 2
    level = _LEVELS - 1 if pair == 0 else min((pair & -pair).bit_length(), _LEVELS - 2)
    return (2 * level + step % 2) * _FIELDS
