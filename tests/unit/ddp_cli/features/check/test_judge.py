"""The verdicts on recorded runs: each fault alone in records of a right script."""

import dataclasses
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ddp_cli.features.check.data import list_iterations
from ddp_cli.features.check.judge import omit_consequences
from ddp_cli.features.check.recordings import Process, Recording, read_recording
from ddp_cli.features.check.training import judge_training
from ddp_cli.features.check.verdict import FAILED, NOT_APPLICABLE, PASSED, WARNING, CheckVerdict
from ddp_pod.contract.records import to_json
from ddp_pod.features.check.contract import ERROR, BatchRecord, EndRecord, LoaderRecord, RestoreRecord
from tests.unit.ddp_cli.features.check.recorded_runs import (
    EPOCH,
    Change,
    build_process,
    build_reference,
    change_loaders,
    change_model,
    change_steps,
)


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


def share_samples(ranks: list[Process], *, shared: range = range(EPOCH)) -> None:
    """Let both ranks read the same samples in these batches of each epoch, beside others of their own."""
    for process in ranks:
        process.batches = [
            dataclasses.replace(
                batch, samples=(*([f"s{index}"] if index % EPOCH in shared else []), f"{index}.{process.rank}")
            )
            for index, batch in enumerate(process.batches)
        ]


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
        change_model(process, trainable=(1, 1), modules=(" train.py:10",))  # which was built before the optimizer
        change_steps(process, gradients=lambda step, rank: (f"g{step}", f"h{step}"), unoptimized=("frozen",), foreign=2)


def clear_gradients_before_the_step(ranks: list[Process]) -> None:
    for process in ranks:
        change_model(process, trainable=(1, 1))
        change_steps(process, without_gradient=("frozen",), cleared=("frozen",))


def copy_own_weights(ranks: list[Process]) -> None:
    for process in ranks:
        change_steps(process, copies=(f"train.py:11 Encoder:{process.rank}", "train.py:12 Equal:1"))


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


def keep_references_in_a_variable(ranks: list[Process]) -> None:
    ranks[0].saves[-1] = dataclasses.replace(ranks[0].saves[-1], taken=4, taken_name="best")


def restore_references(ranks: list[Process]) -> None:
    ranks[0].restores.append(RestoreRecord(place="train.py:40", step=12, taken=4, taken_place="train.py:28"))


def leave_shards_unsynchronized(ranks: list[Process]) -> None:
    for process in ranks:
        change_model(process, wrapper="FSDPModule", sharded=(1, 1))
        change_steps(process, unsynchronized=True)


def register_nested_modules(ranks: list[Process]) -> None:
    """Register adapters in other orders: the line of the adapter counts, not that of the layer in it."""
    modules = ("adapters train.py:8", "adapters.a train.py:9", "adapters.a.down net.py:1")
    for process, names in zip(ranks, (("a", "b"), ("b", "a")), strict=True):
        change_model(process, names=tuple(f"adapters.{name}.down.weight" for name in names), modules=modules)


def build_a_module_late(ranks: list[Process]) -> None:
    modules = ("adapters train.py:8", "adapters.a train.py:9", "adapters.a.down net.py:1")
    for process in ranks:
        names = ("weight", "adapters.a.down.weight")
        change_model(process, names=names, trainable=(1, 1), modules=modules, late=("adapters.a", "adapters.a.down"))
        change_steps(process, unoptimized=names[1:], gradients=lambda step, rank: (f"g{step}", f"h{step}"))


def cycle_batches(ranks: list[Process]) -> None:
    for process in ranks:
        process.loaders = process.loaders[:1]
        process.batches = process.batches[:EPOCH]
        change_steps(process, since=EPOCH + 1, cycled=True, loaders=(), indices="")


def begin_with_other_weights(ranks: list[Process]) -> None:
    change_model(ranks[1], digests=("x", "f"))
    change_steps(ranks[1], digests=("x", "f"))


def replace_after_the_wrapper(ranks: list[Process]) -> None:
    leave_unwrapped(ranks)
    for process in ranks:
        change_model(process, unshared=("weight",))


def call_without_the_wrapper(ranks: list[Process]) -> None:
    leave_unwrapped(ranks)
    for process in ranks:
        change_model(process, bypassed="train.py:11")


def train_loose_parameters(ranks: list[Process]) -> None:
    leave_unwrapped(ranks)
    for process in ranks:
        change_model(process, built="", places=(), loose=True)


def train_beside_a_skeleton(ranks: list[Process]) -> None:
    """Call a module whose parameters torch.func replaces by others, which the optimizer has."""
    for process in ranks:
        skeleton = dataclasses.replace(process.models[0], names=("skeleton",), digests=("s",), trainable=(1,))
        change_model(process, loose=True, built="", wrapper="")
        process.models.append(skeleton)
        process.steps = [
            dataclasses.replace(
                step, digests=(*step.digests, "s"), gradients=(*step.gradients, ""), without_gradient=("skeleton",)
            )
            for step in process.steps
        ]


