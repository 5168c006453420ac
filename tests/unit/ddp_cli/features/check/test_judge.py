"""The verdicts on recorded runs: each fault alone in records of a right script."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ddp_cli.features.check.judge import omit_consequences
from ddp_cli.features.check.recordings import Process, Recording, read_recording
from ddp_cli.features.check.resume import judge_continuation, judge_resume, judge_stop
from ddp_cli.features.check.training import judge_training
from ddp_cli.features.check.verdict import FAILED, NOT_APPLICABLE, PASSED, WARNING, CheckVerdict
from ddp_pod.contract.records import to_json
from ddp_pod.features.check.contract import (
    COMPLETED,
    LIMIT,
    SCAN_STEP,
    BatchRecord,
    EndRecord,
    FileRecord,
    LoaderRecord,
    LoadRecord,
    ModelRecord,
    SaveRecord,
    StartRecord,
    StepRecord,
)

STEPS = 12
EPOCH = 4
Change = Callable[[list[Process]], object]


def build_process(rank: int, *, steps: range = range(1, STEPS + 1), number: int = 0) -> Process:
    """Return the records of a right script from one step to another; ``steps``: of the run."""
    process = Process(rank, number, StartRecord(rank=rank, world_size=2))
    process.models = [
        ModelRecord(
            built="train.py:10",
            wrapper="DistributedDataParallel",
            place="train.py:20",
            names=("weight", "frozen"),
            digests=(f"w{steps.start - 1}", "f"),
            trainable=(1, 0),
            sharded=(0, 0),
            buffer_names=("mean",),
            places=("net.py:1", "net.py:2"),
        )
    ]
    for index, step in enumerate(steps, 1):
        if (step - 1) % EPOCH == 0 or index == 1:
            epoch = (step - 1) // EPOCH
            loader = LoaderRecord(
                loader=0,
                iteration=epoch + 1,
                built="train.py:12",
                place="train.py:18",
                batches=EPOCH,
                sampler_built="train.py:11",
                shuffles=True,
                epoch=epoch,
            )
            process.loaders.append((index - 1, loader))
        process.batches.append(
            BatchRecord(
                loader=0,
                iteration=(step - 1) // EPOCH + 1,
                content=f"b{step}.{rank}",
                indices=f"i{step}.{rank}",
                descents=3,
                samples=(f"s{step}.{rank}",),
            )
        )
        process.steps.append(
            StepRecord(
                time=float(step),
                step=index,
                place="train.py:22",
                backward="train.py:21",
                loss=(f"l{step}.{rank}",),
                rates=(1.0 / step,),
                batch=f"b{step}.{rank}",
                indices=f"i{step}.{rank}",
                digests=(f"w{step}", "f"),
                gradients=(f"g{step}", ""),
                buffers=(f"m{step}",),
                loaders=(0,),
                beside=(f"Average:{step}", "Teacher:0") if index >= SCAN_STEP else (),
                scheduled="train.py:23",
                draws=(f"model torch=d{step}.{rank}",),
                state=(
                    f"mean=number:m{step}",
                    f"queue=tensor:q{step}",
                    f"shadow=weights:a{step}",
                    f"matrix=tensor:{(step - 1) % EPOCH}",
                ),
                group_size=2,
                group_rank=rank,
            )
        )
        if step % EPOCH == 0 and rank == 0:
            process.saves.append(SaveRecord(time=float(step), path="/x/last.pt", place="train.py:25", step=index))
    process.end = EndRecord(step=len(process.steps), reason=COMPLETED)
    return process


def change_steps(process: Process, *, since: int = 1, **values: Any) -> None:
    """Change records of steps; a callable gets the step's number and the rank."""
    process.steps = [
        dataclasses.replace(
            step,
            **{name: value(step.step, process.rank) if callable(value) else value for name, value in values.items()},
        )
        if step.step >= since
        else step
        for step in process.steps
    ]


def change_model(process: Process, **values: Any) -> None:
    process.models = [dataclasses.replace(model, **values) for model in process.models]


def change_loaders(process: Process, **values: Any) -> None:
    process.loaders = [(begin, dataclasses.replace(loader, **values)) for begin, loader in process.loaders]


def leave_unwrapped(ranks: list[Process]) -> None:
    for process in ranks:
        change_model(process, wrapper="")
        change_steps(
            process,
            gradients=lambda step, rank: (f"g{step}.{rank}", ""),
            digests=lambda step, rank: (f"w{step}.{rank}", "f"),
        )


def never_use_a_head(ranks: list[Process]) -> None:
    for process in ranks:
        change_model(process, trainable=(1, 1))
        change_steps(process, without_gradient=("frozen",))


def share_batches(ranks: list[Process]) -> None:
    for process in ranks:
        change_steps(process, batch=lambda step, rank: f"b{step}", indices=lambda step, rank: f"i{step}")


