"""Judge whether an interrupted script continues as if nothing had happened, and ends in time. Pure."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

from ddp_cli.features.check.recordings import Digests, Process, Recording
from ddp_cli.features.check.state import LostValue, choose_causes, describe_lost, find_lost_values, find_silent
from ddp_cli.features.check.training import BUILD_LATE, use_join
from ddp_cli.features.check.verdict import (
    FAILED,
    NO_SAVE,
    PASSED,
    WARNING,
    CheckVerdict,
    failed,
    list_names,
    not_applicable,
    passed,
    warned,
)
from ddp_pod.features.check.contract import (
    DATA_DRAWS,
    LIMIT,
    MODEL_DRAWS,
    SCAN_STEP,
    SCRIPT_DRAWS,
    WEIGHTS,
    LoaderRecord,
    SaveRecord,
    StepRecord,
)

GRACE_SECONDS: Final = 30.0
"""A pod's time to end after SIGTERM, by default."""
_RATES: Final = "the learning rate"
_ORDER: Final = "the order of the data"
_BATCH: Final = "the batch"
_BUFFERS: Final = "the buffers"
_SCALE: Final = "the scale of the gradients"
_LOSS: Final = "the loss"
_WEIGHTS: Final = "the weights after the step"
_BESIDE: Final = "a module beside the model"
_FACTS: Final = (_RATES, _ORDER, _BATCH, _BUFFERS, _SCALE, _LOSS, _WEIGHTS, _BESIDE)
_SEEDS: Final = {
    _RATES: "compute the learning rate from the step alone",
    _ORDER: "give the sampler a seed or a seeded generator",
    _BATCH: "seed the augmentation (torch.manual_seed, random.seed, numpy.random.seed, worker_init_fn)",
    _BUFFERS: "call torch.manual_seed() before the model is built",
    _SCALE: "its GradScaler depends on gradients that are not finite",
    _LOSS: "call torch.manual_seed() at the start (dropout)",
    _WEIGHTS: "call torch.use_deterministic_algorithms(True)",
    _BESIDE: "seed what changes it",
}
_SOURCES: Final = {
    MODEL_DRAWS: "the model (dropout, noise, masks)",
    DATA_DRAWS: "the augmentation of the data",
    SCRIPT_DRAWS: "the script between data and model",
}
_STATES: Final = {
    "torch": "torch.get_rng_state()",
    "cuda": "torch.cuda.get_rng_state()",
    "numpy": "numpy.random.get_state()",
    "random": "random.getstate()",
}
SOURCES: Final = tuple(_SOURCES)
_SAVE_VALUES: Final = "save it with the checkpoint, and load it at the start"
_EPOCH: Final = ".epoch"  # end of an attribute's name
_EPOCHS_TO_SAVE: Final = 2  # after which a script that saves each epoch has saved


Files = dict[tuple[str, int], str]
"""Digests of what a saved file has, by its path and the step of the run."""


class _Randomness(NamedTuple):
    """How two uninterrupted runs differ. ``comparable``: the facts that are equal in both."""

    comparable: Sequence[str] = _FACTS
    text: str = ""


class _Expected(NamedTuple):
    """What an uninterrupted run does. ``comparable``: facts that are equal in the ``repeat``; ``files``: likewise.

    ``saver``: the process that has saved what the resumed run loads first.
    """

    reference: Recording
    repeat: Recording | None
    comparable: Sequence[str]
    files: Files
    saver: Process | None = None


class _Resume(NamedTuple):
    """A process that continued a run: after which step of it. ``killed``: the step after which the former ended.

    ``until``: the step up to which it is compared with an uninterrupted run; ``lost``: the values beside the models
    that it has not restored; ``peers``: the other ranks of an uninterrupted run; ``saver``: as expected.
    """

    process: Process
    killed: int
    position: int
    until: int
    lost: Sequence[LostValue]
    peers: Sequence[Process] = ()
    saver: Process | None = None


class _RankVerdict(NamedTuple):
    """The verdict on a rank. ``order``: of a failure: restart, step and fact; of two the lower one is the cause.

    ``fact``: the one that differs at a step; empty: it is another failure.
    """

    verdict: CheckVerdict
    order: tuple[int, int, int] = (0, 0, 0)
    fact: str = ""
    rank: int = 0