def unfreeze_late(ranks: list[Process]) -> None:
    for process in ranks:
        change_steps(process, since=5, gradients=("g", f"own {process.rank}"), digests=("w", f"own {process.rank}"))


def build_loader_in_each_epoch(ranks: list[Process], content: str = "b{number}.{rank}") -> None:
    """Deliver the same batches by a new DataLoader in each epoch."""
    repeat_epochs(ranks)
    for process in ranks:
        process.loaders = [
            (begin, dataclasses.replace(record, loader=number, iteration=1, epoch=0, setter="sampler"))
            for number, (begin, record) in enumerate(process.loaders)
        ]
        process.batches = [
            dataclasses.replace(
                batch,
                loader=batch.iteration - 1,
                iteration=1,
                content=content.format(number=index % EPOCH, rank=process.rank, index=index),
            )
            for index, batch in enumerate(process.batches)
        ]
        process.steps = [
            dataclasses.replace(step, loaders=(index // EPOCH,)) for index, step in enumerate(process.steps)
        ]


def leave_early(ranks: list[Process]) -> None:
    """End a rank after its second epoch; its peer fails in the third one."""
    for process in ranks:
        process.steps = process.steps[: 2 * EPOCH]
        process.loaders = process.loaders[: 3 - process.rank]
        process.batches = process.batches[: 2 * EPOCH + 1 - process.rank]
    ranks[0].end = EndRecord(step=2 * EPOCH, reason=ERROR)


def set_own_rates(ranks: list[Process], **values: Any) -> None:
    change_steps(ranks[1], rates=(0.5,), **values)


FAULTS: list[tuple[str, Change, str, str]] = [
    ("left early", leave_early, "equal numbers of steps", "train.py:22"),
    ("replaced after the wrapper", replace_after_the_wrapper, "gradients are shared", "net.py:1"),
    ("beside the wrapper", call_without_the_wrapper, "gradients are shared", "train.py:20"),
    ("loose parameters", train_loose_parameters, "gradients are shared", "train.py:20"),
    ("unfrozen late", unfreeze_late, "gradients are shared", "train.py:10"),
    ("new loader in each epoch", build_loader_in_each_epoch, "another order each epoch", "train.py:18"),
    (
        "rate of a rank",
        lambda ranks: [set_own_rates(ranks), change_steps(ranks[0], optimizer="train.py:13")],
        "gradients are shared",
        "train.py:13",
    ),
    (
        "schedule of a rank",
        lambda ranks: [set_own_rates(ranks, since=4), change_steps(ranks[0], scheduled="train.py:24")],
        "gradients are shared",
        "train.py:24",
    ),
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
    ("cleared gradients", clear_gradients_before_the_step, "weights change", "train.py:22"),
    ("copy of own weights", copy_own_weights, "same initial weights", "train.py:11"),
    ("other order", register_in_another_order, "same parameters", "net.py:1"),
    ("own learning rate", schedule_on_own_metric, "gradients are shared", "train.py:33"),
    ("no_sync", skip_synchronization, "gradients are shared", "train.py:21"),
    ("reference", keep_a_reference, "saved weights", "train.py:28"),
    ("references in a variable", keep_references_in_a_variable, "saved weights", "train.py:25"),
    ("references that are restored", restore_references, "saved weights", "train.py:28"),
    ("shards", leave_shards_unsynchronized, "gradients are shared", "train.py:21"),
    ("names of nested modules", register_nested_modules, "same parameters", "train.py:9"),
    ("module after the optimizer", build_a_module_late, "weights change", "train.py:9"),
    ("cycle", cycle_batches, "another order each epoch", "train.py:18"),
    ("epoch set on a rank", lambda ranks: never_set_epoch(ranks[1:]), "another order each epoch", "train.py:18"),
    (
        "uneven data",
        lambda ranks: [change_loaders(ranks[1], batches=3), ranks[1].steps.pop()],
        "equal numbers of steps",
        "train.py:12",
    ),
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
        lambda ranks: share_samples(ranks, shared=range(EPOCH - 1, EPOCH)),
        lambda ranks: build_loader_in_each_epoch(ranks, content="b{index}.{rank}"),
        train_beside_a_skeleton,
    ],
    ids=[
        "sequential data",
        "own validation data",
        "own random numbers",
        "last batch filled up",
        "other data",
        "skeleton",
    ],
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
        (share_samples, "different data"),
        (repeat_stream, "another order each epoch"),
    ],
    ids=[
        "equal random numbers",
        "accuracy of the training data",
        "idle parameters",
        "own orders of all data",
        "stream in the same order",
    ],
)
def test_what_may_be_intended_is_a_warning(change: Change, check: str) -> None:
    ranks = [build_process(rank) for rank in range(2)]
    change(ranks)
    verdicts = judge_training(Recording({process.rank: [process] for process in ranks}), 2)
    assert [verdict.check for verdict in verdicts if verdict.state == WARNING] == [check]
    assert not [verdict for verdict in verdicts if verdict.state == FAILED]