def share_first_batches(ranks: list[Process]) -> None:
    for process in ranks:
        change_steps(process, batch=lambda step, rank: f"b{step}.{rank if step % EPOCH != 1 else 0}")


def write_everywhere(ranks: list[Process]) -> None:
    ranks[1].saves = list(ranks[0].saves)


def repeat_epochs(ranks: list[Process], **values: Any) -> None:
    """Deliver the same batches in the same order in each epoch."""
    for process in ranks:
        process.batches = [
            dataclasses.replace(
                batch, content=f"b{index % EPOCH}.{process.rank}", indices=f"i{index % EPOCH}.{process.rank}", **values
            )
            for index, batch in enumerate(process.batches)
        ]


def never_set_epoch(ranks: list[Process]) -> None:
    repeat_epochs(ranks)
    for process in ranks:
        change_loaders(process, epoch=0, setter="sampler")


def never_tell_own_sampler(ranks: list[Process]) -> None:
    repeat_epochs(ranks)
    for process in ranks:
        change_loaders(process, epoch=None, sampler_built="", setter="batch_sampler")


def seed_each_epoch(ranks: list[Process]) -> None:
    repeat_epochs(ranks)
    for process in ranks:
        change_loaders(process, epoch=None, sampler_built="")


def tell_the_epoch_to_the_main_process_only(ranks: list[Process]) -> None:
    repeat_epochs(ranks)
    for process in ranks:
        process.batches = [dataclasses.replace(batch, indices="", descents=0) for batch in process.batches]
        process.loaders = [
            (begin, dataclasses.replace(loader, workers=2, sampler_built="", state=(f"dataset.epoch={number}",)))
            for number, (begin, loader) in enumerate(process.loaders)
        ]


def deliver_twice(ranks: list[Process]) -> None:
    """Deliver each batch by two workers."""
    for process in ranks:
        change_loaders(process, workers=2, sampler_built="")
        process.batches = [
            dataclasses.replace(batch, indices="", content=f"b{index // 2}")
            for index, batch in enumerate(process.batches)
        ]


def deliver_samples_twice(ranks: list[Process]) -> None:
    for process in ranks:
        change_loaders(process, workers=2, sampler_built="")
        process.batches = [
            dataclasses.replace(batch, indices="", samples=(f"s{index // 2}",))
            for index, batch in enumerate(process.batches)
        ]


def repeat_stream(ranks: list[Process]) -> None:
    repeat_epochs(ranks, descents=0)
    for process in ranks:
        process.batches = [dataclasses.replace(batch, indices="") for batch in process.batches]
        change_loaders(process, sampler_built="", shuffles=None)


def validate(ranks: list[Process], samples: Sequence[tuple[str, ...]]) -> None:
    """Let each rank validate the samples after its first epoch. The last batch seems to be one of the next step."""
    for process in ranks:
        process.steps[EPOCH] = dataclasses.replace(process.steps[EPOCH], loaders=(0, 1))
    for process, own in zip(ranks, samples, strict=True):
        process.loaders.append((EPOCH, LoaderRecord(loader=1, iteration=1, built="train.py:13", place="train.py:30")))
        process.batches.append(BatchRecord(loader=1, iteration=1, content="v", samples=own))


def split_differently(ranks: list[Process]) -> None:
    validate(ranks, [("s1.1", "s2.1", "s3.1", "x"), ("s1.0", "s2.0", "s3.0", "y")])


def learn_nothing(ranks: list[Process]) -> None:
    for process in ranks:
        change_steps(process, loss=("0x0.0p+0",), digests=("w0", "f"))


def change_nothing(ranks: list[Process]) -> None:
    for process in ranks:
        change_steps(process, digests=("w0", "f"))


def leave_out_of_the_optimizer(ranks: list[Process]) -> None:
    for process in ranks:
        change_model(process, trainable=(1, 1))
        change_steps(process, gradients=lambda step, rank: (f"g{step}", f"h{step}"), unoptimized=("frozen",), foreign=2)


def register_in_another_order(ranks: list[Process]) -> None:
    change_model(ranks[1], names=("frozen", "weight"), digests=("f", "w0"))


def schedule_on_own_metric(ranks: list[Process]) -> None:
    change_steps(ranks[1], since=5, rates=(0.001,), digests=lambda step, rank: (f"w{step}.{rank}", "f"))
    for process in ranks:
        change_steps(process, scheduled="train.py:33")


def skip_synchronization(ranks: list[Process]) -> None:
    for process in ranks:
        change_steps(
            process,
            gradients=lambda step, rank: (f"g{step}.{rank}", ""),
            digests=lambda step, rank: (f"w{step}.{rank}", "f"),
            unsynchronized=True,
        )


def keep_a_reference(ranks: list[Process]) -> None:
    ranks[0].saves[-1] = dataclasses.replace(ranks[0].saves[-1], taken=4, taken_place="train.py:28")


