"""Buffers in the verdicts: they count where a checkpoint has them."""

from __future__ import annotations

import pytest

from ddp_cli.features.check.recordings import Process, Recording
from ddp_cli.features.check.resume import judge_resume
from ddp_cli.features.check.training import judge_training
from ddp_cli.features.check.verdict import FAILED, PASSED
from ddp_pod.features.check.contract import ModelRecord, SaveRecord, StartRecord, StepRecord

SAVED = 2


def train(rank: int, buffers: list[str], *, first: int = 0, number: int = 0) -> Process:
    """Return a process that begins after step ``first``; ``buffers``: before each of its steps."""
    process = Process(rank, number, StartRecord(rank=rank, world_size=2))
    process.add(
        ModelRecord(names=("weight",), digests=(f"w{first}",), trainable=(1,), buffer_names=("norm.mean",), built="a:1")
    )
    for step, buffer in enumerate(buffers, 1):
        weights = (f"w{first + step}",)
        batch = f"b{rank}{first + step}"
        process.add(StepRecord(step=step, digests=weights, gradients=("g",), batch=batch, buffers=(buffer,)))
        if rank == 0 and first + step == SAVED:
            process.add(SaveRecord(path="last.pt", step=step))
    return process


@pytest.mark.parametrize(
    ("first", "second", "state"),
    [
        (["0", "1", "2", "3"], ["0", "1", "2", "3"], PASSED),
        (["0", "1", "2", "3"], ["0", "x", "2", "y"], PASSED),  # sent before the save
        (["0", "1", "2", "3"], ["0", "x", "y", "z"], FAILED),
    ],
)
def test_buffers_of_ranks_are_compared_after_a_save(first: list[str], second: list[str], state: str) -> None:
    recording = Recording({0: [train(0, first)], 1: [train(1, second)]})
    verdict = next(item for item in judge_training(recording, 2) if item.check == "same initial weights")
    assert verdict.state == state
    assert ("norm.mean" in verdict.reason) is (state == FAILED)


@pytest.mark.parametrize(("rank", "state"), [(0, FAILED), (1, PASSED)])
def test_resumed_buffers_of_the_rank_that_saves_are_compared(rank: int, state: str) -> None:
    whole = {number: [train(number, ["0", "1", "2", "3"])] for number in (0, 1)}
    resumed = {number: [train(number, ["0", "1", "2"])] for number in (0, 1)}
    for number, processes in resumed.items():
        processes.append(train(number, ["x" if number == rank else "2", "3"], first=SAVED, number=1))
    assert judge_resume(Recording(whole), None, Recording(resumed)).state == state