def test_loader_with_one_batch_in_each_epoch_trains() -> None:
    process = build_process(0)
    process.steps = [
        dataclasses.replace(step, loaders=(0, 1) if step.step > 1 else (0,)) for step in process.steps[:EPOCH]
    ]
    process.loaders = [(number, LoaderRecord(loader=0, iteration=number + 1)) for number in range(EPOCH)]
    process.loaders += [(number, LoaderRecord(loader=1, iteration=number)) for number in range(1, EPOCH)]
    trained, validated = list_iterations(process)
    assert [iteration.steps for iteration in trained] == [1] * EPOCH
    assert [iteration.steps for iteration in validated] == [0] * (EPOCH - 1)


def test_loaders_of_ranks_are_compared_by_the_lines_that_built_them() -> None:
    """One rank has built another one before, for its validation."""
    ranks = [build_process(rank) for rank in range(2)]
    change_loaders(ranks[0], loader=1)
    change_steps(ranks[0], loaders=(1,))
    validation = LoaderRecord(loader=0, iteration=1, built="train.py:9", place="train.py:30", batches=1)
    ranks[0].loaders.append((4, validation))
    verdicts = {verdict.check: verdict for verdict in judge_training(Recording({0: [ranks[0]], 1: [ranks[1]]}), 2)}
    assert verdicts["equal numbers of steps"].state == PASSED


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        (call_without_the_wrapper, "without the DistributedDataParallel of train.py:11", "call the wrapped model"),
        (unfreeze_late, "built before they got requires_grad", "set requires_grad before"),
        (begin_with_other_weights, "different weight", "change weights before DistributedDataParallel wraps"),
        (lambda ranks: set_own_rates(ranks), "from step 1 on", "the same learning rate on all ranks"),
        (
            lambda ranks: set_own_rates(ranks, since=4, scheduled="train.py:24"),
            "from step 4 on",
            "equally often on all ranks",
        ),
        (
            lambda ranks: set_own_rates(ranks, since=4, scheduled="train.py:24", measured=True),
            "from step 4 on",
            "the same metric",
        ),
        (
            lambda ranks: [share_batches(ranks), *(process.loaders.clear() for process in ranks)],
            "the same batch",
            "draw other samples on each rank",
        ),
    ],
)
def test_remedy_fits_the_cause(change: Change, reason: str, remedy: str) -> None:
    ranks = [build_process(rank) for rank in range(2)]
    change(ranks)
    verdicts = judge_training(Recording({process.rank: [process] for process in ranks}), 2)
    (failed,) = [verdict for verdict in omit_consequences(verdicts) if verdict.state == FAILED]
    assert reason in failed.reason
    assert remedy in failed.remedy


def test_loss_that_is_never_finite_is_the_cause_alone() -> None:
    ranks = [build_process(rank) for rank in range(2)]
    for process in ranks:
        change_steps(process, loss=("-inf",), not_finite="the loss is -inf")
    verdicts = judge_training(Recording({process.rank: [process] for process in ranks}), 2)
    assert [verdict.check for verdict in verdicts if verdict.state == FAILED] == ["finite"]


def test_warning_that_a_failure_explains_is_not_reported() -> None:
    failure = CheckVerdict("separate validation data", FAILED)
    first, second = omit_consequences([CheckVerdict("different data", WARNING), failure])
    assert (first.state, second) == (NOT_APPLICABLE, failure)


def test_epochs_that_ranks_leave_after_different_steps_fail() -> None:
    ranks = [build_process(rank) for rank in range(2)]
    ranks[1].loaders = [(begin and begin - 1, loader) for begin, loader in ranks[1].loaders]
    verdicts = {verdict.check: verdict for verdict in judge_training(Recording({0: [ranks[0]], 1: [ranks[1]]}), 2)}
    verdict = verdicts["equal numbers of steps"]
    assert (verdict.state, verdict.place) == (FAILED, "train.py:18")
    assert "rank 1 leaves epoch 1 after 3 steps, rank 0 after 4" in verdict.reason


def test_epochs_with_dataloaders_of_their_own_are_compared() -> None:
    ranks = [build_process(rank) for rank in range(2)]
    for rank, process in enumerate(ranks):
        ends = [0, EPOCH - rank, 2 * EPOCH - rank]  # rank 1 leaves the first epoch one step earlier
        process.loaders = [
            (begin, dataclasses.replace(process.loaders[0][1], loader=number, iteration=1))
            for number, begin in enumerate(ends)
        ]
        for index, step in enumerate(process.steps):
            process.steps[index] = dataclasses.replace(step, loaders=(sum(index >= end for end in ends) - 1,))
    verdicts = {verdict.check: verdict for verdict in judge_training(Recording({0: [ranks[0]], 1: [ranks[1]]}), 2)}
    assert verdicts["equal numbers of steps"].state == FAILED
    assert "rank 1 leaves epoch 1 after 3 steps, rank 0 after 4" in verdicts["equal numbers of steps"].reason


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