def judge_resume(reference: Recording, repeat: Recording | None, resumed: Recording | None) -> CheckVerdict:
    """Return whether the script resumes exactly. ``resumed``: of a run whose ranks were killed; None: no such run."""
    first = reference.firsts[0]
    save = next((save for save in reference.saves if save.step), None)
    if save is None:
        return _judge_without_save(first)
    if resumed is None or not resumed.firsts:
        return not_applicable("the first checkpoint is too late to kill a rank after it; use --steps")
    if use_join(reference.firsts):
        return not_applicable("the script handles uneven data with Join, which changes weights between steps")
    different = _find_different_loads(reference, resumed, save)
    if different is not None:
        return different
    randomness = _find_randomness(reference, repeat)
    files = _list_comparable_files(reference, repeat)
    firsts = [processes[0] for processes in resumed.ranks.values()]
    saver = next((process for process in firsts if process.saves and process.steps), None)
    verdict = passed()
    failures = []
    for rank in sorted(resumed.ranks.keys() & reference.ranks.keys()):
        # One rank saves, and its buffers are what all ranks load.
        facts = [fact for fact in randomness.comparable if fact != _BUFFERS or rank == 0]
        expected = _Expected(reference, repeat, facts, files, saver)
        judged = _judge_rank(expected, resumed.ranks[rank], save)
        verdict = _choose_worse(verdict, judged.verdict)
        if judged.verdict.state == FAILED:
            failures.append(judged._replace(rank=rank))
    if failures:  # ranks share gradients, so data of one rank changes the weights of all
        earliest = min(failures, key=lambda judged: judged.order)
        same = {judged.rank for judged in failures if judged.order == earliest.order}
        others = (resumed.ranks.keys() & reference.ranks.keys()) - same
        verdict = _name_rank(earliest, others, resumed)
    reason = f"{verdict.reason}; {randomness.text}" if randomness.text else verdict.reason
    return replace(verdict, reason=reason)


def _find_different_loads(reference: Recording, resumed: Recording, save: SaveRecord) -> CheckVerdict | None:
    """Return a failure if ranks continue with different weights, of parameters that are equal in the reference."""
    common = set.intersection(*(set(process.initial.items()) for process in reference.firsts))
    facts = reference.firsts[0].facts
    equal = {parameter for parameter, _ in common if not facts[parameter].is_sharded}
    restarts = zip(*(resumed.ranks[rank][1:] for rank in sorted(resumed.ranks)), strict=False)
    for processes in restarts:
        trained = [process for process in processes if process.steps]
        loaded = [{item: digest for item, digest in process.initial.items() if item in equal} for process in trained]
        if not loaded or all(digests == loaded[0] for digests in loaded):
            continue
        known = {process.rank: _describe_weights(resumed.ranks[process.rank][0], process) for process in trained}
        other = next(process for process, digests in zip(trained, loaded, strict=True) if digests != loaded[0])
        reason = (
            f"after a restart rank {trained[0].rank} has {known[trained[0].rank]}, and rank {other.rank} "
            f"{known[other.rank]}: the checkpoint is not loaded on all ranks"
        )
        place = next((load.place for process in trained for load in process.loads), "") or save.place
        remedy = "load it on all ranks, or before DistributedDataParallel wraps the model, which then broadcasts it"
        return failed(reason, place, remedy)
    return None


def _describe_weights(first: Process, process: Process) -> str:
    """Return where a process has its first weights from. ``first``: of its rank, which was killed."""
    steps = [step.step for step in first.steps if _has(first.digests(step), process.initial)]
    if steps:
        return f"the weights of step {steps[-1]}"
    return "its initial weights" if _has(first.initial, process.initial) else "other weights"


def _name_rank(judged: _RankVerdict, others: Collection[int], resumed: Recording) -> CheckVerdict:
    """Return a failure of a rank. ``others``: ranks that have made the same step as the uninterrupted run did.

    A learning rate or an optimizer's state that other ranks have restored is saved.
    """
    if not others or judged.fact not in (_RATES, _WEIGHTS):
        return judged.verdict
    other = min(others)
    reason = f"{judged.verdict.reason}, on rank {judged.rank} alone"
    remedy = f"load the optimizer's state, and a scheduler's, on all ranks, as rank {other} does"
    own = {load.path for process in resumed.ranks[judged.rank][1:] for load in process.loads}
    loads = (load for process in resumed.ranks[other][1:] for load in process.loads)
    place = next((load.place for load in loads if load.path not in own), judged.verdict.place)
    return replace(judged.verdict, reason=reason, place=place, remedy=remedy)


