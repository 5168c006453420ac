"""Judge how the ranks of a script train, from the records of its uninterrupted run. Pure.

``resume`` judges the interrupted runs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Final

from ddp_cli.features.check.recordings import Parameter, Process, Recording
from ddp_cli.features.check.verdict import FAILED, CheckVerdict, failed, list_names, not_applicable, passed
from ddp_pod.features.check.contract import LoaderRecord, StepRecord

_GROUP_STEPS: Final = 3  # before the last of which the process group must exist
_SHOWN: Final = 3  # steps in a message
_NO_LAUNCHER: Final = "start no launcher inside the script: ddp starts the ranks"


def judge_training(recording: Recording, world_size: int) -> list[CheckVerdict]:
    """Return the verdicts on one run that nobody interrupted. ``world_size``: ranks of the job."""
    ranks = recording.firsts
    checks: tuple[tuple[str, Callable[[Sequence[Process], int], CheckVerdict]], ...] = (
        ("one group", _check_group),
        ("gradients are shared", _check_gradients),
        ("different data", _check_data),
        ("another order each epoch", _check_order),
        ("equal numbers of steps", _check_steps),
        ("one writer", _check_writers),
        ("same initial weights", _check_weights),
        ("finite", _check_finite),
    )
    verdicts = []
    for name, check in checks:
        verdict = check(ranks, world_size)
        if check is _check_group and verdict.state != FAILED:
            verdict = _find_launcher(recording) or verdict
        verdicts.append(replace(verdict, check=name))
    return verdicts


def _zip_steps(ranks: Sequence[Process]) -> Iterator[tuple[StepRecord, ...]]:
    """Yield the records of each step that all ranks have made."""
    yield from zip(*(process.steps for process in ranks), strict=False)


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


# -- gradients are shared


def _check_gradients(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    if len(ranks) < 2:
        return not_applicable("fewer than two ranks train")
    if use_join(ranks):
        return not_applicable("the script handles uneven data with Join: ranks make different numbers of steps")
    first = ranks[0]
    compared = _list_compared(ranks, is_trainable=True)
    split = _find_unshared_gradients(ranks, compared)
    if split:
        step, names = split
        facts = first.facts[names[0]]
        is_wrapped = all(model.wrapper for model in first.models)
        built = facts.place if is_wrapped else first.models[names[0].model].built
        reason = f"ranks step with different gradients of {list_names(item.name for item in names)} (step {step})"
        return failed(reason, built, "wrap the model: model = DistributedDataParallel(model)")
    drift = _find_drift(ranks, compared)
    if drift:
        step, names = drift
        reason = (
            f"gradients are equal, but {list_names(item.name for item in names)} differs between ranks after step "
            f"{step}: the script changes it outside of the optimizer"
        )
        return failed(reason, first.steps[step - 1].place, "change it by values that all ranks share (all_reduce)")
    unused = _list_unused(ranks)
    if unused:
        reason = f"no gradient in {len(first.steps)} steps: {list_names(item.name for item in unused)}"
        return failed(reason, first.facts[unused[0]].place, "use it in forward(), or set requires_grad = False")
    wrappers = {model.wrapper for model in first.models if model.wrapper}
    if not compared:
        kinds = ", ".join(sorted(wrappers))
        return passed(f"{kinds} shares them") if kinds else not_applicable("every rank has parameters of its own")
    if not wrappers and not any(len({step.batch for step in steps}) > 1 for steps in _zip_steps(ranks)):
        return not_applicable("the ranks read the same batches, so equal gradients prove nothing")
    return passed(f"{len(compared)} parameters are equal on all ranks after each of {len(first.steps)} steps")


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
    for steps in _zip_steps(ranks):
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
    for steps in _zip_steps(ranks):
        weights = [process.digests(step) for process, step in zip(ranks, steps, strict=True)]
        names = [parameter for parameter in _list_different(weights, compared) if parameter in equal]
        if names:
            return steps[0].step, names
    return None


def _list_different(values: Sequence[dict[Parameter, str]], compared: Iterable[Parameter]) -> list[Parameter]:
    return [parameter for parameter in compared if len({digests.get(parameter, "") for digests in values}) > 1]


def _list_unused(ranks: Sequence[Process]) -> list[Parameter]:
    """Return the parameters that need a gradient and had none, on any rank."""
    unused = {name for process in ranks for name in process.steps[-1].without_gradient}
    first = ranks[0]
    trainable = [parameter for parameter, facts in first.facts.items() if facts.is_trainable]
    found = [parameter for parameter in trainable if parameter.name in unused]
    return [] if len(found) == len(trainable) else found  # no gradient is visible at all, as with flat parameters


# -- different data


def _check_data(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    if len(ranks) < 2:
        return not_applicable("fewer than two ranks train")
    first = ranks[0]
    shared = [model.shared for process in ranks for model in process.models if model.shared]
    if shared:
        return not_applicable(f"ranks of the mesh dimension {shared[0]} may read the same data")

    same = []
    are_samples_same = True
    seen = 0
    for steps in _zip_steps(ranks):
        batches = [step.batch for step in steps]
        seen += all(batches)
        if all(batches) and len(set(batches)) < len(batches):
            same.append(steps[0].step)
            are_samples_same &= len({step.indices for step in steps}) < len(steps)
    if not seen:
        return not_applicable("no tensor was passed to a model")
    if not same:
        return passed(f"the batches of {len(ranks)} ranks differ in each of {seen} steps")
    loader = _find_training_loader(first)
    place = first.models[0].place
    if loader is not None and are_samples_same:
        place = loader.sampler_built or loader.built
    when = "at every step" if len(same) == seen else f"at step {', '.join(map(str, same[:_SHOWN]))} of {seen}"
    return failed(
        f"ranks get the same batch {when}",
        place,
        "give each rank its part of the data: DataLoader(…, sampler=DistributedSampler(dataset))",
    )


def _find_training_loader(process: Process) -> LoaderRecord | None:
    """Return the DataLoader that delivers for most steps."""
    counts: dict[int, int] = defaultdict(int)
    for step in process.steps:
        for number in set(step.loaders):
            counts[number] += 1
    best = max(counts, key=lambda number: counts[number], default=None)
    return next((record for _, record in process.loaders if record.loader == best), None)


# -- another order each epoch


def _check_order(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    epochs = 0
    for process in ranks:
        for iterations in _group_iterations(process):
            trained = [record for record, steps in iterations if record.shuffles and steps]
            epochs = max(epochs, len(trained))
            for before, after in pairwise(trained):
                if before.epoch == after.epoch:
                    return failed(
                        f"the DistributedSampler is iterated twice with epoch {after.epoch}: the same order again",
                        after.place,
                        "call sampler.set_epoch(epoch) before this line",
                    )
    if epochs < 2:
        return not_applicable("no DistributedSampler that shuffles was iterated twice")
    return passed(f"{epochs} epochs with different numbers")


def _group_iterations(process: Process) -> Iterator[list[tuple[LoaderRecord, int]]]:
    """Yield for each DataLoader its iterations, each with the number of steps that used it.

    A loader for validation delivers before at most one step: its last batch comes before the next step.
    """
    ordered = sorted(process.loaders, key=lambda item: (item[1].loader, item[1].iteration))
    numbers = {number for step in process.steps for number in step.loaders}
    for loader, group in groupby(ordered, key=lambda item: item[1].loader):
        begins = list(group)
        ends = [begin for begin, _ in begins[1:]] + [len(process.steps)]
        iterations = []
        for (begin, record), end in zip(begins, ends, strict=True):
            steps = sum(loader in step.loaders for step in process.steps[begin:end])
            iterations.append((record, steps if steps > 1 or numbers == {loader} else 0))
        yield iterations


# -- equal numbers of steps


def _check_steps(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    if world_size < 2:
        return not_applicable("the job has one rank; use --nodes 2")
    if use_join(ranks):
        return not_applicable("the script handles uneven data with Join")
    uneven = _find_uneven_loader(ranks)
    if uneven:
        return uneven
    counts = {process.rank: len(process.steps) for process in ranks}
    fewest = min(counts, key=lambda rank: counts[rank])
    most = max(counts, key=lambda rank: counts[rank])
    is_whole = all(process.end is not None for process in ranks)
    if counts[most] - counts[fewest] > (0 if is_whole else 1):
        place = next(process.steps[-1].place for process in ranks if process.rank == most)
        reason = f"rank {most} made {counts[most]} steps, rank {fewest} {counts[fewest]}"
        return failed(reason, place, "give all ranks equally many batches, or use Join")
    return passed(f"{counts[fewest]} steps on each rank")


def _find_uneven_loader(ranks: Sequence[Process]) -> CheckVerdict | None:
    trains = {number for process in ranks for step in process.steps for number in step.loaders}
    lengths: dict[int, dict[int, LoaderRecord]] = defaultdict(dict)
    for process in ranks:
        for _, record in process.loaders:
            if record.batches is not None and record.loader in trains:
                lengths[record.loader].setdefault(process.rank, record)
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
        return not_applicable("no checkpoint was written")
    for path, places in writers.items():
        if len(places) > 1:
            first, second = sorted(places)[:2]
            reason = f"ranks {first} and {second} both write {path.rpartition('/')[2]}"
            return failed(reason, places[first], "save on rank 0 only: if torch.distributed.get_rank() == 0")
    return passed(f"{len(writers)} files, each written by one rank")


# -- same initial weights


def _check_weights(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    if len(ranks) < 2:
        return not_applicable("fewer than two ranks train")
    first = ranks[0]
    trainable = _list_compared(ranks, is_trainable=True)
    frozen = _list_compared(ranks, is_trainable=False)
    different = _list_different([process.initial for process in ranks], [*trainable, *frozen])
    if different:
        is_frozen = not first.facts[different[0]].is_trainable
        reason = f"ranks begin with different {list_names(item.name for item in different)}"
        remedy = "wrap the model in DistributedDataParallel, or call torch.manual_seed() before it is built"
        place = first.facts[different[0]].place if is_frozen else first.models[different[0].model].built
        return failed(reason, place, remedy)
    drift = _find_drift(ranks, frozen)
    if drift:
        step, names = drift
        reason = f"the frozen {list_names(item.name for item in names)} differs between ranks after step {step}"
        return failed(reason, first.facts[names[0]].place, "change it by values that all ranks share")
    buffers = None if use_join(ranks) else _find_different_buffers(ranks)
    if buffers:
        reason = f"the buffer {buffers[1]} differs between ranks at step {buffers[0]}"
        remedy = "leave broadcast_buffers of DistributedDataParallel on, or use SyncBatchNorm"
        return failed(reason, first.models[0].built, remedy)
    if not trainable and not frozen:
        return not_applicable("every rank has parameters of its own")
    return passed(f"{len(trainable) + len(frozen)} parameters are equal")


def _find_different_buffers(ranks: Sequence[Process]) -> tuple[int, str] | None:
    """Return a step right after a save at which buffers differ, and a buffer.

    In an epoch each rank may have its own: training does not read the statistics of BatchNorm.
    """
    saved = {save.step for process in ranks for save in process.saves}
    for steps in _zip_steps(ranks):
        if steps[0].step - 1 not in saved:
            continue
        for index, name in enumerate(ranks[0].buffers):
            values = [step.buffers[index] for step in steps if index < len(step.buffers)]
            if len(values) == len(ranks) and len(set(values)) > 1:
                return steps[0].step, name
    return None


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
