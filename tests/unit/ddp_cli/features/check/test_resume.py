"""The verdicts on interrupted runs: each fault alone in records of a right script."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from ddp_cli.features.check.recordings import Recording
from ddp_cli.features.check.resume import judge_continuation, judge_resume, judge_stop
from ddp_cli.features.check.training import judge_training
from ddp_cli.features.check.verdict import FAILED, NOT_APPLICABLE, PASSED, WARNING
from ddp_pod.features.check.contract import (
    COMPLETED,
    LIMIT,
    EndRecord,
    FileRecord,
    LoaderRecord,
    LoadRecord,
    SaveRecord,
)
from tests.unit.ddp_cli.features.check.recorded_runs import (
    STEPS,
    build_process,
    build_reference,
    change_loaders,
    change_model,
    change_steps,
)


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


def lose_the_optimizer_on_one_rank() -> Recording:
    recording = build_resumed()
    change_steps(recording.ranks[1][1], digests=lambda step, rank: (f"o{step}", "f"))
    change_steps(recording.ranks[0][1], since=2, loss=("x",))
    return recording


def load_in_another_order() -> Recording:
    recording = change_resumed(digests=lambda step, rank: (f"o{step}", "f"))
    for killed, process in recording.ranks.values():
        change_steps(killed, optimized=("weight", "frozen"))
        change_steps(process, optimized=("frozen", "weight"))
    return recording


RESUMES: list[tuple[str, Recording, str]] = [
    ("starts again", build_resumed(1, weights="w0"), "starts again"),
    ("half of the weights", build_resumed(weights="w?"), "weights of no step"),
    ("scheduler", change_resumed(rates=lambda step, rank: (1.0,)), "scheduler"),
    (
        "epoch",
        change_resumed(batch=lambda step, rank: f"b{step - 8}.0", indices=lambda step, rank: f"i{step - 8}.0"),
        "starts again with step 1",
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
    (
        "target network",
        change_resumed(loss=lambda *_: ("x",), beside=lambda step, rank: (f"Average:{step}", "Teacher:x")),
        "Teacher beside the model is not restored",
    ),
    (
        "scaler",
        change_resumed(scales=lambda *_: ("1024.0 0.0",), loss=lambda *_: ("x",)),
        "the scale of the gradients differs at step 9: the state of the GradScaler is not restored",
    ),
    (
        "batches of another rank",
        change_resumed(batch=lambda step, rank: f"b{step}.0", gradients=lambda *_: ("x", "")),
        "rank 1 continues with the batches of rank 0",
    ),
    ("unknown", change_resumed(loss=lambda step, rank: ("x",)), "weights, batch and random state are equal"),
    (
        "output of a step that differs",
        change_resumed(
            loss=lambda step, rank: ("x",), state=lambda step, rank: (f"queue=tensor:x{step}",) if step > 9 else ()
        ),
        "weights, batch and random state are equal",
    ),
    (
        "generator",
        change_resumed(
            batch=lambda *_: "x", state=lambda step, rank: (f"noise=generator:n{step - 8}", f"queue=tensor:q{step - 8}")
        ),
        "noise changes at each step and is not restored",
    ),
    ("optimizer of a rank", lose_the_optimizer_on_one_rank(), "differs at step 9: the optimizer's state is not that"),
    ("order of the optimizer", load_in_another_order(), "the optimizer has frozen where the process that saved has"),
    ("optimizer", change_resumed(digests=lambda step, rank: (f"o{step}", "f")), "optimizer"),
    (
        "other gradients",
        change_resumed(digests=lambda step, rank: (f"o{step}", "f"), gradients=lambda *_: ("x", "")),
        "the gradients are not",
    ),
    ("steps repeated", make_one_step_more(), "13 steps"),
    ("one rank", load_on_one_rank(), "rank 0 has the weights of step 8, and rank 1 its initial weights"),
    ("nothing", load_nothing(), "reads last.pt at train.py:16, and the model has its initial weights"),
    ("module", change_resumed(beside=lambda step, rank: (f"Average:x{step}",)), "Average changes at each step"),
    ("average", lose_an_average(), "ema.pt of step 12 is not that of an uninterrupted run"),
]


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


def test_state_that_another_rank_has_restored_is_saved() -> None:
    resumed = lose_the_optimizer_on_one_rank()
    for rank, path in ((0, "model.pt"), (0, "optimizer.pt"), (1, "model.pt")):
        resumed.ranks[rank][1].loads.append(LoadRecord(path=path, place=f"train.py:{path}"))
    verdict = judge_resume(build_reference(), build_reference(), resumed)
    assert verdict.place == "train.py:optimizer.pt"
    assert verdict.reason.endswith("on rank 1 alone")
    assert verdict.remedy == "load the optimizer's state, and a scheduler's, on all ranks, as rank 0 does"


def test_batches_without_indices_are_compared_by_their_contents() -> None:
    resumed = change_resumed(indices=lambda *_: "")
    assert judge_resume(build_reference(), build_reference(), resumed).state == PASSED


def test_new_start_is_named_although_the_first_step_has_changed_nothing() -> None:
    reference = build_reference()
    resumed = build_resumed(1, weights="w0")
    for recording in (reference, resumed):
        for processes in recording.ranks.values():
            for process in processes:
                process.steps[0] = dataclasses.replace(process.steps[0], digests=("w0", "f"))
    assert "starts again at step 1" in judge_resume(reference, reference, resumed).reason


def test_process_that_was_killed_with_its_peer_before_its_first_step_is_left_out() -> None:
    resumed = build_resumed()
    killed = build_process(1, steps=range(9, 9), number=1)
    killed.end = None
    resumed.ranks[1].insert(1, killed)
    assert judge_resume(build_reference(), build_reference(), resumed).state == PASSED


def test_value_that_begins_anew_is_named_alone() -> None:
    """Others are what a step computes from it."""
    resumed = change_resumed(
        loss=lambda *_: ("x",), state=lambda step, rank: (f"mean=number:x{step}", f"queue=tensor:q{step - 8}")
    )
    reason = judge_resume(build_reference(), build_reference(), resumed).reason
    assert "queue changes at each step and is not restored" in reason


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
    assert verdict.remedy == "save the epoch, start there, and set loader.dataset.epoch"


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


def test_state_of_an_optimizer_that_steps_late_is_named_by_its_parameters() -> None:
    reference = add_generator(build_reference())
    resumed = add_generator(change_resumed(loss=lambda step, rank: (f"l{step}.{rank}" if step == 9 else "x",)))
    for processes in resumed.ranks.values():
        change_steps(processes[1], since=2, digests=lambda step, rank: (f"w{step + 8}", "f", "other"))
    verdict = judge_resume(reference, reference, resumed)
    assert "the loss differs at step 10: the optimizer's state is not that of" in verdict.reason


def test_exact_resume_of_a_script_with_two_optimizers_and_one_loss_passes() -> None:
    def split(recording: Recording) -> Recording:
        for processes in recording.ranks.values():
            for process in processes:
                process.steps = [
                    dataclasses.replace(step, rates=step.rates if step.step == 1 else (0.5, *step.rates))
                    for step in process.steps
                ]
        return recording

    reference = split(build_reference())
    assert judge_resume(reference, reference, split(build_resumed())).state == PASSED


def test_exact_resume_of_a_model_that_is_wrapped_twice_passes() -> None:
    reference = build_reference()
    for process in reference.firsts:
        process.models.append(process.models[0])
        process.steps = [dataclasses.replace(step, digests=step.digests * 2) for step in process.steps]
    assert judge_resume(reference, reference, build_resumed()).state == PASSED


def test_exact_resume_of_loose_parameters_passes() -> None:
    reference = build_reference()
    resumed = build_resumed()
    for recording in (reference, resumed):
        for processes in recording.ranks.values():
            for process in processes:
                skeleton = dataclasses.replace(process.models[0], digests=(f"of process {process.number}", "f"))
                process.models[0] = dataclasses.replace(process.models[0], loose=True)
                process.models.append(skeleton)
                process.steps = [dataclasses.replace(step, digests=(*step.digests, "s", "f")) for step in process.steps]
    assert judge_resume(reference, reference, resumed).state == PASSED


def test_parts_of_sharded_weights_differ_between_ranks_after_a_restart() -> None:
    """They are equal before the first step, as those of a layer whose weights begin with 1."""
    reference = build_reference()
    resumed = build_resumed()
    for recording in (reference, resumed):
        for processes in recording.ranks.values():
            for process in processes:
                change_model(process, sharded=(1, 0))
                process.steps = [
                    dataclasses.replace(step, digests=(f"{step.digests[0]}.{process.rank}", "f"))
                    for step in process.steps
                ]
                if process.number:
                    change_model(process, digests=(f"{process.models[0].digests[0]}.{process.rank}", "f"))
    assert judge_resume(reference, reference, resumed).state == PASSED


def test_optimizer_of_a_former_model_is_named() -> None:
    resumed = change_resumed(digests=lambda *_: ("x", "f"), foreign=lambda *_: 2)
    verdict = judge_resume(build_reference(), build_reference(), resumed)
    assert verdict.state == FAILED
    assert "the optimizer has 2 parameters of no model" in verdict.reason
    assert "build the optimizer after" in verdict.remedy


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


def test_later_restart_of_a_stream_whose_epochs_were_longer_is_not_compared() -> None:
    reference = build_reference()
    for processes in reference.ranks.values():
        processes[0].loaders = [(begin + 2, replace_batches(loader)) for begin, loader in processes[0].loaders]
    resumed = change_resumed(batch=lambda step, rank: f"b{step}.{rank}" if step < 11 else "of the next epoch")
    for rank, processes in resumed.ranks.items():
        again = build_process(rank, steps=range(12, 16), number=2)
        change_model(again, digests=("w11", "f"))
        change_steps(again, batch="of another epoch", digests=("unknown", "f"))
        again.files.append(FileRecord(path="ema.pt", step=1, content="other"))
        processes.append(again)

    verdict = judge_resume(reference, reference, resumed)

    assert (verdict.state, verdict.reason) == (PASSED, "continued after step 8 and 11, bit-equal until step 10")


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
    trained = SaveRecord(time=99.0, path="/x/trained.pt", place="train.py:40", step=10)
    stopped.ranks[0][0].saves.append(trained)  # nothing reads it

    verdict = judge_continuation(build_reference(), stopped, Recording({}), is_exact=True)

    assert verdict is not None
    assert (verdict.state, verdict.place) == (FAILED, "train.py:25")
    assert "after step 10 of 12" in verdict.reason
    assert "sys.exit(143)" in verdict.remedy