def _list_comparable_files(reference: Recording, repeat: Recording | None) -> Files:
    """Return what saved files have after each step, of the files that are equal in two uninterrupted runs."""
    expected = _list_files(reference)
    again = _list_files(repeat) if repeat is not None else {}
    changing = {path for (path, step), content in again.items() if expected.get((path, step), content) != content}
    known = {path for path, step in expected.keys() & again.keys()} - changing
    return {(path, step): content for (path, step), content in expected.items() if path in known}


def _list_files(recording: Recording) -> Files:
    return {(file.path, file.step): file.content for process in recording.firsts for file in process.files}


def _judge_without_save(first: Process) -> CheckVerdict:
    epochs = max((record.iteration for _, record in first.loaders), default=0)
    if not first.ended_itself and epochs <= _EPOCHS_TO_SAVE:
        reason = (
            f"no checkpoint in {len(first.steps)} steps; pass arguments with which the script saves sooner, or --steps"
        )
        return not_applicable(reason)
    return failed(
        f"no checkpoint in {len(first.steps)} steps: a restarted job starts again",
        first.steps[-1].place,
        "save model, optimizer, scheduler and epoch after each epoch, and load them at the start (docs/checkpoints.md)",
    )


def _find_randomness(reference: Recording, repeat: Recording | None) -> _Randomness:
    """Compare two uninterrupted runs."""
    if repeat is None:
        return _Randomness()
    comparable: Sequence[str] = _FACTS
    texts = []
    for before, after in zip(reference.firsts, repeat.firsts, strict=False):
        if before.initial != after.initial:
            texts.append("the initial weights of two runs differ: call torch.manual_seed() before the model is built")
            comparable = [fact for fact in comparable if fact in (_RATES, _ORDER, _BATCH)]
        difference = _find_difference(before, before.steps, after, after.steps, comparable)
        if difference:
            step, fact = difference
            texts.append(f"two uninterrupted runs differ from step {step.step} on ({fact}): {_SEEDS[fact]}")
            comparable = comparable[: comparable.index(fact)]
    return _Randomness(comparable, "; ".join(dict.fromkeys(texts)))


def _find_difference(
    before: Process, expected: Sequence[StepRecord], after: Process, steps: Sequence[StepRecord], facts: Sequence[str]
) -> tuple[StepRecord, str] | None:
    """Return the first step that differs from the expected one, and its first fact that does."""
    for wanted, step in zip(expected, steps, strict=False):
        begins_late = step.step == 1 and len(step.loss) < len(wanted.loss)
        is_part = begins_late or (step.step == 1 and len(step.rates) < len(wanted.rates))
        for fact in facts:
            if begins_late and fact == _BATCH:
                continue
            if fact == _BESIDE and min(wanted.step, step.step) <= SCAN_STEP:
                continue
            value = _read_fact(before, wanted, fact)
            part = _read_fact(after, step, fact)
            if fact == _ORDER and not (value and part):
                continue  # one has no indices, as a batch that the script has kept: its content is compared
            if is_part and isinstance(value, tuple) and isinstance(part, tuple):
                # Several optimizers step in turn, and the first ends the iteration. This process began within one.
                value = value[len(value) - len(part) :]
            if isinstance(value, dict) and isinstance(part, dict):
                # A model that the script wraps again later is recorded twice, or once if the process began after that.
                value = {parameter: digest for parameter, digest in value.items() if parameter in part}
                part = {parameter: digest for parameter, digest in part.items() if parameter in value}
            if value != part:
                return step, fact
    return None


def _read_fact(process: Process, step: StepRecord, fact: str) -> object:
    if fact == _RATES:
        return step.rates
    if fact == _ORDER:
        return step.indices
    if fact == _BATCH:
        return step.batch
    if fact == _BUFFERS:
        return step.buffers
    if fact == _SCALE:
        return step.scales
    if fact == _LOSS:
        return step.loss
    if fact == _BESIDE:
        return _list_moving(process, step)
    return process.digests(step)


def _list_moving(process: Process, step: StepRecord) -> list[str]:
    """Return the modules beside the models that a step has changed: others are copies, or wait for their end."""
    before = process.steps[step.step - 2]
    return [module for module in step.beside if module not in before.beside]


