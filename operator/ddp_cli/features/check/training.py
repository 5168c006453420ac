"""Judge how the ranks of a script train, from the records of its uninterrupted run. Pure.

``resume`` judges the interrupted runs.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Final, NamedTuple

from ddp_cli.features.check.data import (
    Iteration,
    LoaderKey,
    check_data,
    check_order,
    check_validation,
    identify_loaders,
    list_iterations,
)
from ddp_cli.features.check.recordings import Parameter, Process, Recording, zip_steps
from ddp_cli.features.check.verdict import (
    FAILED,
    NO_SAVE,
    NOT_APPLICABLE,
    PASSED,
    CheckVerdict,
    failed,
    list_names,
    not_applicable,
    passed,
    warned,
)
from ddp_pod.features.check.contract import (
    DATA_DRAWS,
    ERROR,
    MODEL_DRAWS,
    SCAN_STEP,
    SCRIPT_DRAWS,
    LoaderRecord,
    ModelRecord,
    RestoreRecord,
    SaveRecord,
    StepRecord,
)

_LEAST_CONSTANT: Final = 3  # batches with one loss, which are no coincidence
_GROUP_STEPS: Final = 3  # before the last of which the process group must exist
_SHOWN: Final = 3  # steps in a message
_OPTIONAL: Final = ("separate validation data", "own random numbers", "saved weights")
"""Checks of what many scripts do not do: without it they are left out."""
_DRAWS: Final = {
    MODEL_DRAWS: "in the model (dropout, noise, masks)",
    SCRIPT_DRAWS: "between data and model (noise, masks)",
    DATA_DRAWS: "for the augmentation of their data",
}
_SEED_CALLS: Final = {
    "torch": "torch.manual_seed(seed + rank)",
    "cuda": "torch.manual_seed(seed + rank)",
    "numpy": "numpy.random.seed(seed + rank)",
    "random": "random.seed(seed + rank)",
}
_SHARED_DRAWS: Final = f"{SCRIPT_DRAWS} random"
_PLACE: Final = re.compile(r"\((\S+\.py:\d+)\)")  # the launchers name the line of the script first
BUILD_LATE: Final = "build the optimizer after the model is complete, from the parameters of the model that is trained"
_PAIRING: Final = "DistributedDataParallel"  # it shares parameters and buffers by position
_COPY: Final = "copy it there: copy.deepcopy(model.state_dict()), or tensor.clone()"
_LEAVE_TOGETHER: Final = "end the loop on all ranks in the same step: all_reduce the condition"
_NO_LAUNCHER: Final = "start no launcher inside the script: ddp starts the ranks"


def judge_training(recording: Recording, world_size: int, stall: str = "") -> list[CheckVerdict]:
    """Return the verdicts on one uninterrupted run.

    ``world_size``: ranks of the job; ``stall``: why the run made no progress any more.
    """
    ranks = recording.firsts
    checks: tuple[tuple[str, Callable[[Sequence[Process], int], CheckVerdict]], ...] = (
        ("one group", _check_group),
        ("same parameters", _check_parameters),
        ("weights change", _check_change),
        ("gradients are shared", _check_gradients),
        ("different data", check_data),
        ("another order each epoch", check_order),
        ("separate validation data", check_validation),
        ("equal numbers of steps", _check_steps),
        ("one writer", _check_writers),
        ("same initial weights", _check_weights),
        ("own random numbers", _check_random),
        ("finite", _check_finite),
        ("saved weights", _check_saved),
    )
    verdicts = []
    for name, check in checks:
        verdict = check(ranks, world_size)
        if check is _check_group and verdict.state != FAILED:
            verdict = _find_launcher(recording) or verdict
        if check is _check_steps and verdict.state == PASSED and stall:
            verdict = _find_uneven_loader(ranks) or _explain_stall(ranks, stall)
        if verdict.state != NOT_APPLICABLE or name not in _OPTIONAL:
            verdicts.append(replace(verdict, check=name))
    return verdicts


def use_join(ranks: Sequence[Process]) -> bool:
    """Return whether the script handles uneven data with Join: steps with one number do not belong together."""
    return any(step.joins for process in ranks for step in process.steps)


# -- one group


def _check_group(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    if world_size == 1:
        return not_applicable("the job has one rank; use --nodes 2")
    remedy = "call torch.distributed.init_process_group() before the model is built"
    members: dict[int, int] = {}
    for process in ranks:
        step = process.steps[: _GROUP_STEPS - 1][-1]
        if not step.group_size:
            return failed(f"rank {process.rank} trains without a process group", step.place, remedy)
        if step.group_size < world_size:
            reason = f"the process group of rank {process.rank} has {step.group_size} of {world_size} ranks"
            return failed(
                reason,
                step.group_built or step.place,
                "start no launcher inside the script, and set no MASTER_ADDR, RANK or "
                "WORLD_SIZE: ddp starts the ranks and sets them",
            )
        other = members.setdefault(step.group_rank, process.rank)
        if other != process.rank:
            reason = f"ranks {other} and {process.rank} are both rank {step.group_rank} of a process group"
            place = step.group_built or step.place
            return failed(reason, place, _NO_LAUNCHER)
    if len(ranks) < world_size:
        missing = sorted(set(range(world_size)) - {process.rank for process in ranks})
        reason = f"rank {missing[0]} made no optimizer step, and rank {ranks[0].rank} did"
        return failed(reason, ranks[0].steps[0].place, "let every rank run the training loop")
    return passed(f"a process group spans all {world_size} ranks")


def _find_launcher(recording: Recording) -> CheckVerdict | None:
    """Return a failure if processes of a rank train at the same time: one group of them may have the right size."""
    for processes in recording.ranks.values():
        trained = [process for process in processes if process.steps]
        for process in trained[1:]:
            if process.start.time < trained[0].steps[-1].time:
                step = process.steps[0]
                reason = f"rank {process.rank} has started {len(trained)} processes that train at the same time"
                return failed(reason, step.group_built or step.place, _NO_LAUNCHER)
    return None


# -- same parameters


def _check_parameters(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    """Compare names by position: so DistributedDataParallel pairs the parameters and buffers of ranks."""
    if len(ranks) < 2:
        return not_applicable("fewer than two ranks train; use --nodes 2")
    first = ranks[0]
    for process in ranks[1:]:
        for model, other in zip(first.models, process.models, strict=False):
            for kind, names, others in (
                ("parameters", model.names, other.names),
                ("buffers", model.buffer_names, other.buffer_names),
            ):
                index = next((index for index, pair in enumerate(zip_longest(names, others)) if len({*pair}) > 1), None)
                if index is None:
                    continue
                is_same_set = sorted(names) == sorted(others)
                if not is_same_set and _PAIRING not in (model.wrapper, other.wrapper):
                    continue  # such as the stages of a pipeline
                problem = f"the same {kind} in different orders" if is_same_set else f"different {kind}"
                shown = [", ".join(listed[index : index + _SHOWN]) or "none" for listed in (names, others)]
                reason = (
                    f"ranks register {problem}, and gradients are shared by position: from position {index + 1} on "
                    f"rank {first.rank} has {shown[0]}, rank {process.rank} {shown[1]}"
                )
                place = _find_registration(model, names, others, index) if kind == "parameters" else model.built
                remedy = "register them in an order that all processes have: sorted(…) instead of a set"
                return failed(reason, place, remedy if is_same_set else "build the same model on all ranks")
    return passed("names and order are equal on all ranks")


def _find_registration(model: ModelRecord, names: Sequence[str], others: Sequence[str], index: int) -> str:
    """Return the line that built the outermost module whose name is another one on another rank."""
    if index >= len(names) or not model.places:
        return model.built
    parts = names[index].split(".")
    pairs = enumerate(zip(parts, "".join(others[index : index + 1]).split("."), strict=False))
    common = next((number for number, pair in pairs if len({*pair}) > 1), 0)
    return _list_built(model).get(".".join(parts[: common + 1])) or model.places[index]


# -- weights change


def _check_change(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    """Find training that changes nothing, and parameters that no optimizer steps."""
    first = ranks[0]
    steps = first.steps
    place = steps[-1].place
    if len(steps) < 2:
        return not_applicable("the run has one step; use --steps")
    if not any(rate for step in steps for rate in step.rates):
        return not_applicable(f"the learning rate is 0 in all {len(steps)} steps; use --steps")
    if _is_loss_constant(first):
        value = float.fromhex(steps[0].loss[-1])
        reason = f"the loss is {value:g} at each of {len(steps)} steps, whatever the batch: nothing is learned"
        return failed(reason, steps[-1].backward or place, "")
    trainable = [parameter for parameter, facts in first.facts.items() if facts.is_trainable and facts.initial]
    weights = [first.initial, *(first.digests(step) for step in steps)]
    constant = [item for item in trainable if len({digests.get(item, "") for digests in weights} - {""}) < 2]
    if trainable and len(constant) == len(trainable):
        reason = f"no parameter has changed in {len(steps)} steps"
        if steps[-1].foreign:
            return failed(f"{reason}: the optimizer has {steps[-1].foreign} others", place, BUILD_LATE)
        return failed(reason, place, "")
    constant_cause = _explain_constant(first, constant)
    if constant_cause is not None:
        return constant_cause
    if steps[-1].foreign:
        reason = f"an optimizer has {steps[-1].foreign} parameters that no model has which was called"
        return warned(reason, place, BUILD_LATE)
    return passed(f"{len(trainable) - len(constant)} of {len(trainable)} parameters have changed")


def _explain_constant(process: Process, constant: Sequence[Parameter]) -> CheckVerdict | None:
    """Return the failure for parameters that get gradients and never change; None: there are none."""
    step = process.steps[-1]
    cleared = [item for item in constant if item.name in step.cleared]
    if cleared:
        reason = (
            f"{list_names(item.name for item in cleared)} get gradients and never change: the script clears the "
            "gradients before the optimizer steps"
        )
        return failed(reason, step.place, "call zero_grad() after the step, or before backward")
    lost = [item for item in constant if item.name in step.unoptimized]
    if lost:
        reason = f"{list_names(item.name for item in lost)} get gradients and never change: no optimizer has them"
        return failed(reason, _find_late_build(process, lost[0]), BUILD_LATE)
    return None


def _find_late_build(process: Process, parameter: Parameter) -> str:
    """Return the line that built the outermost module of a parameter that an optimizer built before does not know."""
    model = process.models[parameter.model]
    parts = parameter.name.split(".")
    paths = (".".join(parts[:count]) for count in range(1, len(parts)))
    late = next((path for path in paths if path in model.late), "")
    return (late and _list_built(model).get(late)) or process.facts[parameter].place


def _list_built(model: ModelRecord) -> dict[str, str]:
    """Return the line that built each module of a model, by its name."""
    return dict(entry.rpartition(" ")[::2] for entry in model.modules)


def _is_loss_constant(process: Process) -> bool:
    """Return whether the loss is the same for different batches, and finite."""
    losses = {step.loss for step in process.steps}
    batches = {step.batch for step in process.steps if step.batch}
    is_finite = not any(step.not_finite for step in process.steps)
    return is_finite and len(losses) == 1 and all(losses) and len(batches) >= _LEAST_CONSTANT


# -- gradients are shared


def _check_gradients(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    if len(ranks) < 2:
        return not_applicable("fewer than two ranks train; use --nodes 2")
    if use_join(ranks):
        return not_applicable("the script handles uneven data with Join: ranks make different numbers of steps")
    first = ranks[0]
    compared = _list_compared(ranks, is_trainable=True)
    divergence = _find_divergence(ranks, compared)
    if divergence is not None:
        return divergence
    unused = _list_unused(ranks)
    if unused:
        reason = f"no gradient in {len(first.steps)} steps: {list_names(item.name for item in unused)}"
        return failed(reason, first.facts[unused[0]].place, "use it in forward(), or set requires_grad = False")
    wrappers = {model.wrapper for model in first.models if model.wrapper}
    if not compared:
        kinds = ", ".join(sorted(wrappers))
        return passed(f"{kinds} shares them") if kinds else not_applicable("every rank has parameters of its own")
    if not wrappers and not any(len({step.batch for step in steps}) > 1 for steps in zip_steps(ranks)):
        return not_applicable("the ranks read the same batches, so equal gradients prove nothing")
    return passed(f"{len(compared)} parameters are equal on all ranks after each of {len(first.steps)} steps")


def _find_divergence(ranks: Sequence[Process], compared: Sequence[Parameter]) -> CheckVerdict | None:
    """Return why equal replicas do not stay equal: other learning rates, other gradients, or a change beside them."""
    first = ranks[0]
    rates = _find_different_rates(ranks)
    split = _find_unshared_gradients(ranks, compared)
    if rates and (split is None or rates.step <= split[0]):
        return failed(rates.reason, rates.place, rates.remedy)
    if split:
        return _explain_split(ranks, *split)
    late = _find_late_gradients(ranks) or _find_unshared_shards(ranks)
    if late is not None:
        return late
    drift = _find_drift(ranks, compared)
    if drift is None:
        return None
    step, names = drift
    reason = (
        f"gradients are equal, but {list_names(item.name for item in names)} differs between ranks after step {step}: "
        "the script changes it outside of the optimizer"
    )
    return failed(reason, first.steps[step - 1].place, "change it by values that all ranks share (all_reduce)")


def _find_late_gradients(ranks: Sequence[Process]) -> CheckVerdict | None:
    """Return the failure for parameters that were frozen while the model was wrapped, and get gradients later."""
    first = ranks[0]
    split = _find_unshared_gradients(ranks, _list_compared(ranks, is_trainable=False))
    if split is None:
        return None
    step, names = split
    model = first.models[names[0].model]
    reason = f"ranks step with different gradients of {list_names(item.name for item in names)} (step {step})"
    if not model.wrapper:
        return failed(reason, first.facts[names[0]].place, "")
    reason += f": {model.wrapper} was built before they got requires_grad, and does not share them"
    return failed(reason, model.built, f"set requires_grad before {model.wrapper} wraps the model, or wrap it again")


def _find_unshared_shards(ranks: Sequence[Process]) -> CheckVerdict | None:
    """Return the failure for sharded parameters that step without the gradients of the last backward.

    Each rank has other shards, so gradients cannot be compared.
    """
    for process in ranks:
        if not any(facts.is_sharded for facts in process.facts.values()):
            continue
        step = next((step for step in process.steps if step.unsynchronized), None)
        if step is not None:
            reason = f"the last backward before step {step.step} has not shared its gradients with the other shards"
            remedy = "call set_requires_gradient_sync(True) for the last micro-batch before optimizer.step()"
            return failed(reason, step.backward, remedy)
    return None


def _explain_split(ranks: Sequence[Process], step: int, names: Sequence[Parameter]) -> CheckVerdict:
    """Return the failure for gradients that differ. A remedy is named only if the cause is known."""
    first = ranks[0]
    facts = first.facts[names[0]]
    model = first.models[names[0].model]
    reason = f"ranks step with different gradients of {list_names(item.name for item in names)} (step {step})"
    if any(process.steps[step - 1].unsynchronized for process in ranks):
        reason += f": the last backward before the step has not shared them, as in {model.wrapper}.no_sync()"
        remedy = "leave no_sync() for the last micro-batch before optimizer.step()"
        return failed(reason, first.steps[step - 1].backward, remedy)
    if names[0].name in model.unshared:
        reason += f": {_PAIRING} was built before them, and does not share them"
        return failed(reason, facts.place, f"replace modules before {_PAIRING} wraps the model, or wrap it again")
    if model.wrapper:
        reason += f", although {model.wrapper} wraps the model: they are changed between backward and step"
        return failed(reason, first.steps[step - 1].place, "")
    if model.bypassed:
        reason += f": the module is called without the DistributedDataParallel of {model.bypassed}, which shares them"
        return failed(reason, model.place, "call the wrapped model, as model(batch), not its module or methods of it")
    if model.loose:
        return failed(reason, model.place, "average the gradients over the ranks before the step (all_reduce)")
    is_wrapped = all(other.wrapper for other in first.models)
    built = facts.place if is_wrapped else model.built
    return failed(reason, built, "wrap the model: model = DistributedDataParallel(model)")


class _Rates(NamedTuple):
    """Learning rates that differ between ranks from a step on."""

    step: int
    reason: str
    place: str
    remedy: str


def _find_different_rates(ranks: Sequence[Process]) -> _Rates | None:
    for steps in zip_steps(ranks):
        first = steps[0]
        for rank, step in zip((process.rank for process in ranks), steps, strict=True):
            pair = next((pair for pair in zip(first.rates, step.rates, strict=False) if pair[0] != pair[1]), None)
            if pair is None:
                continue
            reason = (
                f"the learning rate differs between ranks from step {first.step} on (rank {ranks[0].rank}: "
                f"{pair[0]:g}, rank {rank}: {pair[1]:g})"
            )
            place, remedy = _explain_rates(steps)
            return _Rates(first.step, reason, place, remedy)
    return None


def _explain_rates(steps: Sequence[StepRecord]) -> tuple[str, str]:
    """Return the line that sets the learning rates of a step that differ between ranks, and what to change there."""
    first = steps[0]
    if first.step == 1:
        return first.optimizer or first.place, "give the optimizer the same learning rate on all ranks"
    scheduled = next((step.scheduled for step in steps if step.scheduled), "")
    if not scheduled:
        return first.place, ""
    if any(step.measured for step in steps):
        return scheduled, "give the scheduler the same metric on all ranks: all_reduce it before scheduler.step()"
    return scheduled, "call scheduler.step() equally often on all ranks"


def _list_compared(ranks: Sequence[Process], *, is_trainable: bool) -> list[Parameter]:
    """Return the parameters that must be equal on all ranks: those of which each rank has the whole."""
    common = set.intersection(*(set(process.facts) for process in ranks))
    first = ranks[0]
    return [
        parameter
        for parameter, facts in first.facts.items()
        if parameter in common and facts.is_trainable == is_trainable and not facts.is_sharded
    ]


def _find_unshared_gradients(
    ranks: Sequence[Process], compared: Sequence[Parameter]
) -> tuple[int, list[Parameter]] | None:
    """Return the first step with different gradients, and the parameters; None if the weights agree later again."""
    found = None
    for steps in zip_steps(ranks):
        gradients = [process.gradients(step) for process, step in zip(ranks, steps, strict=True)]
        names = _list_different(gradients, compared)
        if names and found is None:
            found = (steps[0].step, names)
        weights = [process.digests(step) for process, step in zip(ranks, steps, strict=True)]
        if found and not _list_different(weights, found[1]):
            found = None  # the script averages weights instead of gradients
    return found


def _find_drift(ranks: Sequence[Process], compared: Sequence[Parameter]) -> tuple[int, list[Parameter]] | None:
    """Return the first step after which parameters differ that were equal before."""
    equal = set(compared) - set(_list_different([process.initial for process in ranks], compared))
    for steps in zip_steps(ranks):
        weights = [process.digests(step) for process, step in zip(ranks, steps, strict=True)]
        names = [parameter for parameter in _list_different(weights, compared) if parameter in equal]
        if names:
            return steps[0].step, names
    return None


def _list_different(values: Sequence[dict[Parameter, str]], compared: Iterable[Parameter]) -> list[Parameter]:
    return [parameter for parameter in compared if len({digests.get(parameter, "") for digests in values}) > 1]


def _list_unused(ranks: Sequence[Process]) -> list[Parameter]:
    """Return the parameters that need a gradient and had none, on any rank."""
    last = [process.steps[-1] for process in ranks]
    unused = {name for step in last for name in step.without_gradient} - {
        name for step in last for name in step.cleared
    }
    first = ranks[0]
    trainable = [parameter for parameter, facts in first.facts.items() if facts.is_trainable]
    if any(model.loose for model in first.models):
        trainable = [parameter for parameter in trainable if first.models[parameter.model].loose]
    found = [parameter for parameter in trainable if parameter.name in unused]
    return [] if len(found) == len(trainable) else found  # no gradient is visible at all, as with flat parameters


# -- equal numbers of steps


def _check_steps(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    if world_size < 2:
        return not_applicable("the job has one rank; use --nodes 2")
    if use_join(ranks):
        return not_applicable("the script handles uneven data with Join")
    uneven = _find_uneven_epochs(ranks)
    if uneven:
        return _find_uneven_loader(ranks) or uneven
    counts = {process.rank: len(process.steps) for process in ranks}
    fewest = min(counts, key=lambda rank: counts[rank])
    most = max(counts, key=lambda rank: counts[rank])
    is_whole = all(process.end is not None for process in ranks)
    if counts[most] - counts[fewest] > (0 if is_whole else 1):
        if loader := _find_uneven_loader(ranks):
            return loader
        place = next(process.steps[-1].place for process in ranks if process.rank == most)
        reason = f"rank {most} made {counts[most]} steps, rank {fewest} {counts[fewest]}"
        return failed(reason, place, "give all ranks equally many batches, or use Join")
    early = _find_early_end(ranks)
    if early:
        return _find_uneven_loader(ranks) or early
    return passed(f"{counts[fewest]} steps on each rank")


def _find_early_end(ranks: Sequence[Process]) -> CheckVerdict | None:
    """Return a failure if a rank ends with exit code 0, and another one reads more batches and fails without it."""
    for process in ranks:
        for peer in ranks:
            has_failed = peer.end is not None and peer.end.reason == ERROR
            if process.ended_itself and has_failed and len(peer.batches) > len(process.batches):
                reason = (
                    f"rank {process.rank} left the loop after {len(process.steps)} steps, and rank {peer.rank} failed "
                    "at its next batch"
                )
                return failed(reason, process.steps[-1].place, _LEAVE_TOGETHER)
    return None


def _find_uneven_epochs(ranks: Sequence[Process]) -> CheckVerdict | None:
    """Return a failure if ranks leave an epoch after different numbers of steps. The last one may be cut."""
    epochs: dict[tuple[LoaderKey, int], dict[int, Iteration]] = defaultdict(dict)
    for process in ranks:
        keys = identify_loaders(process)
        turns = Counter(key.built for key in keys.values())
        for iterations in list_iterations(process):
            key = keys[iterations[0].record.loader]
            is_followed = key.turn + 1 < turns[key.built]  # by the DataLoader that the script builds for the next epoch
            for iteration in iterations if is_followed else iterations[:-1]:
                if iteration.steps:
                    epochs[key, iteration.record.iteration][process.rank] = iteration
    for (key, iteration_number), members in sorted(epochs.items()):
        fewest = min(members, key=lambda rank: members[rank].steps)
        most = max(members, key=lambda rank: members[rank].steps)
        if len(members) == len(ranks) and members[fewest].steps != members[most].steps:
            number = max(key.turn + 1, iteration_number)
            reason = (
                f"rank {fewest} leaves epoch {number} after {members[fewest].steps} steps, rank {most} after "
                f"{members[most].steps}: from there on they pair gradients of different epochs"
            )
            remedy = "end an epoch on all ranks in the same step: all_reduce the condition"
            return failed(reason, members[fewest].record.place, remedy)
    return None


def _explain_stall(ranks: Sequence[Process], stall: str) -> CheckVerdict:
    """Return the failure of a run whose ranks wait for each other."""
    left = [process for process in ranks if process.ended_itself]
    if left and len(left) < len(ranks):
        reason = f"rank {left[0].rank} left the loop after {len(left[0].steps)} steps, and others wait for it"
        return failed(reason, left[0].steps[-1].place, _LEAVE_TOGETHER)
    place = _PLACE.search(stall)
    line = ranks[0].steps[-1].place if place is None else place[1]
    return failed(f"the ranks stopped after {len(ranks[0].steps)} steps: {stall}", line, "")


def _find_uneven_loader(ranks: Sequence[Process]) -> CheckVerdict | None:
    """Return the failure that explains other numbers of steps by the lengths of DataLoaders; None if these are equal.

    Lengths alone are none: the script may end an epoch on all ranks at once.
    """
    lengths: dict[LoaderKey, dict[int, LoaderRecord]] = defaultdict(dict)
    for process in ranks:
        keys = identify_loaders(process)
        trains = {number for step in process.steps for number in step.loaders}
        for _, record in process.loaders:
            if record.batches is not None and record.loader in trains:
                lengths[keys[record.loader]].setdefault(process.rank, record)
    for records in lengths.values():
        longest = max(records, key=lambda rank: records[rank].batches or 0)
        shortest = min(records, key=lambda rank: records[rank].batches or 0)
        if records[longest].batches != records[shortest].batches:
            reason = (
                f"rank {longest} has {records[longest].batches} batches per epoch, rank {shortest} "
                f"{records[shortest].batches}: ranks that have more wait forever"
            )
            remedy = "use DistributedSampler, drop the rest, or wrap the loop in Join"
            return failed(reason, records[longest].built, remedy)
    return None


# -- one writer


def _check_writers(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    writers: dict[str, dict[int, str]] = defaultdict(dict)
    for process in ranks:
        for save in process.saves:
            writers[save.path].setdefault(process.rank, save.place)
    if not writers:
        return not_applicable(NO_SAVE)
    for path, places in writers.items():
        if len(places) > 1:
            first, second = sorted(places)[:2]
            reason = f"ranks {first} and {second} both write {path.rpartition('/')[2]}"
            return failed(reason, places[first], "save on rank 0 only: if torch.distributed.get_rank() == 0")
    return passed(f"{len(writers)} files, each written by one rank")


# -- same initial weights


def _check_weights(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    if len(ranks) < 2:
        return not_applicable("fewer than two ranks train; use --nodes 2")
    first = ranks[0]
    trainable = _list_compared(ranks, is_trainable=True)
    frozen = _list_compared(ranks, is_trainable=False)
    different = _list_different([process.initial for process in ranks], [*trainable, *frozen])
    if different:
        is_frozen = not first.facts[different[0]].is_trainable
        reason = f"ranks begin with different {list_names(item.name for item in different)}"
        model = first.models[different[0].model]
        remedy = "wrap the model in DistributedDataParallel, or call torch.manual_seed() before it is built"
        if model.wrapper == _PAIRING:
            remedy = "change weights before DistributedDataParallel wraps the model: it makes the ranks equal once"
        place = first.facts[different[0]].place if is_frozen else model.built
        return failed(reason, place, remedy)
    copies = _find_different_copies(ranks)
    if copies is not None:
        return copies
    drift = _find_drift(ranks, frozen)
    if drift:
        step, names = drift
        reason = f"the frozen {list_names(item.name for item in names)} differs between ranks after step {step}"
        return failed(reason, first.facts[names[0]].place, "change it by values that all ranks share")
    buffers = None if use_join(ranks) else _find_different_buffers(ranks)
    if buffers:
        reason = f"the buffer {buffers[1]} differs between ranks at step {buffers[0]}"
        is_wrapped = any(model.wrapper == _PAIRING for model in first.models)
        remedy = "leave broadcast_buffers of DistributedDataParallel on, or use SyncBatchNorm"
        remedy = remedy if is_wrapped else "broadcast or average the buffers before the save"
        return failed(reason, first.models[0].built, remedy)
    if not trainable and not frozen:
        return not_applicable("every rank has parameters of its own")
    return passed(f"{len(trainable) + len(frozen)} parameters are equal")


def _find_different_copies(ranks: Sequence[Process]) -> CheckVerdict | None:
    """Return a failure for a module of a model's shapes beside it whose weights differ between ranks."""
    steps = next((steps for steps in zip_steps(ranks) if steps[0].step == SCAN_STEP), ())
    copies = [dict(entry.rsplit(":", 1) for entry in step.copies if ":" in entry) for step in steps]
    for name in set.intersection(*map(set, copies)) if copies else ():
        if len({values[name] for values in copies}) > 1:
            place, _, kind = name.rpartition(" ")
            reason = f"ranks use different weights of a {kind} beside the model, which has the shapes of the model"
            remedy = (
                "copy the model after DistributedDataParallel has made its weights equal, or seed all ranks equally"
            )
            return failed(reason, place, remedy)
    return None