def begin_with_other_weights(ranks: list[Process]) -> None:
    change_model(ranks[1], digests=("x", "f"))
    change_steps(ranks[1], digests=("x", "f"))


FAULTS: list[tuple[str, Change, str, str]] = [
    ("no group", lambda ranks: change_steps(ranks[0], group_size=0), "one group", "train.py:22"),
    ("small group", lambda ranks: change_steps(ranks[0], group_size=1), "one group", "train.py:22"),
    ("two groups", lambda ranks: change_steps(ranks[1], group_rank=0), "one group", "train.py:22"),
    ("a rank without steps", lambda ranks: ranks[1].steps.clear(), "one group", "train.py:22"),
    ("not wrapped", leave_unwrapped, "gradients are shared", "train.py:10"),
    (
        "changed outside",
        lambda ranks: change_steps(ranks[1], since=3, digests=("other", "f")),
        "gradients are shared",
        "train.py:22",
    ),
    ("unused head", never_use_a_head, "gradients are shared", "net.py:2"),
    ("same batches", share_batches, "different data", "train.py:11"),
    ("same first batches", share_first_batches, "different data", "train.py:20"),
    (
        "no set_epoch",
        never_set_epoch,
        "another order each epoch",
        "train.py:18",
    ),
    ("own sampler", never_tell_own_sampler, "another order each epoch", "train.py:18"),
    ("seed in each epoch", seed_each_epoch, "another order each epoch", "train.py:18"),
    ("epoch in the main process", tell_the_epoch_to_the_main_process_only, "another order each epoch", "train.py:12"),
    ("workers deliver the same batches", deliver_twice, "different data", "train.py:12"),
    ("workers deliver the same samples", deliver_samples_twice, "different data", "train.py:12"),
    ("split by rank", split_differently, "separate validation data", "train.py:13"),
    ("constant loss", learn_nothing, "weights change", "train.py:21"),
    ("constant weights", change_nothing, "weights change", "train.py:22"),
    ("head without an optimizer", leave_out_of_the_optimizer, "weights change", "net.py:2"),
    ("other order", register_in_another_order, "same parameters", "net.py:1"),
    ("own learning rate", schedule_on_own_metric, "gradients are shared", "train.py:33"),
    ("no_sync", skip_synchronization, "gradients are shared", "train.py:21"),
    ("reference", keep_a_reference, "saved weights", "train.py:28"),
    ("uneven data", lambda ranks: change_loaders(ranks[1], batches=3), "equal numbers of steps", "train.py:12"),
    ("fewer steps", lambda ranks: ranks[1].steps.pop(), "equal numbers of steps", "train.py:22"),
    ("two writers", write_everywhere, "one writer", "train.py:25"),
    (
        "other weights",
        begin_with_other_weights,
        "same initial weights",
        "train.py:10",
    ),
    (
        "frozen drift",
        lambda ranks: change_steps(ranks[1], since=5, digests=lambda step, rank: (f"w{step}", "x")),
        "same initial weights",
        "net.py:2",
    ),
    ("buffers", lambda ranks: change_steps(ranks[1], buffers=("x",)), "same initial weights", "train.py:10"),
    (
        "infinite loss",
        lambda ranks: change_steps(ranks[1], since=7, not_finite="the loss is nan"),
        "finite",
        "train.py:21",
    ),
]


def test_right_script_passes_every_check() -> None:
    verdicts = judge_training(Recording({rank: [build_process(rank)] for rank in range(2)}), 2)

    assert {verdict.state for verdict in verdicts} == {PASSED}


@pytest.mark.parametrize(("change", "check", "place"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_fault_fails_one_check_and_names_its_line(change: Change, check: str, place: str) -> None:
    ranks = [build_process(rank) for rank in range(2)]
    change(ranks)

    verdicts = omit_consequences(judge_training(Recording({process.rank: [process] for process in ranks}), 2))

    failed = {verdict.check: verdict for verdict in verdicts if verdict.state == FAILED}
    assert list(failed) == [check]
    assert failed[check].place == place
    assert failed[check].remedy or check == "weights change"


@pytest.mark.parametrize(
    "change",
    [
        lambda ranks: repeat_epochs(ranks, descents=0),
        lambda ranks: validate(ranks, [("v1", "v2", "v3")] * 2),
        lambda ranks: change_steps(ranks[1], draws=("model torch=r1",)),
    ],
    ids=["sequential data", "own validation data", "own random numbers"],
)
def test_right_variant_fails_no_check(change: Change) -> None:
    ranks = [build_process(rank) for rank in range(2)]
    change_steps(ranks[0], draws=("model torch=r0",))
    change(ranks)
    verdicts = judge_training(Recording({process.rank: [process] for process in ranks}), 2)
    assert not [verdict for verdict in verdicts if verdict.state in (FAILED, WARNING)]


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda ranks: [change_steps(process, draws=("data numpy=r",)) for process in ranks], "own random numbers"),
        (lambda ranks: validate(ranks, [("s1.0", "s2.0", "s3.0")] * 2), "separate validation data"),
        (lambda ranks: [change_steps(process, foreign=3) for process in ranks], "weights change"),
        (repeat_stream, "another order each epoch"),
    ],
    ids=["equal random numbers", "accuracy of the training data", "idle parameters", "stream in the same order"],
)
def test_what_may_be_intended_is_a_warning(change: Change, check: str) -> None:
    ranks = [build_process(rank) for rank in range(2)]
    change(ranks)
    verdicts = judge_training(Recording({process.rank: [process] for process in ranks}), 2)
    assert [verdict.check for verdict in verdicts if verdict.state == WARNING] == [check]
    assert not [verdict for verdict in verdicts if verdict.state == FAILED]


