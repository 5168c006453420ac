"""Judge which data the ranks train on, from the batches that DataLoaders deliver and models get. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, groupby, pairwise
from typing import Final, NamedTuple

from ddp_cli.features.check.recordings import Process, zip_steps
from ddp_cli.features.check.verdict import FAILED, CheckVerdict, failed, not_applicable, passed, warned
from ddp_pod.features.check.contract import BatchRecord, LoaderRecord

_SHOWN: Final = 3  # steps in a message
_SEQUENTIAL: Final = 1  # descents of the indices in an epoch without shuffling: a sampler fills up its last batch
_LEAST_SHARED: Final = 3  # samples, which are more than a coincidence
_OVERLAP: Final = 0.25  # of the samples of a validation
_SHARED: Final = 0.1  # of the samples of an epoch that two ranks read; fewer may be equal by chance
_REPEATED: Final = 0.5  # of the samples of an epoch


class LoaderKey(NamedTuple):
    """What a DataLoader of one rank has in common with that of another: its line, and how often that has built one.

    Their numbers differ if one rank builds more, such as one for a validation.
    """

    built: str
    turn: int


def identify_loaders(process: Process) -> dict[int, LoaderKey]:
    """Return the key of each DataLoader of a process, by its number."""
    built = {record.loader: record.built for _, record in process.loaders}
    keys: dict[int, LoaderKey] = {}
    for number in sorted(built):
        turn = sum(key.built == built[number] for key in keys.values())
        keys[number] = LoaderKey(built[number], turn)
    return keys


class Iteration(NamedTuple):
    """An iteration of a DataLoader. ``steps``: those that it delivered for; 0: not for training."""

    record: LoaderRecord
    steps: int
    batches: Sequence[BatchRecord]

    @property
    def order(self) -> tuple[str, ...]:
        """What identifies the batches: indices, which a random augmentation does not change, else the contents."""
        indices = tuple(batch.indices for batch in self.batches)
        return indices if all(indices) else tuple(batch.content for batch in self.batches)

    @property
    def has_indices(self) -> bool:
        """Whether the samples have indices: those of an IterableDataset have none."""
        return any(batch.indices for batch in self.batches)

    @property
    def is_shuffled(self) -> bool:
        """Whether the indices are not in ascending order."""
        return sum(batch.descents for batch in self.batches) > _SEQUENTIAL


def list_iterations(process: Process) -> Iterator[list[Iteration]]:
    """Yield for each DataLoader its iterations.

    A loader for validation delivers before at most one step: its last batch comes before the next step, with a batch of
    the loader for training.
    """
    ordered = sorted(process.loaders, key=lambda item: (item[1].loader, item[1].iteration))
    alone = {step.loaders[0] for step in process.steps if len({*step.loaders}) == 1}
    delivered: dict[tuple[int, int], list[BatchRecord]] = defaultdict(list)
    for batch in process.batches:
        delivered[batch.loader, batch.iteration].append(batch)
    for loader, group in groupby(ordered, key=lambda item: item[1].loader):
        begins = list(group)
        ends = [begin for begin, _ in begins[1:]] + [len(process.steps)]
        iterations = []
        for (begin, record), end in zip(begins, ends, strict=True):
            steps = sum(loader in step.loaders for step in process.steps[begin:end])
            trains = steps > 1 or loader in alone
            iterations.append(Iteration(record, steps if trains else 0, delivered[loader, record.iteration]))
        yield iterations


# -- different data


def check_data(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    """Compare the batches of ranks at each step, and those of an epoch on a rank."""
    twice = next((verdict for process in ranks if (verdict := _find_repeated_batches(process))), None)
    if len(ranks) < 2:
        return twice or not_applicable("fewer than two ranks train; use --nodes 2")
    first = ranks[0]
    shared = [model.shared for process in ranks for model in process.models if model.shared]
    if shared:
        return twice or not_applicable(f"ranks of the mesh dimension {shared[0]} may read the same data")

    same = []
    are_samples_same = True
    seen = 0
    for steps in zip_steps(ranks):
        batches = [step.batch for step in steps]
        seen += all(batches)
        if all(batches) and len(set(batches)) < len(batches):
            same.append(steps[0].step)
            are_samples_same &= len({step.indices for step in steps}) < len(steps)
    if not seen:
        return twice or not_applicable("no tensor was passed to a model")
    if not same:
        overlap = twice or _find_overlap(ranks)
        return overlap or passed(f"the batches of {len(ranks)} ranks differ in each of {seen} steps")
    loader = _find_training_loader(first)
    place = first.models[0].place
    if loader is not None and are_samples_same:
        place = loader.sampler_built or loader.built
    when = "at every step" if len(same) == seen else f"at step {', '.join(map(str, same[:_SHOWN]))} of {seen}"
    has_indices = any(step.indices for step in first.steps)
    return failed(f"ranks get the same batch {when}", place, _find_share(loader, has_indices=has_indices))


def _find_share(loader: LoaderRecord | None, *, has_indices: bool) -> str:
    """Return how to give each rank its part of the data. ``loader``: the one of the training; None: there is none."""
    if loader is None:
        return "draw other samples on each rank: seed by seed + rank, or take every N-th sample"
    if not has_indices:
        return "give each rank its part of the data: every N-th sample or shard, by torch.distributed.get_rank()"
    return "give each rank its part of the data: DataLoader(…, sampler=DistributedSampler(dataset))"


def _find_repeated_batches(process: Process) -> CheckVerdict | None:
    """Return a failure for samples that an epoch delivers twice to one rank."""
    for iterations in list_iterations(process):
        for iteration in iterations:
            order = [item for item in iteration.order if item]
            if not iteration.steps or len(set(order)) < 2:
                continue  # equal batches throughout are those of a benchmark
            numbers = [number for number, item in enumerate(order, 1) if item in order[: number - 1]]
            record = iteration.record
            workers = f": its {record.workers} workers deliver the same" if record.workers > 1 else ""
            remedy = "split the samples by torch.utils.data.get_worker_info() too" if record.workers > 1 else ""
            if numbers:
                before = order.index(order[numbers[0] - 1]) + 1
                reason = f"rank {process.rank} gets batch {before} of an epoch again as batch {numbers[0]}{workers}"
                return failed(reason, record.built, "" if iteration.has_indices else remedy)
            samples = Counter(sample for batch in iteration.batches for sample in batch.samples)
            repeated = sum(count for count in samples.values() if count > 1)
            if record.workers > 1 and not iteration.has_indices and repeated > _REPEATED * samples.total():
                reason = f"rank {process.rank} gets {repeated} of {samples.total()} samples of an epoch twice{workers}"
                return failed(reason, record.built, remedy)
    return None


def _find_overlap(ranks: Sequence[Process]) -> CheckVerdict | None:
    """Return a warning for samples of an epoch that two ranks train on, as if each shuffled all of the data.

    The last batch does not count: samplers fill it up. Nor does an epoch in which a rank itself draws samples twice.
    """
    epochs: dict[tuple[int, int], list[tuple[int, LoaderRecord, list[str]]]] = defaultdict(list)
    for process in ranks:
        for iterations in list_iterations(process):
            for iteration in iterations:
                samples = [sample for batch in iteration.batches[:-1] for sample in batch.samples]
                if iteration.steps and samples and len(set(samples)) == len(samples):
                    key = (iteration.record.loader, iteration.record.iteration)
                    epochs[key].append((process.rank, iteration.record, samples))
    for readers in epochs.values():
        for (rank, record, samples), (other, _, others) in combinations(readers, 2):
            shared = len({*samples} & {*others})
            if shared >= max(_LEAST_SHARED, _SHARED * min(len(samples), len(others))):
                reason = (
                    f"ranks {rank} and {other} both train on {shared} of {len(samples)} samples of epoch "
                    f"{record.iteration}, as if each shuffled all of the data"
                )
                remedy = "give each rank its own part of one order: the same seed on all ranks, then every N-th sample"
                return warned(reason, record.sampler_built or record.built, remedy)
    return None


def _find_training_loader(process: Process) -> LoaderRecord | None:
    """Return the DataLoader that delivers for most steps."""
    counts: dict[int, int] = defaultdict(int)
    for step in process.steps:
        for number in set(step.loaders):
            counts[number] += 1
    best = max(counts, key=lambda number: counts[number], default=None)
    return next((record for _, record in process.loaders if record.loader == best), None)


# -- another order each epoch


def check_order(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    """Compare the batches of epochs. Without shuffling, an equal order is what the script asks for."""
    epochs = 0
    is_sequential = False
    warning = None
    failures: dict[int, CheckVerdict] = {}
    for process in ranks:
        cycled = _find_cycle(process)
        if cycled is not None:
            return cycled
        for trained in _list_epochs(process):
            epochs = max(epochs, len(trained))
            for number, (before, after) in enumerate(pairwise(trained), 1):
                if not _have_same_order(before, after):
                    continue
                verdict = _explain_order(before, after, number)
                if verdict is not None and verdict.state == FAILED:
                    failures.setdefault(process.rank, verdict)
                    continue
                warning = warning or verdict
                is_sequential = True
    if failures:
        rank, verdict = next(iter(failures.items()))
        reason = verdict.reason if len(failures) == len(ranks) else f"on rank {rank} alone {verdict.reason}"
        return replace(verdict, reason=reason)
    if epochs < 2:
        return not_applicable("no DataLoader was iterated twice for training; use --steps")
    if warning is not None:
        return warning
    if is_sequential:
        return not_applicable("each epoch has the same order, and nothing shuffles")
    return passed(f"{epochs} epochs with different orders")


def _find_cycle(process: Process) -> CheckVerdict | None:
    """Return the failure for steps with batches that an ``itertools.cycle`` has kept; None: there are none."""
    step = next((step.step for step in process.steps if step.cycled), None)
    records = [record for begin, record in process.loaders if step is not None and begin < step]
    if not records:
        return None
    reason = f"from step {step} on the same batches come in the same order: itertools.cycle has kept those of one epoch"
    remedy = "iterate the DataLoader in a loop: for epoch in itertools.count(): for batch in loader: …"
    return failed(reason, records[-1].place, remedy)


def _list_epochs(process: Process) -> Iterator[list[Iteration]]:
    """Yield the epochs of each DataLoader for training. Those that one line builds in turn count as one."""
    epochs: dict[str, list[Iteration]] = defaultdict(list)
    for iterations in list_iterations(process):
        trained = [iteration for iteration in iterations if iteration.steps and len(iteration.batches) > 1]
        key = trained[0].record.built if len(iterations) == 1 and trained else f"loader {iterations[0].record.loader}"
        epochs[key] += trained
    yield from epochs.values()


def _have_same_order(before: Iteration, after: Iteration) -> bool:
    """Return whether two epochs begin with the same batches. Equal indices in two DataLoaders may be other samples."""
    orders = [before.order, after.order]
    if before.record.loader != after.record.loader:
        orders = [tuple(batch.content for batch in iteration.batches) for iteration in (before, after)]
    most = min(map(len, orders))
    return orders[0][:most] == orders[1][:most] and all(orders[0][:most])


def _explain_order(before: Iteration, after: Iteration, number: int) -> CheckVerdict | None:
    """Return the failure for two epochs with the same batches; None if nothing shuffles them.

    ``number``: of the first one.
    """
    record = after.record
    changed = next((text for text in record.state if text not in before.record.state), "")
    reason = f"epochs {number} and {number + 1} have the same batches in the same order"
    if changed and not after.has_indices:
        name = changed.partition("=")[0]
        where = ": the workers keep the copy of the first epoch" if record.workers else ""
        reason += f", although {name} has changed{where}"
        remedy = "set persistent_workers=False, or keep the epoch in shared memory" if record.workers else ""
        return failed(reason, record.built, remedy)
    may_shuffle = after.is_shuffled or not after.has_indices
    if record.setter and not changed and may_shuffle:
        owner = "sampler" if record.sampler_built else f"loader.{record.setter}"
        remedy = f"call {owner}.set_epoch(epoch) before this line"
        return failed(f"{reason}: the epoch of the {record.setter} is the same", record.place, remedy)
    if not after.has_indices:
        remedy = "if it shuffles, let its seed depend on the epoch"
        return warned(f"{reason}: it is a stream, and nothing shows whether it shuffles", record.built, remedy)
    if not after.is_shuffled:
        return None
    return failed(
        reason, record.place, "shuffle by a seed that depends on the epoch, or seed once, before the first epoch"
    )


# -- separate validation data


def check_validation(ranks: Sequence[Process], world_size: int) -> CheckVerdict:
    """Compare the samples that ranks validate with those that they train on, as far as the run shows both."""
    trained: dict[int, set[str]] = {}
    validated: dict[int, dict[str, LoaderRecord]] = {}
    for process in ranks:
        numbers = {
            iteration.record.loader
            for iterations in list_iterations(process)
            for iteration in iterations
            if iteration.steps
        }
        records = {record.loader: record for _, record in process.loaders}
        trained[process.rank] = {
            sample for batch in process.batches if batch.loader in numbers for sample in batch.samples
        }
        validated[process.rank] = {
            sample: records[batch.loader]
            for batch in process.batches
            if batch.loader not in numbers and batch.loader in records
            for sample in batch.samples
        }
    if not any(validated.values()) or not any(trained.values()):
        return not_applicable("no other data than that of training is read")
    for rank, samples in validated.items():
        own = samples.keys() & trained[rank]
        if len(own) >= max(_LEAST_SHARED, _OVERLAP * len(samples)):
            reason = f"{len(own)} of {len(samples)} samples that rank {rank} validates are also trained on"
            return warned(reason, samples[min(own)].built, "if it is no training accuracy, split the data before")
        for other, others in trained.items():
            shared = samples.keys() & others
            if other != rank and not own and len(shared) >= _LEAST_SHARED:
                reason = (
                    f"ranks split the data differently: rank {other} trains on {len(shared)} of {len(samples)} samples "
                    f"that rank {rank} validates"
                )
                remedy = "split by random numbers that are the same on all ranks: a generator with one seed"
                return failed(reason, samples[min(shared)].built, remedy)
    return passed("no sample of a validation was trained on")
