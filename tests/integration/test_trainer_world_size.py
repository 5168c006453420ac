"""The samples that the ranks train and validate on, recorded by the ranks, also when their number changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import trainer_plugins as plugins
from tests.support.trainer_ranks import train

pytestmark = pytest.mark.process

EPOCHS = 2


def run(folder: Path, world_size: int, samples: int, *arguments: str) -> list[list[list[int]]]:
    """Resume the run in ``folder``. Return the batches of each rank, and check the validated samples."""
    environ = {"TEST_SAMPLES": str(samples), "TEST_RECORD": str(folder)}
    command = ["--data", plugins.RECORDED, "--model", plugins.RECORDING, "--epochs", str(EPOCHS), "--lr", "0.01"]
    command += ["--batch-size", "4", "--eval-batch-size", "2", "--checkpoint-dir", str(folder / "checkpoints")]
    train(folder / f"on-{world_size}", [*command, *arguments], world_size, environ)
    seen = [number for batches in plugins.read_record(folder, "valid") for batch in batches for number in batch]
    validations = len(seen) // plugins.VALIDATION
    assert sorted(seen) == sorted([*range(plugins.VALIDATION)] * validations)
    assert validations >= 1
    return plugins.read_record(folder, "train")


def flat(ranks: list[list[list[int]]]) -> list[int]:
    return [number for batches in ranks for batch in batches for number in batch]


@pytest.mark.parametrize(("before", "after", "samples", "steps"), [(2, 1, 60, 3), (1, 2, 60, 5), (2, 3, 60, 3)])
def test_other_number_of_ranks_resumes_without_repeated_or_skipped_sample(
    before: int, after: int, samples: int, steps: int, tmp_path: Path
) -> None:
    first = run(tmp_path, before, samples, "--max-steps", str(steps))
    rest = run(tmp_path, after, samples)
    assert [len(batches) for batches in first] == [steps] * before
    # The rest of the first epoch, and then the whole second, distributed evenly.
    remaining = samples - steps * before * 4
    assert [sum(map(len, batches)) for batches in rest] == [(remaining + samples) // after] * after
    steps_left = -(-remaining // after // 4)
    of_the_first = [batches[:steps_left] for batches in rest]
    of_the_second = [batches[steps_left:] for batches in rest]
    assert sorted(flat(first) + flat(of_the_first)) == list(range(samples))
    assert sorted(flat(of_the_second)) == list(range(samples))
    assert flat(of_the_second) != flat(of_the_first)


def test_indivisible_samples_are_padded_only_at_epoch_end(
    tmp_path: Path,
) -> None:
    # 50 samples on 2 ranks, then 3: 26 are left after three steps, and 26 is not a multiple of 3.
    first = run(tmp_path, 2, 50, "--max-steps", "3")
    rest = run(tmp_path, 3, 50, "--epochs", "1")
    seen = flat(first) + flat(rest)
    assert set(seen) == set(range(50))
    assert len(seen) - 50 == 1