def test_loaders_of_ranks_are_compared_by_the_lines_that_built_them() -> None:
    """One rank has built another one before, for its validation."""
    ranks = [build_process(rank) for rank in range(2)]
    change_loaders(ranks[0], loader=1)
    change_steps(ranks[0], loaders=(1,))
    validation = LoaderRecord(loader=0, iteration=1, built="train.py:9", place="train.py:30", batches=1)
    ranks[0].loaders.append((4, validation))
    verdicts = {verdict.check: verdict for verdict in judge_training(Recording({0: [ranks[0]], 1: [ranks[1]]}), 2)}
    assert verdicts["equal numbers of steps"].state == PASSED


def test_epochs_that_ranks_leave_after_different_steps_fail() -> None:
    ranks = [build_process(rank) for rank in range(2)]
    ranks[1].loaders = [(begin and begin - 1, loader) for begin, loader in ranks[1].loaders]
    verdicts = {verdict.check: verdict for verdict in judge_training(Recording({0: [ranks[0]], 1: [ranks[1]]}), 2)}
    verdict = verdicts["equal numbers of steps"]
    assert (verdict.state, verdict.place) == (FAILED, "train.py:18")
    assert "rank 1 leaves epoch 1 after 3 steps, rank 0 after 4" in verdict.reason


def test_run_that_hung_fails_the_numbers_of_steps() -> None:
    ranks = [build_process(rank) for rank in range(2)]
    ranks[0].end = None
    recording = Recording({process.rank: [process] for process in ranks})
    (verdict,) = [
        verdict
        for verdict in judge_training(recording, 2, "no rank recorded anything for 45 s")
        if verdict.state == FAILED
    ]
    assert verdict.check == "equal numbers of steps"
    assert "rank 1 left the loop after 12 steps" in verdict.reason


def test_hang_of_all_ranks_has_the_line_that_the_launchers_name() -> None:
    ranks = [build_process(rank) for rank in range(2)]
    for process in ranks:
        process.end = None
    stall = "no step; rank 0 waits for other ranks in <module> (train.py:72), in all_reduce (distributed_c10d.py:3252)"
    verdicts = judge_training(Recording({process.rank: [process] for process in ranks}), 2, stall)
    verdict = next(verdict for verdict in verdicts if verdict.check == "equal numbers of steps")
    assert (verdict.state, verdict.place) == (FAILED, "train.py:72")


@pytest.mark.parametrize(("indices", "remedy"), [("i", "DistributedSampler"), ("", "every N-th sample")])
def test_remedy_for_equal_batches_names_a_sampler_only_if_samples_have_indices(indices: str, remedy: str) -> None:
    ranks = [build_process(rank) for rank in range(2)]
    share_batches(ranks)
    for process in ranks:
        change_steps(process, indices=indices)
    verdicts = judge_training(Recording({process.rank: [process] for process in ranks}), 2)
    assert remedy in next(verdict.remedy for verdict in verdicts if verdict.check == "different data")


CHECKS = (
    *("one group", "same parameters", "weights change", "gradients are shared", "same initial weights"),
    *("equal numbers of steps", "one writer", "finite", "resumes exactly"),
)


def test_one_of_any_failures_is_reported() -> None:
    for states in product((PASSED, FAILED), repeat=len(CHECKS)):
        verdicts = [CheckVerdict(check, state) for check, state in zip(CHECKS, states, strict=True)]
        reported = [verdict for verdict in omit_consequences(verdicts) if verdict.state == FAILED]
        assert bool(reported) == (FAILED in states), states


def test_stages_of_a_pipeline_have_parameters_of_their_own() -> None:
    ranks = [build_process(rank) for rank in range(2)]
    for process in ranks:
        change_model(process, wrapper="", names=(f"stage{process.rank}", "frozen"))
    verdicts = judge_training(Recording({process.rank: [process] for process in ranks}), 2)
    (verdict,) = [verdict for verdict in verdicts if verdict.check == "same parameters"]
    assert verdict.state == PASSED