def _choose_worse(former: CheckVerdict, verdict: CheckVerdict) -> CheckVerdict:
    """Return the verdict of a rank, unless a rank before has a warning that this one lacks."""
    return former if former.state == WARNING and verdict.state == PASSED else verdict


def _judge_rank(expected: _Expected, processes: Sequence[Process], save: SaveRecord) -> _RankVerdict:
    """Compare what the processes of a killed rank did with the uninterrupted run."""
    rank = processes[0].rank
    comparable = expected.comparable
    whole = expected.reference.ranks[rank][0]
    peers = [process for process in expected.reference.firsts if process.rank != rank]
    repeat = next(iter(expected.repeat.ranks.get(rank, ())), None) if expected.repeat is not None else None
    saved = {save.step for save in expected.reference.saves}
    history = list(processes[0].steps)  # by position in the run
    texts = []
    warning = None
    compared = len(whole.steps)  # up to which step the runs are alike
    # A peer may be killed after its first step, before this rank has recorded its own.
    lived = [process for process in processes[:-1] if process.steps or process.end is not None]
    for number, (killed, process) in enumerate(pairwise([*lived, processes[-1]])):
        order = (number, 0, 0)
        if not process.steps:
            reason = f"the script made no step after its interruption at step {len(history)}"
            return _RankVerdict(
                failed(reason, save.place, "load the checkpoint at the start as it was saved here"), order
            )
        position = _find_position(processes[0], history, process, saved)
        if isinstance(position, CheckVerdict):
            return _RankVerdict(failed(position.reason, save.place, position.remedy), order)
        history = history[:position] + process.steps
        texts.append(str(position))
        if position >= compared:
            continue  # the interrupted run had other epochs than the uninterrupted one
        compared = min(compared, _find_aligned_end(whole, position))
        lost = find_lost_values(whole, repeat, process, position, compared)
        resume = _Resume(process, killed.steps[-1].step, position, compared, lost, peers, expected.saver)
        difference = _find_resumed_difference(whole, resume, comparable)
        if difference is not None:
            step, fact = difference
            failure = _judge_step(whole, resume, save, step, fact)
            return _RankVerdict(failure, (number, step.step, _FACTS.index(fact)), fact)
        verdict = (
            _judge_draws(whole, resume, save, comparable)
            or _judge_files(resume, expected.files)
            or _judge_values(resume, save)
        )
        if verdict is not None and verdict.state == FAILED:
            return _RankVerdict(verdict, (number, len(whole.steps), 0))
        warning = warning or verdict
    if not texts:
        return _RankVerdict(not_applicable("no rank was killed"))
    last = processes[-1]
    total = len(whole.steps)
    if whole.ended_itself and last.ended_itself and len(history) != total and compared == total:
        reason = f"the resumed run made {len(history)} steps, the uninterrupted one {total}"
        verdict = failed(reason, save.place, "save the number of completed steps or epochs, and start there")
        return _RankVerdict(verdict, (len(processes), 0, 0))
    if warning is not None:
        return _RankVerdict(warning)
    exactness = "bit-equal" if _WEIGHTS in comparable else "equal batches and learning rates"
    steps = min(len(history), compared)
    return _RankVerdict(passed(f"continued after step {' and '.join(texts)}, {exactness} until step {steps}"))


def _find_position(
    first: Process, history: Sequence[StepRecord], process: Process, saved: Collection[int]
) -> int | CheckVerdict:
    """Return the step of the run whose weights a process has loaded, or a verdict why there is none.

    ``saved``: the steps after which an uninterrupted run saves.
    """
    loaded = process.initial
    weights = [first.digests(step) for step in history]
    positions = [index for index, after in enumerate(weights, 1) if _has(after, loaded)]
    positions = positions or [index for index, pair in enumerate(pairwise(weights), 1) if _has_between(*pair, loaded)]
    if positions:
        # Weights that do not change are of several steps: prefer the one that the data continues, then a saved one.
        batch = process.steps[0].batch
        continued = [index for index in positions if index < len(history) and history[index].batch == batch]
        # A first step with a learning rate of 0 leaves the initial weights.
        begins_anew = not continued and history[0].batch == batch and _has(first.initial, loaded)
        if not begins_anew:
            return (continued or [index for index in positions if index in saved] or positions)[-1]
    if _has(first.initial, loaded):
        return _explain_new_start(process)
    known = first.digests(history[-1])
    different = [parameter.name for parameter, digest in loaded.items() if known.get(parameter) != digest]
    reason = f"a restarted run has weights of no step before ({list_names(different)})"
    return failed(reason, "", "save all parameters right after a step, in full precision, and load them all")


