"""Find the values beside the models that a restart loses: queues, counters, normalizers, averages of weights. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ddp_cli.features.check.recordings import Process
from ddp_cli.features.check.verdict import list_names
from ddp_pod.features.check.contract import GENERATOR, SCAN_STEP, TENSORS, WEIGHTS, StepRecord

_MOVING: Final = 0.5  # of the steps that change a value
_LEAST_STEPS: Final = 2  # after a restart, at which a value differs

Values = Mapping[str, str]
"""Kind and digest of each value before a step, by its name."""


class LostValue(NamedTuple):
    """A value that a script changes at most steps, and that a restart does not restore.

    ``is_lasting``: whether it differs at all steps after the restart; ``is_reset``: whether an uninterrupted run gives
    it a former value again, as an average over an epoch; ``is_late``: whether it does not exist before the first step
    after the restart: it may then differ because the step did; ``is_initial``: whether it begins with the value that it
    has at the first step of the run.
    """

    name: str
    kind: str
    is_lasting: bool
    is_reset: bool
    is_late: bool
    is_initial: bool


def find_lost_values(
    whole: Process, repeat: Process | None, process: Process, position: int, until: int
) -> list[LostValue]:
    """Return the values that a process has not restored which continued a run after ``position`` steps.

    ``until``: the step up to which the runs are compared; ``whole``, ``repeat``: two uninterrupted runs; what differs
    between them depends on neither.
    """
    if repeat is None or not process.steps or position >= len(whole.steps):
        return []
    expected = _list_values(whole.steps)
    again = _list_values(repeat.steps)
    values = _list_values(process.steps)
    lost = []
    for name in _list_moving(whole.steps):
        is_repeated = all(before.get(name) == after.get(name) for before, after in zip(expected, again, strict=False))
        pairs = [
            (before[name], after[name])
            for before, after in zip(expected[position:until], values, strict=False)
            if name in before and name in after
        ]
        if is_repeated and pairs and pairs[0][0] != pairs[0][1]:
            lost.append(
                LostValue(
                    name=name,
                    kind=pairs[0][0].partition(":")[0],
                    is_lasting=len(pairs) >= _LEAST_STEPS and all(before != after for before, after in pairs),
                    is_reset=_is_reset([step[name] for step in expected if name in step]),
                    is_late=name not in values[0],
                    is_initial=values[0].get(name, "") == expected[0].get(name),
                )
            )
    return lost


def choose_causes(lost: Sequence[LostValue]) -> list[str]:
    """Return the values that may explain why a resumed run differs: rather those that are never reset.

    Values that restart explain it better than others, which a step may compute from them. So does a generator of
    random numbers that is used at most steps.
    """
    early = [value for value in lost if not value.is_late]
    kept = [value for value in early if not value.is_reset]
    begun = [value for value in kept if value.is_initial]
    begun = [value for value in begun if value.kind == GENERATOR] or begun
    causes = begun or kept or early
    return [f"the generator {value.name}" if value.kind == GENERATOR else value.name for value in causes]


def describe_lost(names: Sequence[str]) -> str:
    """Return what is wrong with lost values."""
    verb = "changes" if len(names) == 1 else "change"
    return f"{list_names(names)} {verb} at each step and {'is' if len(names) == 1 else 'are'} not restored"


def find_silent(lost: Sequence[LostValue]) -> tuple[list[str], bool]:
    """Return lost values on which the training does not depend, and whether they are averages of the weights."""
    silent = [value for value in lost if value.is_lasting and not value.is_reset]  # those of an epoch are reset
    weights = [value.name for value in silent if value.kind == WEIGHTS]
    tensors = [value.name for value in silent if value.kind == TENSORS]
    return weights or tensors, bool(weights)


def _list_values(steps: Sequence[StepRecord]) -> list[dict[str, str]]:
    """Return all values before each step: a record has those that have changed."""
    values: dict[str, str] = {}
    history = []
    for step in steps:
        entries = (entry.rpartition("=") for entry in step.state)
        values = {**values, **{name: value for name, _, value in entries}}
        history.append(values)
    return history


def _list_moving(steps: Sequence[StepRecord]) -> list[str]:
    """Return the names of the values that most steps change, in the order of the script."""
    later = steps[SCAN_STEP:]
    counts = Counter(entry.rpartition("=")[0] for step in later for entry in step.state)
    return [name for name, count in counts.items() if count > _MOVING * len(later)]


def _is_reset(values: Sequence[str]) -> bool:
    """Return whether a value occurs again after another one."""
    changes = [after for before, after in zip(["", *values], values, strict=False) if before != after]
    return len(set(changes)) < len(changes)