def test_weights_that_never_change_prove_nothing_else() -> None:
    verdicts = [
        CheckVerdict("weights change", FAILED),
        CheckVerdict("gradients are shared", PASSED),
        CheckVerdict("resumes exactly", PASSED),
        CheckVerdict("one writer", PASSED),
    ]
    states = [verdict.state for verdict in omit_consequences(verdicts)]
    assert states == [FAILED, NOT_APPLICABLE, NOT_APPLICABLE, PASSED]


# -- interrupted runs


def build_resumed(begin: int = 9, *, weights: str = "w8") -> Recording:
    """Return a run that was killed after step 10, and continued at step ``begin`` with these weights."""
    ranks = {}
    for rank in range(2):
        killed = build_process(rank, steps=range(1, 11))
        killed.end = None
        process = build_process(rank, steps=range(begin, STEPS + 1), number=1)
        change_model(process, digests=(weights, "f"))
        ranks[rank] = [killed, process]
    return Recording(ranks)


def change_resumed(**values: Any) -> Recording:
    """Return a resumed run whose last processes differ; a callable gets the step of the run and the rank."""
    recording = build_resumed()
    for processes in recording.ranks.values():
        changes: dict[str, Any] = {name: _shift(value) for name, value in values.items()}
        change_steps(processes[1], **changes)
    return recording