def _explain_new_start(process: Process) -> CheckVerdict:
    reason = "a restarted run starts again at step 1"
    if process.loads:
        name = process.loads[-1].path.rpartition("/")[2]
        reason += f": it reads {name} at {process.loads[-1].place}, and the model has its initial weights"
        return failed(reason, "", "load it into the model that is trained, with strict=True")
    remedy = "load the newest checkpoint at the start as it was saved here (docs/checkpoints.md)"
    return failed(f"{reason}: it loads no checkpoint", "", remedy)


def _has(weights: Digests, loaded: Digests) -> bool:
    return all(weights.get(parameter, digest) == digest for parameter, digest in loaded.items())


def _has_between(before: Digests, after: Digests, loaded: Digests) -> bool:
    """Return whether some models are a step ahead: their optimizers step after the one that ends an iteration."""
    models = [
        {parameter: digest for parameter, digest in loaded.items() if parameter.model == model}
        for model in {parameter.model for parameter in loaded}
    ]
    return all(_has(before, model) or _has(after, model) for model in models)


def _find_resumed_difference(
    whole: Process, resume: _Resume, comparable: Sequence[str]
) -> tuple[StepRecord, str] | None:
    """Return the first step after a restart that an uninterrupted run does not make, and its first other fact."""
    expected = whole.steps[resume.position : resume.until]
    return _find_difference(whole, expected, resume.process, resume.process.steps, comparable)


def _judge_step(whole: Process, resume: _Resume, save: SaveRecord, step: StepRecord, fact: str) -> CheckVerdict:
    """Return the failure for a step that differs."""
    number = resume.position + step.step
    reason = (
        f"interrupted after step {resume.killed}, resumed after step {resume.position}: {fact} differs at step {number}"
    )
    cause, remedy = _explain(whole, resume, step, fact)
    return failed(f"{reason}: {cause}", save.place, remedy)


def _judge_draws(whole: Process, resume: _Resume, save: SaveRecord, comparable: Sequence[str]) -> CheckVerdict | None:
    """Find random numbers that repeat those of the start, if their effect cannot be compared; None: there are none."""
    if (_LOSS in comparable and _BATCH in comparable) or resume.position >= len(whole.steps):
        return None
    for step in resume.process.steps[:1]:
        repeated = _list_other_draws(whole, resume, step, SOURCES) & {*whole.steps[step.step - 1].draws}
        if repeated and resume.position:
            reason, remedy = _describe_draws(repeated, resume, step, is_repeated=True)
            return failed(f"resumed after step {resume.position}: {reason}", save.place, remedy)
    return None


def _judge_values(resume: _Resume, save: SaveRecord) -> CheckVerdict | None:
    """Find tensors that the script keeps beside the models and loses; None: there are none.

    Averages of the weights are used later. Of others, such as the sums of a metric, only the script knows.
    """
    names, are_weights = find_silent(resume.lost)
    if not names:
        return None
    reason = f"resumed after step {resume.position}: {describe_lost(names)}"
    if are_weights:
        return failed(f"{reason}: an average of the weights", save.place, _SAVE_VALUES)
    return warned(
        f"{reason}; the steps until {resume.position + len(resume.process.steps)} do not depend on it",
        save.place,
        f"unless it is a metric, {_SAVE_VALUES}",
    )


def _judge_files(resume: _Resume, files: Files) -> CheckVerdict | None:
    """Compare the saves after a restart with those without one; None: they are equal."""
    for file in resume.process.files:
        step = resume.position + file.step
        if file.step == 0 or step > resume.until or files.get((file.path, step), file.content) == file.content:
            continue
        place = next((save.place for save in resume.process.saves if save.path.endswith(file.path)), "")
        reason = (
            f"resumed after step {resume.position}: {file.path} of step {step} is not that of an uninterrupted run, "
            "although the trained weights are: it has a state that is not saved, or not loaded (an average of the "
            "weights, a queue, a counter)"
        )
        return failed(reason, place, "save that state with the checkpoint, and load it at the start")
    return None