def _find_different_buffers(ranks: Sequence[Process]) -> tuple[int, str] | None:
    """Return a step right after a save at which buffers differ, and a buffer.

    In an epoch each rank may have its own: training does not read the statistics of BatchNorm.
    """
    saved = {save.step for process in ranks for save in process.saves}
    for steps in zip_steps(ranks):
        if steps[0].step - 1 not in saved:
            continue
        for index, name in enumerate(ranks[0].buffers):
            values = [step.buffers[index] for step in steps if index < len(step.buffers)]
            if len(values) == len(ranks) and len(set(values)) > 1:
                return steps[0].step, name
    return None


# -- own random numbers


def _check_random(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    """Compare what ranks draw at most steps. Python's own generator may decide what all ranks do."""
    if len(ranks) < 2:
        return not_applicable("fewer than two ranks train; use --nodes 2")
    drawn: dict[str, list[set[str]]] = defaultdict(list)
    total = 0
    for steps in zip_steps(ranks):
        total += 1
        draws = [dict(entry.split("=") for entry in step.draws if "=" in entry) for step in steps]
        for key in set.intersection(*(set(states) for states in draws)):
            drawn[key].append({states[key] for states in draws})
    usual = {key: states for key, states in drawn.items() if 2 * len(states) > total and key != _SHARED_DRAWS}
    for source, kinds in _DRAWS.items():
        for generator, call in _SEED_CALLS.items():
            states = usual.get(f"{source} {generator}", [])
            if states and all(len(digests) == 1 for digests in states):
                return warned(
                    f"all ranks draw the same random numbers {kinds} at each of {len(states)} steps",
                    ranks[0].models[0].place,
                    f"after the model is built, seed by rank: {call}",
                )
    return passed("the random states of ranks differ") if usual else not_applicable("nothing draws random numbers")


# -- saved weights


def _check_saved(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    saves = [save for process in ranks for save in process.saves]
    for save in saves:
        if save.taken is not None:
            name = save.path.rpartition("/")[2]
            reason = (
                f"{name}, saved after step {save.step}, has the weights of that step, not those of step {save.taken} "
                f"{_describe_references(save)}"
            )
            return failed(reason, save.taken_place or save.place, _COPY)
    for restore in (restore for process in ranks for restore in process.restores):
        reason = (
            f"load_state_dict() at {restore.place}, after step {restore.step}, changes nothing: it gets the weights of "
            f"that step, not those of step {restore.taken} {_describe_references(restore)}"
        )
        return failed(reason, restore.taken_place or restore.place, _COPY)
    if not saves:
        return not_applicable(NO_SAVE)
    return passed("files have the weights of the step that saved them")


def _describe_references(record: SaveRecord | RestoreRecord) -> str:
    if record.taken_name:
        return f"where {record.taken_name} was set: it has references"
    return "where they were taken: state_dict() returns references, and a shallow copy has them"


# -- finite


def _check_finite(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    skipped = max((process.steps[-1].skipped for process in ranks), default=0)
    for process in ranks:
        for step in process.steps:
            if step.not_finite:
                reason = f"{step.not_finite} at step {step.step} of rank {process.rank}"
                return failed(
                    reason, step.backward or step.place, "lower the learning rate, clip gradients, or skip such a batch"
                )
    suffix = f"; a GradScaler skipped {skipped} steps" if skipped else ""
    return passed(f"losses and gradients of {len(ranks[0].steps)} steps{suffix}")