def _shift(value: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    return lambda step, rank: value(step + 8, rank)


def load_on_one_rank() -> Recording:
    recording = build_resumed()
    change_model(recording.ranks[1][1], digests=("w0", "f"))
    return recording


def load_nothing() -> Recording:
    recording = build_resumed(1, weights="w0")
    for processes in recording.ranks.values():
        processes[1].loads.append(LoadRecord(path="/x/last.pt", place="train.py:16"))
    return recording


def lose_an_average() -> Recording:
    recording = build_resumed()
    recording.ranks[0][1].files.append(FileRecord(path="ema.pt", step=4, content="other"))
    recording.ranks[0][1].saves.append(SaveRecord(path="/copy/ema.pt", place="train.py:25", step=4))
    return recording


def make_one_step_more() -> Recording:
    recording = build_resumed()
    for rank, processes in recording.ranks.items():
        processes[1].steps += build_process(rank, steps=range(13, 14)).steps
    return recording


RESUMES: list[tuple[str, Recording, str]] = [
    ("begins anew", build_resumed(1, weights="w0"), "begins anew"),
    ("half of the weights", build_resumed(weights="w?"), "weights of no step"),
    ("scheduler", change_resumed(rates=lambda step, rank: (1.0,)), "scheduler"),
    (
        "epoch",
        change_resumed(batch=lambda step, rank: f"b{step - 8}.0", indices=lambda step, rank: f"i{step - 8}.0"),
        "begins anew with step 1",
    ),
    ("other order", change_resumed(indices=lambda step, rank: "x"), "another order"),
    ("augmentation", change_resumed(batch=lambda step, rank: "x"), "augmentation"),
    ("buffers", change_resumed(buffers=lambda step, rank: ("x",)), "buffers"),
    (
        "random state",
        change_resumed(loss=lambda step, rank: ("x",), draws=lambda step, rank: (f"model torch=x{step}",)),
        "the random state is not restored (the model",
    ),
    (
        "random numbers of the start",
        change_resumed(loss=lambda *_: ("x",), draws=lambda step, rank: (f"model torch=d{step - 8}.{rank}",)),
        "the model (dropout, noise, masks) of step 9 draws the numbers of step 1",
    ),
    (
        "random numbers of the data",
        change_resumed(batch=lambda *_: "x", draws=lambda step, rank: (f"model torch=d{step - 8}.{rank}",)),
        "the random state is not restored",
    ),
    (
        "queue in the loss",
        change_resumed(loss=lambda *_: ("x",), state=lambda step, rank: (f"queue=tensor:x{step}", "matrix=tensor:9")),
        "queue changes at each step and is not restored",
    ),
    (
        "sum of an epoch",
        change_resumed(loss=lambda *_: ("x",), state=lambda *_: ("matrix=tensor:9",)),
        "matrix changes at each step and is not restored",
    ),
    (
        "replay of samples",
        change_resumed(batch=lambda *_: "x", state=lambda step, rank: (f"queue=tensor:x{step}",)),
        "queue changes at each step and is not restored",
    ),
    (
        "own learning rate",
        change_resumed(
            rates=lambda *_: (1.0,), state=lambda step, rank: (f"mean=number:x{step}",), scheduled=lambda *_: ""
        ),
        "the scheduler is not saved",
    ),
    (
        "average in a dictionary",
        change_resumed(state=lambda step, rank: (f"shadow=weights:x{step}",)),
        "shadow changes at each step and is not restored",
    ),
    ("unknown", change_resumed(loss=lambda step, rank: ("x",)), "weights, batch and random state are equal"),
    (
        "output of a step that differs",
        change_resumed(
            loss=lambda step, rank: ("x",), state=lambda step, rank: (f"queue=tensor:x{step}",) if step > 9 else ()
        ),
        "weights, batch and random state are equal",
    ),
    ("optimizer", change_resumed(digests=lambda step, rank: (f"o{step}", "f")), "optimizer"),
    (
        "other gradients",
        change_resumed(digests=lambda step, rank: (f"o{step}", "f"), gradients=lambda *_: ("x", "")),
        "the gradients are not",
    ),
    ("steps repeated", make_one_step_more(), "13 steps"),
    ("one rank", load_on_one_rank(), "rank 0 has the weights of step 8, and rank 1 its initial weights"),
    ("nothing", load_nothing(), "reads last.pt at train.py:16, and no weight of it reaches the model"),
    ("module", change_resumed(beside=lambda step, rank: (f"Average:x{step}",)), "Average changes at each step"),
    ("average", lose_an_average(), "ema.pt of step 12 is not that of an uninterrupted run"),
]


def build_reference() -> Recording:
    ranks = {rank: [build_process(rank)] for rank in range(2)}
    for step in (8, 12):
        ranks[0][0].files.append(FileRecord(path="ema.pt", step=step, content=f"e{step}"))
        ranks[0][0].files.append(FileRecord(path="log.pt", step=step, content=f"{step}"))
    return Recording(ranks)


def test_exact_resume_passes() -> None:
    verdict = judge_resume(build_reference(), build_reference(), build_resumed())

    assert (verdict.state, verdict.place) == (PASSED, "")
    assert "after step 8" in verdict.reason


@pytest.mark.parametrize(("resumed", "cause"), [row[1:] for row in RESUMES], ids=[row[0] for row in RESUMES])
def test_inexact_resume_names_the_cause_and_the_save(resumed: Recording, cause: str) -> None:
    verdict = judge_resume(build_reference(), build_reference(), resumed)

    assert (verdict.state, verdict.place) == (FAILED, "train.py:25")
    assert cause in verdict.reason
    assert bool(verdict.remedy) is (" are " not in cause)


def test_stream_that_continues_with_another_epoch_names_its_attribute() -> None:
    reference = build_reference()
    resumed = change_resumed(batch=lambda *_: "x", indices=lambda *_: "")
    for recording, epoch in ((reference, 2), (resumed, 0)):
        for processes in recording.ranks.values():
            for process in processes:
                change_steps(process, indices="")
                change_loaders(process, state=(f"dataset.epoch={epoch}",), sampler_built="")

    verdict = judge_resume(reference, reference, resumed)

    assert "dataset.epoch is 0, and was 2 in the uninterrupted run" in verdict.reason
    assert verdict.remedy == "save the epoch, begin there, and set loader.dataset.epoch"


def test_learning_rate_of_an_own_counter_names_the_counter() -> None:
    reference = build_reference()
    resumed = change_resumed(rates=lambda *_: (1.0,), state=lambda step, rank: (f"mean=number:x{step}",))
    for recording in (reference, resumed):
        for processes in recording.ranks.values():
            for process in processes:
                change_steps(process, scheduled="")

    assert "mean changes at each step and is not restored" in judge_resume(reference, reference, resumed).reason


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (lambda step, rank: (f"queue=tensor:x{step}",), WARNING),
        (lambda step, rank: (f"queue=tensor:x{step}",) if step > 9 else (), WARNING),
        (lambda step, rank: (f"queue=tensor:{'x' if step < 11 else 'q'}{step}",), PASSED),
        (lambda step, rank: (f"mean=number:x{step}",), PASSED),
        (lambda step, rank: (f"matrix=tensor:x{step}",), PASSED),
        (lambda step, rank: (), PASSED),
    ],
    ids=["queue", "queue of the first step", "queue that is full again", "number", "sum of an epoch", "not there"],
)
def test_lost_tensors_on_which_nothing_depends_are_a_warning(state: Callable[..., Any], expected: str) -> None:
    verdict = judge_resume(build_reference(), build_reference(), change_resumed(state=state))

    assert (verdict.state, "queue" in verdict.reason) == (expected, expected == WARNING)


def test_values_that_differ_between_uninterrupted_runs_are_not_compared() -> None:
    repeat = build_reference()
    for processes in repeat.ranks.values():
        change_steps(processes[0], state=lambda step, rank: (f"queue=tensor:t{step}",))

    resumed = change_resumed(state=lambda step, rank: (f"queue=tensor:x{step}",))

    assert judge_resume(build_reference(), repeat, resumed).state == PASSED


def test_random_numbers_of_the_start_fail_a_script_whose_losses_cannot_be_compared() -> None:
    repeat = build_reference()
    for processes in repeat.ranks.values():
        change_steps(processes[0], loss=("other",), digests=("other", "f"))

    repeated = change_resumed(draws=lambda step, rank: (f"model torch=d{step - 8}.{rank}",))

    assert judge_resume(build_reference(), repeat, build_resumed()).state == PASSED
    assert "draws the numbers of step 1" in judge_resume(build_reference(), repeat, repeated).reason