def _find_aligned_end(whole: Process, position: int) -> int:
    """Return up to which step a run compares that resumed here.

    A check cuts epochs. Of a DataLoader without a length it does not know how many batches the script has skipped.
    """
    begins = [begin for begin, record in whole.loaders if record.batches is None]
    if not begins or position in begins:
        return len(whole.steps)
    return min((begin for begin in begins if begin > position), default=len(whole.steps))


def _explain(whole: Process, resume: _Resume, step: StepRecord, fact: str) -> tuple[str, str]:
    """Return the cause of a difference, and what to save."""
    values = choose_causes(resume.lost)
    lost = (describe_lost(values), _SAVE_VALUES) if values else None
    if fact == _RATES:
        if whole.steps[-1].scheduled or resume.process.steps[-1].scheduled:
            return "the scheduler is not saved", "save scheduler.state_dict() and optimizer.state_dict(), and load both"
        return lost or ("no scheduler has changed it", "")
    if fact in (_ORDER, _BATCH):
        return _explain_data(whole, resume, step, fact, lost)
    if fact == _BUFFERS:
        return "buffers are not saved", "save model.state_dict(), which has them, not the parameters alone"
    if fact == _SCALE:
        return (
            "the state of the GradScaler is not restored",
            "save scaler.state_dict() with the checkpoint, and load it",
        )
    if fact == _LOSS:  # weights and batch are equal
        draws = _list_other_draws(whole, resume, step, (MODEL_DRAWS, SCRIPT_DRAWS))
        if draws:
            return _explain_draws(whole, resume, step, draws)
        return (
            _explain_modules(whole, resume)
            or _explain_late_optimizer(whole, resume, step)
            or lost
            or ("weights, batch and random state are equal", "")
        )
    return _explain_weights(whole, resume, step, fact, lost)


def _explain_weights(
    whole: Process, resume: _Resume, step: StepRecord, fact: str, lost: tuple[str, str] | None
) -> tuple[str, str]:
    """Return why weights or averages of them differ after a step with the right batch and loss."""
    expected = whole.steps[resume.position + step.step - 1]
    if fact == _BESIDE:
        moving = _list_moving(whole, expected) or _list_moving(resume.process, step)
        kinds = list_names(module.partition(":")[0] for module in moving)
        remedy = "save its state_dict() with the checkpoint, and load it at the start"
        return f"{kinds} changes at each step and is not restored, such as an average of the weights", remedy
    if step.foreign and not expected.foreign:
        return f"the optimizer has {step.foreign} parameters of no model that is trained", BUILD_LATE
    moved = _find_other_order(resume)
    if moved:
        reason = (
            f"the optimizer has {moved[1]} where the process that saved has {moved[0]}: its state is loaded by the "
            "order of the parameters"
        )
        return reason, "give the optimizer its parameters in an order that all processes have: sorted(…), not a set"
    if expected.gradients != step.gradients:
        return lost or ("batch and loss are equal, the gradients are not", "")
    averages = [value.name for value in resume.lost if value.kind == WEIGHTS and not (value.is_reset or value.is_late)]
    if averages:
        return describe_lost(averages), _SAVE_VALUES
    return "the optimizer's state is not that of the uninterrupted run", "save optimizer.state_dict(), and load it"


def _find_other_order(resume: _Resume) -> tuple[str, str] | None:
    """Return the first parameter of the optimizers whose place another one has after the restart, and that one."""
    if resume.saver is None:
        return None
    pairs = list(zip(resume.saver.steps[0].optimized, resume.process.steps[0].optimized, strict=False))
    return next((pair for pair in pairs if pair[0] != pair[1] and all(pair)), None)


def _explain_modules(whole: Process, resume: _Resume) -> tuple[str, str] | None:
    """Return the module beside the models that is not restored, such as a target network; None: there is none.

    The first step after the restart has not changed it yet, or by equal weights.
    """
    expected = {*whole.steps[resume.position].beside}
    restored = {*resume.process.steps[0].beside}
    kinds = _list_kinds(expected - restored) & _list_kinds(restored - expected)
    if not kinds:
        return None
    reason = f"{list_names(sorted(kinds))} beside the model is not restored"
    return reason, "save its state_dict() with the checkpoint, and load it at the start"


