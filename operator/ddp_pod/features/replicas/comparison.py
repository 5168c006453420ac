"""Whether the ranks of a job hold equal parameters and train on different batches: compare the samples of all ranks.

Only samples of equal steps of one round of the ranks are compared, and only of ranks with equal keys.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...contract.group_facts import DIFFERENT, LOST_LOSS, SAME_DATA, GroupFacts
from .samples import MOST_SAMPLES, ReplicaSample

_RANKS_OF_POD = 32  # whose samples are shared
_STEPS_TO_CONFIRM = 2
_STEPS_WITH_SAME_BATCH = 3
_MOST_LISTED = 4
_MOST_NOTES = 4096  # of parts that were equal, and of differences
_CHECK_DEVICE = "check the GPU and the memory of its node, and restart from a checkpoint before that step"
_CHECK_BATCH = (
    "check the samples of its batch at that step, and the GPU and the memory of its node; restart from a checkpoint "
    "before that step"
)
_CHANGE_EQUALLY = "change parameters by the optimizer alone, with gradients that all ranks share"
_BEGIN_EQUALLY = "wrap the model in DistributedDataParallel, or initialize it with the same seed in all ranks"
_DIVIDE_DATA = "use a DistributedSampler with the default rank and num_replicas, or a seed that depends on RANK"


class RankSample(NamedTuple):
    """A sample of one rank, in one pod."""

    pod: int
    rank: int
    sample: ReplicaSample


def encode_samples(samples: Mapping[int, Iterable[ReplicaSample]]) -> list[list[int]]:
    """Return a pod's samples, by rank, for its peers."""
    ranks = sorted(samples)[:_RANKS_OF_POD]
    return [[rank, *sample] for rank in ranks for sample in samples[rank]]


def decode_samples(pod: int, raw: Any) -> list[RankSample]:
    """Read the samples of a pod; invalid ones are omitted."""
    count = 1 + len(ReplicaSample._fields)
    samples = []
    for row in raw[: _RANKS_OF_POD * MOST_SAMPLES] if isinstance(raw, list) else ():
        if isinstance(row, list) and len(row) == count and all(type(number) is int for number in row):
            samples.append(RankSample(pod, row[0], ReplicaSample(*row[1:])))
    return samples


class _Difference(NamedTuple):
    step: int
    minority: frozenset[int]
    """Ranks that differ from the majority; empty: there is none."""
    ranks: frozenset[int]
    began_equal: bool