def add_generator(recording: Recording, begin: int = 9) -> Recording:
    """Let a second optimizer step after the one that ends an iteration: its first step belongs to the next one."""
    for processes in recording.ranks.values():
        for process in processes:
            first = begin if process.number else 1
            weights = f"g{first - 1}"
            process.models.append(dataclasses.replace(process.models[0], names=("weight",), digests=(weights,)))
            process.steps = [
                dataclasses.replace(
                    step,
                    digests=(*step.digests, f"g{first + step.step - 2}"),
                    loss=step.loss if step.step == 1 else ("generator", *step.loss),
                    batch=step.batch if step.step == 1 else f"{step.batch} and noise",
                )
                for step in process.steps
            ]
    return recording


def test_exact_resume_of_a_script_with_two_optimizers_passes() -> None:
    reference = add_generator(build_reference())

    assert judge_resume(reference, reference, add_generator(build_resumed())).state == PASSED
    assert judge_resume(reference, reference, add_generator(change_resumed(loss=lambda *_: ("x",)))).state == FAILED


def test_weights_that_never_change_are_those_of_the_last_save() -> None:
    reference = build_reference()
    resumed = build_resumed(5, weights="w")
    for processes in [*reference.ranks.values(), *resumed.ranks.values()]:
        for process in processes:
            change_steps(process, digests=("w", "f"))
        change_steps(processes[-1], batch=lambda step, rank: "x")

    verdict = judge_resume(reference, reference, resumed)

    assert verdict.state == FAILED
    assert "resumed after step 8" in verdict.reason


def test_steps_after_the_epoch_of_a_stream_are_not_compared() -> None:
    reference = build_reference()
    for processes in reference.ranks.values():
        processes[0].loaders = [(begin + 2, replace_batches(loader)) for begin, loader in processes[0].loaders]
    later = change_resumed(batch=lambda step, rank: f"b{step}.{rank}" if step < 11 else "of the next epoch")
    earlier = change_resumed(batch=lambda step, rank: f"b{step}.{rank}" if step < 10 else "unknown")

    assert judge_resume(reference, reference, later).state == PASSED
    assert judge_resume(reference, reference, earlier).state == FAILED


def replace_batches(loader: LoaderRecord) -> LoaderRecord:
    """Return the record of a loader without a length."""
    return dataclasses.replace(loader, batches=None)


def test_steps_of_ranks_are_not_compared_if_the_script_uses_join() -> None:
    reference = build_reference()
    for rank, processes in reference.ranks.items():
        change_steps(processes[0], joins=True, gradients=(f"own {rank}", ""), buffers=(f"own {rank}",))

    verdicts = judge_training(reference, 2)

    assert not [verdict for verdict in verdicts if verdict.state == FAILED]
    assert judge_resume(reference, reference, build_resumed()).state == NOT_APPLICABLE


def test_randomness_is_named_and_the_rest_is_compared() -> None:
    repeat = build_reference()
    for processes in repeat.ranks.values():
        change_steps(processes[0], since=3, loss=("random",), digests=("random", "f"))

    exact = judge_resume(build_reference(), repeat, change_resumed(loss=lambda step, rank: ("x",)))
    inexact = judge_resume(build_reference(), repeat, change_resumed(rates=lambda step, rank: (1.0,)))

    assert exact.state == PASSED
    assert "step 3" in exact.reason
    assert "manual_seed" in exact.reason
    assert inexact.state == FAILED


@pytest.mark.parametrize(("reason", "state"), [(COMPLETED, FAILED), (LIMIT, NOT_APPLICABLE)])
def test_missing_checkpoint_fails_a_script_that_had_the_time_to_save(reason: str, state: str) -> None:
    recording = build_reference()
    for processes in recording.ranks.values():
        processes[0].saves.clear()
        processes[0].end = EndRecord(reason=reason)
        processes[0].loaders = processes[0].loaders[:1]

    assert judge_resume(recording, None, None).state == state


@pytest.mark.parametrize(
    ("signalled", "seconds", "state"),
    [(11.5, 31.0, FAILED), (12.5, 2.0, PASSED), (11.5, 2.0, PASSED), (None, 0.0, NOT_APPLICABLE)],
    ids=["ignored", "saved before", "saved after", "ended before"],
)
def test_stop(signalled: float | None, seconds: float, state: str) -> None:
    assert judge_stop(build_reference(), signalled, seconds).state == state


def test_stop_without_a_save_passes_and_reports_the_steps_to_repeat() -> None:
    recording = build_reference()
    for processes in recording.ranks.values():
        processes[0].steps = processes[0].steps[:11]
        processes[0].saves = processes[0].saves[:2]

    verdict = judge_stop(recording, 11.5, 1.0)

    assert verdict.state == PASSED
    assert "here 3" in verdict.reason