def _explain_late_optimizer(whole: Process, resume: _Resume, step: StepRecord) -> tuple[str, str] | None:
    """Return the cause of another loss if an optimizer steps after the one that ends an iteration; None: none does.

    The records of an iteration show the weights that it changes at the next one, where the loss depends on them.
    """
    if step.step == 1:
        return None
    after = whole.digests(whole.steps[resume.position - 1])
    ahead = {item.model for item, digest in resume.process.initial.items() if after.get(item, digest) != digest}
    expected = whole.digests(whole.steps[resume.position + step.step - 1])
    actual = resume.process.digests(step)
    names = [item.name for item in actual if item.model in ahead and expected.get(item) != actual[item]]
    if not names:
        return None
    reason = f"the optimizer's state is not that of the uninterrupted run ({list_names(names)})"
    return reason, "save the state_dict() of each optimizer, and load it"


def _list_kinds(modules: Iterable[str]) -> set[str]:
    return {module.partition(":")[0] for module in modules}


def _list_other_draws(whole: Process, resume: _Resume, step: StepRecord, sources: Collection[str]) -> set[str]:
    """Return what draws at most steps, and at this one from another random state than the uninterrupted run."""
    counts = Counter(entry.partition("=")[0] for other in whole.steps for entry in other.draws)
    expected = whole.steps[resume.position + step.step - 1].draws
    usual = {key for key, count in counts.items() if 2 * count > len(whole.steps) and key.split()[0] in sources}
    usual &= {entry.partition("=")[0] for entry in expected}
    return {entry for entry in step.draws if entry.partition("=")[0] in usual} - {*expected}


def _explain_draws(whole: Process, resume: _Resume, step: StepRecord, draws: set[str]) -> tuple[str, str]:
    repeated = draws & {*whole.steps[step.step - 1].draws}
    return _describe_draws(repeated or draws, resume, step, is_repeated=bool(repeated))


def _describe_draws(draws: set[str], resume: _Resume, step: StepRecord, *, is_repeated: bool) -> tuple[str, str]:
    """Return the fault of random numbers, and what to save."""
    sources = {entry.split()[0] for entry in draws}
    generators = {entry.split()[1].partition("=")[0] for entry in draws}
    who = " and ".join(_SOURCES[source] for source in SOURCES if source in sources)
    calls = ", ".join(_STATES[generator] for generator in _STATES if generator in generators)
    remedy = f"save {calls} of each rank, and load it"
    if is_repeated:
        number = resume.position + step.step
        return f"the random state is not restored: {who} of step {number} draws the numbers of step {step.step}", remedy
    return f"the random state is not restored ({who})", remedy


def _explain_data(
    whole: Process, resume: _Resume, step: StepRecord, fact: str, lost: tuple[str, str] | None
) -> tuple[str, str]:
    number = resume.position + step.step
    for peer in resume.peers:
        if step.batch and step.batch in {other.batch for other in peer.steps[number - 1 : number]}:
            reason = f"rank {whole.rank} continues with the batches of rank {peer.rank}"
            return reason, "save the position, or the state of the generator, of each rank, and load its own on each"
    if fact == _BATCH and step.indices:
        draws = _list_other_draws(whole, resume, step, SOURCES)
        if draws:
            return _explain_draws(whole, resume, step, draws)
        if lost is not None:
            return lost
        remedy = "save the random states of each rank (torch, random, numpy), and load them"
        return "the samples are the same, their random augmentation is not", remedy
    used = step.indices or step.batch
    known = [record.step for record in whole.steps if used in (record.indices, record.batch)]
    loader = _find_loader(resume.process, step.step)
    remedy = _describe_epoch(loader)
    if known and known[0] == 1:
        return "the data starts again with step 1", f"{remedy}; skip the batches before the checkpoint"
    begins = [begin for begin, _ in whole.loaders if begin < resume.position + step.step]
    if known and known[0] - 1 in begins:
        remedy = "save the position in the epoch, and skip the batches before it; or save at the end of an epoch"
        return f"the epoch starts again with step {known[0]}", remedy
    expected = _find_loader(whole, resume.position + step.step)
    if loader is not None and expected is not None:
        for former, value in zip(expected.state, loader.state, strict=False):
            name, _, epoch = former.partition("=")
            if former != value and name.endswith(_EPOCH) and value.startswith(f"{name}="):
                return f"{value.replace('=', ' is ')}, and was {epoch} in the uninterrupted run", remedy
    if step.indices and not (loader is not None and loader.setter):
        remedy = "save the random states of each rank (torch, random, numpy), or those of the sampler, and load them"
    return "the data continues in another order", remedy