class ReplicaComparison:
    """Compares the samples of one round of ranks. ``world_size``: of the job."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._equal_since: dict[tuple[int, int], int] = {}  # the first step with equal digests, by key and part
        self._differences: dict[int, dict[int, _Difference]] = defaultdict(dict)  # by key and step
        self._notes = 0
        self.facts: GroupFacts | None = None

    def update(self, samples: Sequence[RankSample]) -> GroupFacts | None:
        """Return what is known with the samples that exist now; None: no mistake."""
        if self.facts is None or (self.facts.state == DIFFERENT and self.facts.rank is None):
            self._compare_parameters(samples)
            difference = self._find_confirmed()
            pods = {sample.rank: sample.pod for sample in samples}
            if difference is not None:
                self.facts = self._describe(difference, pods)
            if self.facts is None or self.facts.rank is None:
                self.facts = self._compare_losses(samples, pods) or self.facts
        return self.facts or self._compare_batches(samples)

    def _compare_parameters(self, samples: Sequence[RankSample]) -> None:
        members: dict[int, set[int]] = defaultdict(set)
        groups: dict[tuple[int, int, int], dict[int, RankSample]] = defaultdict(dict)
        for entry in samples:
            sample = entry.sample
            if sample.key and sample.digest:
                members[sample.key].add(entry.rank)
                groups[sample.step, sample.key, sample.part][entry.rank] = entry
        for step, key, part in sorted(groups):
            ranks = groups[step, key, part]
            if len(ranks) < len(members[key]) or len(ranks) < 2 or self._notes >= _MOST_NOTES:
                continue  # a pod's samples are missing: they decide who differs
            if len({entry.sample.digest for entry in ranks.values()}) > 1:
                equal_since = self._equal_since.get((key, part), step)
                shares = any(entry.sample.shares for entry in ranks.values())
                self._notes += step not in self._differences[key]
                self._differences[key][step] = _Difference(
                    step, _find_minority(ranks), frozenset(ranks), shares or equal_since < step
                )
            elif (key, part) not in self._equal_since:
                self._notes += 1
                self._equal_since[key, part] = step

    def _find_confirmed(self) -> _Difference | None:
        """Return the first difference that samples of two steps show, those with a majority first."""
        confirmed = []
        for differences in self._differences.values():
            counts = Counter(difference.minority for difference in differences.values())
            confirmed += [found for found in differences.values() if counts[found.minority] >= _STEPS_TO_CONFIRM]
        return min(confirmed, key=lambda found: (not found.minority, found.step), default=None)

    def _describe(self, difference: _Difference, pods: Mapping[int, int]) -> GroupFacts:
        rank, pod, place = _locate(difference.minority, pods)
        others = _list(difference.ranks - difference.minority)
        if difference.minority:
            message = f"the parameters of {place} differ from those of {others}"
        else:
            message = f"the parameters of {others} differ"
        message += f" after step {difference.step} of these processes"
        if not difference.began_equal:
            message += ", and were equal at no earlier step"
            remedy = _BEGIN_EQUALLY
        else:
            remedy = _CHECK_DEVICE if rank is not None else _CHANGE_EQUALLY
        is_mistake = not difference.began_equal
        return GroupFacts(DIFFERENT, self._world_size, message, remedy, rank, pod, is_mistake=is_mistake)

    def _compare_losses(self, samples: Sequence[RankSample], pods: Mapping[int, int]) -> GroupFacts | None:
        """Return which ranks' losses were lost before those of all their peers.

        With shared gradients the peers follow one step later. Where losses grew before, training diverges in all ranks.
        """
        lost: dict[int, dict[int, int]] = defaultdict(dict)  # by data and rank
        for entry in sorted(samples, key=lambda entry: entry.sample.step):
            if entry.sample.data:
                lost[entry.sample.data][entry.rank] = entry.sample.lost
        for steps in lost.values():
            step = min(steps.values())
            first = frozenset(rank for rank in steps if steps[rank] == step)
            if step <= 0 or 2 * len(first) > len(steps):
                continue
            rank, pod, place = _locate(first, pods)
            message = (
                f"the loss of {place} was not finite, or more than 1000 times as large as before, at step {step} of "
            )
            message += f"these processes; the loss of {_list(steps.keys() - first)} was lost after that step"
            return GroupFacts(LOST_LOSS, self._world_size, message, _CHECK_BATCH, rank, pod)
        return None

    def _compare_batches(self, samples: Sequence[RankSample]) -> GroupFacts | None:
        batches: dict[int, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))  # by data, step and rank
        members: dict[int, set[int]] = defaultdict(set)
        for entry in samples:
            sample = entry.sample
            if sample.data and sample.batch:
                batches[sample.data][sample.step][entry.rank] = sample.batch
                members[sample.data].add(entry.rank)
        for data, steps in batches.items():
            complete = [batch for batch in steps.values() if len(batch) == len(members[data]) > 1]
            same = [next(iter(batch.values())) for batch in complete if len(set(batch.values())) == 1]
            # The same batch at each step is that of a benchmark.
            if len(same) == len(complete) and len(set(same)) >= _STEPS_WITH_SAME_BATCH:
                message = f"{_list(members[data])} train on the same batches ({len(same)} steps compared)"
                return GroupFacts(SAME_DATA, self._world_size, message, _DIVIDE_DATA, is_mistake=True)
        return None


def _find_minority(ranks: Mapping[int, RankSample]) -> frozenset[int]:
    """Return the ranks whose digest is not that of more than half of the ranks; empty: there is no majority."""
    digest, count = Counter(entry.sample.digest for entry in ranks.values()).most_common(1)[0]
    if 2 * count <= len(ranks):
        return frozenset()
    return frozenset(rank for rank, entry in ranks.items() if entry.sample.digest != digest)


def _locate(ranks: Iterable[int], pods: Mapping[int, int]) -> tuple[int | None, int | None, str]:
    """Return the rank and the pod, if it is one, and both as a text."""
    numbers = sorted(ranks)
    places = {pods.get(number) for number in numbers}
    pod = places.pop() if len(places) == 1 else None
    text = _list(numbers) + (f" (pod {pod})" if pod is not None else "")
    return numbers[0] if len(numbers) == 1 else None, pod, text


def _list(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:_MOST_LISTED])) + (", …" if len(listed) > _MOST_LISTED else "")
    return f"rank {shown}" if len(listed) == 1 else f"ranks {shown}"