def test_stop_within_a_save_fails() -> None:
    recording = build_reference()
    path = recording.saves[-1].path

    verdict = judge_stop(recording, 11.5, 2.0, torn=path)

    assert (verdict.state, verdict.place) == (FAILED, "train.py:25")
    assert path in verdict.reason


def test_stop_that_the_script_ignores_fails() -> None:
    recording = build_reference()
    for processes in recording.ranks.values():
        processes[0].end = EndRecord(reason=LIMIT)

    assert judge_stop(recording, 11.5, 8.0).state == FAILED


def continue_after_stop(begin: int, weights: str) -> tuple[Recording, Recording]:
    """Return a run that ended with exit code 0 at SIGTERM after step 10, and the next start from its folder."""
    stopped = {rank: [build_process(rank, steps=range(1, 11))] for rank in range(2)}
    continued = {rank: [build_process(rank, steps=range(begin, begin + 2))] for rank in range(2)}
    for processes in continued.values():
        change_model(processes[0], digests=(weights, "f"))
        processes[0].end = EndRecord(reason=LIMIT)
    return Recording(stopped), Recording(continued)


@pytest.mark.parametrize(
    ("begin", "weights", "is_exact", "fails"),
    [(9, "w8", True, False), (11, "w10", True, False), (9, "w10", True, True), (9, "w10", False, False)],
    ids=["last save", "save at the signal", "steps repeated", "inexact after each end"],
)
def test_end_with_code_0_at_a_signal_fails_if_the_next_start_does_not_continue(
    begin: int, weights: str, is_exact: bool, fails: bool
) -> None:
    stopped, continued = continue_after_stop(begin, weights)

    verdict = judge_continuation(build_reference(), stopped, continued, is_exact=is_exact)

    assert (verdict is not None) is fails


def test_end_with_code_0_at_a_signal_fails_if_the_next_start_makes_no_step() -> None:
    stopped, _ = continue_after_stop(9, "w8")

    verdict = judge_continuation(build_reference(), stopped, Recording({}), is_exact=True)

    assert verdict is not None
    assert (verdict.state, verdict.place) == (FAILED, "train.py:25")
    assert "after step 10 of 12" in verdict.reason
    assert "sys.exit(143)" in verdict.remedy


@pytest.mark.parametrize(("begin", "state"), [(5.5, FAILED), (12.5, PASSED)], ids=["at the same time", "in turn"])
def test_processes_of_a_rank_that_train_at_the_same_time_fail(begin: float, state: str) -> None:
    recording = build_reference()
    later = build_process(1, number=1)
    later.start = dataclasses.replace(later.start, time=begin)
    recording.ranks[1].append(later)

    verdict = judge_training(recording, 2)[0]

    assert (verdict.check, verdict.state) == ("one group", state)


def test_consequence_of_a_failed_check_is_not_reported() -> None:
    verdicts = [
        CheckVerdict(check, state)
        for check, state in (
            ("one group", FAILED),
            ("different data", FAILED),
            ("another order each epoch", FAILED),
            ("stops in time", PASSED),
        )
    ]

    states = [verdict.state for verdict in omit_consequences(verdicts)]

    assert states == [FAILED, NOT_APPLICABLE, FAILED, PASSED]


def test_any_failures_leave_one_reported_that_explains_those_that_are_not() -> None:
    names = [verdict.check for verdict in judge_training(build_reference(), 2)] + ["resumes exactly", "stops in time"]
    for states in product((FAILED, PASSED), repeat=len(names)):
        given = [CheckVerdict(check, state) for check, state in zip(names, states, strict=True)]
        judged = omit_consequences(given)
        reported = {verdict.check for verdict in judged if verdict.state == FAILED}
        omitted = {verdict.reason for verdict in judged if verdict.state == NOT_APPLICABLE}
        assert bool(reported) is (FAILED in states)
        assert omitted <= {f"repair `{check}` first" for check in reported}


# -- files


def test_records_are_read_from_files_that_contain_anything(tmp_path: Path) -> None:
    process = build_process(1)
    records: Sequence[Any] = [process.start, *process.models, *process.steps, *process.saves, process.end]
    lines = [json.dumps(to_json(record)) for record in records]
    rubbish = ["{", "[" * 100_000, "3", '{"event": 7}', '{"event": "step", "step": "x", "digests": 4}']
    (tmp_path / "1.0.jsonl").write_text("\n".join([*rubbish, *lines]), encoding="utf-8")
    (tmp_path / "x.jsonl").write_text("{}", encoding="utf-8")

    recording = read_recording(tmp_path)

    assert list(recording.ranks) == [1]
    read = recording.ranks[1][0]
    assert read.steps[1:] == process.steps
    assert read.facts == process.facts
    assert read.end == process.end