def _find_loader(process: Process, step: int) -> LoaderRecord | None:
    """Return the last DataLoader that began to deliver before a step, of those that deliver for it."""
    used = process.steps[step - 1].loaders
    records = [record for begin, record in process.loaders if begin < step and (record.loader in used or not used)]
    return records[-1] if records else None


def _describe_epoch(loader: LoaderRecord | None) -> str:
    """Return how to continue with the right epoch, by what the script has."""
    if loader is None:
        return "save the position in the data, and start there"
    if loader.setter:
        owner = "sampler" if loader.sampler_built else f"loader.{loader.setter}"
        return f"save the epoch, start there, and call {owner}.set_epoch(epoch)"
    name = next((text.partition("=")[0] for text in loader.state if text.partition("=")[0].endswith(_EPOCH)), "")
    return f"save the epoch, start there, and set loader.{name}" if name else "save the epoch, and start there"


def judge_continuation(
    reference: Recording, repeat: Recording, continued: Recording, *, is_exact: bool
) -> CheckVerdict | None:
    """Return a failure if a script that ended with exit code 0 at SIGTERM does not continue at its next start.

    ``is_exact``: whether it resumes exactly after a kill: then it also has to after this end.
    """
    stopped = repeat.firsts[0]
    last = len(stopped.steps)
    total = len(reference.firsts[0].steps)
    # Not a file of the end, such as the trained model: the script reads those that it saves meanwhile.
    names = {os.path.basename(save.path) for save in reference.saves}
    saves = [save for save in repeat.saves if os.path.basename(save.path) in names] or repeat.saves
    save = max(saves, key=lambda save: save.time, default=None)
    place = stopped.steps[-1].place if save is None else save.place
    remedy = "leave by sys.exit(143) once the checkpoint is saved, so that nothing runs that ends a whole training"
    head = f"SIGTERM ended the script with exit code 0 after step {last} of {total} or more"
    if not continued.firsts:
        return failed(f"{head}, and its next start makes no step: the rest of the training is lost", place, remedy)
    if save is None or not is_exact:
        return None
    expected = _Expected(reference, repeat, _find_randomness(reference, repeat).comparable, {})
    for rank in sorted(continued.ranks.keys() & reference.ranks.keys()):
        verdict = _judge_rank(expected, [repeat.ranks[rank][0], *continued.ranks[rank]], save).verdict
        if verdict.state == FAILED:
            return failed(f"{head}; {verdict.reason}", place, remedy)
    return None


def judge_stop(
    recording: Recording, signalled: float | None, seconds: float, grace: float = GRACE_SECONDS, torn: str = ""
) -> CheckVerdict:
    """Return whether the script ends in time after SIGTERM, and leaves checkpoints that can be loaded.

    ``signalled``: Unix time of the signal; None: the script ended before; ``seconds``: from the signal to the end;
    ``torn``: a checkpoint that is not complete. A script that saves regularly need not save at the end: it repeats the
    steps since its last checkpoint.
    """
    if signalled is None or not recording.firsts:
        return not_applicable("the script ended before it could be stopped; use --steps, or more epochs")
    first = recording.firsts[0]
    more = sum(step.time >= signalled for step in first.steps)
    if seconds >= grace or (first.end is not None and first.end.reason == LIMIT):
        reason = f"still training {more} steps and {seconds:.0f} s after SIGTERM"
        return failed(reason, first.steps[-1].place, "end the loop when SIGTERM arrives; do not ignore it")
    saves = recording.saves
    if torn:
        place = next((save.place for save in reversed(saves) if save.path.endswith(torn)), "")
        remedy = "write to another name and os.replace() it, and end at SIGTERM only after the end of a save"
        return failed(f"ended within a save: {torn} is not complete, so no restart can load it", place, remedy)
    if not saves:
        return not_applicable(f"{NO_SAVE}; the script ended in time")
    last = first.steps[-1].step
    saved = max(save.step for save in saves)
    if any(save.time >= signalled for save in saves):
        return passed(f"saved after step {saved}, ended after {seconds:.1f} s")
    if saved == last:
        return passed(f"ended after {seconds:.1f} s; step {saved} was saved before")
    return passed(
        f"ended after {seconds:.1f} s without a save: an eviction repeats the steps since the last checkpoint "
        f"(here {last - saved}); to keep them, save in the step after SIGTERM (docs/checkpoints.md)"
    )
