"""The record of epochs: the target that ends a run, and the CSV."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path

import pytest
import torch

from ddp_sdk.errors import UserError
from ddp_sdk.rank_env import RankEnv
from ddp_trainer.config.run import RunConfig, resolve
from ddp_trainer.distributed.world import World
from ddp_trainer.observability.epoch_record import CsvLog, EpochRecord, file_name
from ddp_trainer.plan import EarlyStopConfig, Position
from tests.support.fake_gpu import FakeGpu

WORLD = World(RankEnv(), torch.device("cpu"))


def stops_after(config: EarlyStopConfig, scores: list[float]) -> int | None:
    streak = 0
    for epoch, score in enumerate(scores, start=1):
        streak = config.count(streak, score)
        if config.met(streak):
            return epoch
    return None


@pytest.mark.parametrize(
    ("target", "scores", "epoch"),
    [
        (0.85, [0.85, 0.85], 2),
        (0.85, [0.9, 0.84, 0.9, 0.9], 4),
        (0.85, [0.9, math.nan, 0.9, 0.8499], None),
        (0.85, [0.9], None),
        (None, [1.0, 1.0], None),
    ],
)
def test_run_ends_when_last_validations_all_reach_target(
    target: float | None, scores: list[float], epoch: int | None
) -> None:
    assert stops_after(EarlyStopConfig(target_accuracy=target, patience=2), scores) == epoch


@pytest.mark.parametrize(
    ("target", "remedy"),
    [(85.0, "give 0.85 for 85 percent"), (0.0, "must be above 0"), (-0.1, "must be above 0"), (101.0, "at most 1")],
)
def test_target_outside_0_to_1_is_rejected(target: float, remedy: str) -> None:
    with pytest.raises(UserError, match=r"^early_stop\.target_accuracy: ") as caught:
        EarlyStopConfig(target_accuracy=target)
    assert remedy in caught.value.remedy


def test_csv_has_row_per_epoch_and_resumed_run_keeps_finished_epochs(tmp_path: Path) -> None:
    config = resolve("fashion-mnist-wideresnet-large-batch", None, {})
    assert file_name(config, 4) == "4ranks-32bs-0.01lr-0.9m-5w.csv"
    path = tmp_path / "new" / "log.csv"
    log = CsvLog(path, 0)
    log.epoch(12.34, 0.123456)
    log.epoch(10.0, 0.5)
    log.epoch(10.0, 0.6)
    assert path.read_bytes() == b"time,val_accuracy\r\n0.0,0.0\r\n12.3,0.1235\r\n22.3,0.5\r\n32.3,0.6\r\n"
    # The checkpoint is the second epoch's: the third is trained again.
    CsvLog(path, 2).epoch(5.0, 0.4)
    assert path.read_text().split() == ["time,val_accuracy", "0.0,0.0", "12.3,0.1235", "22.3,0.5", "27.3,0.4"]
    path.write_text("time,val_accuracy\nx,y\n")
    CsvLog(path, 1).epoch(1.0, 0.5)
    assert path.read_text().split() == ["time,val_accuracy", "0.0,0.0", "1.0,0.5"]


def test_folder_that_can_t_be_written_is_user_error_and_row_that_can_t_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="csv_dir"):
        CsvLog(tmp_path / "file" / "log.csv", 0)
    log = CsvLog(tmp_path / "log.csv", 0)
    log.path.unlink()
    log.path.mkdir()
    log.epoch(1.0, 0.5)
    assert "warning" in capsys.readouterr().err


def test_rank_0_decides_whether_target_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(RunConfig(), early_stop=EarlyStopConfig(target_accuracy=0.5, patience=2))
    for said_by_rank_0, own in ((2.0, 0.1), (0.0, 0.9)):
        world = World(RankEnv(rank=1, world_size=2), torch.device("cpu"))
        monkeypatch.setattr(world, "sum", lambda mine, message=said_by_rank_0: [message + mine[0]])
        monkeypatch.setattr(world, "agreed", contextlib.nullcontext)
        position = Position(streak=1)
        record = EpochRecord(config, world, position)
        record.validated(own)
        assert (position.streak, record.target_met) == (said_by_rank_0, said_by_rank_0 == 2.0)


def test_epochs_record_adds_up_its_steps(tmp_path: Path, gpu: FakeGpu) -> None:
    early = EarlyStopConfig(target_accuracy=0.5, patience=2)
    config = dataclasses.replace(RunConfig(), csv_dir=str(tmp_path), early_stop=early)
    position = Position()
    record = EpochRecord(config, WORLD, position)
    for right in (3.0, 1.0):
        gpu.host += 2.0
        record.step(torch.tensor([right, 4.0]), 8)
    record.pause(gpu.host - 1.0, gpu.host, 1.0)
    record.end()
    gpu.host += 100.0  # the validation
    figures = record.validated(0.75)
    assert figures == {"accuracy": 0.5, "seconds": 3.0, "cumulative_seconds": 3.0, "samples_per_second": 16 / 3}
    assert (position.streak, record.target_met) == (1, False)
    record.begin()
    gpu.host += 2.0
    record.step(None, 8)
    record.end()
    assert record.validated(0.5) == {"seconds": 2.0, "cumulative_seconds": 5.0, "samples_per_second": 4.0}
    assert (position.streak, record.target_met) == (2, True)
    assert next(tmp_path.iterdir()).read_text().split()[1:] == ["0.0,0.0", "3.0,0.75", "5.0,0.5"]
    record.begin()
    assert record.validated(0.5) == {}  # of a run resumed between an epoch and its validation
    # After this end, a new start of the run trains nothing.
    assert EpochRecord(config, WORLD, position).target_met


def test_epoch_on_gpu_is_timed_on_device(tmp_path: Path, gpu: FakeGpu) -> None:
    world = World(RankEnv(), torch.device("cuda", 0))
    record = EpochRecord(dataclasses.replace(RunConfig(), csv_dir=str(tmp_path)), world, Position())
    record.begin()
    for _ in range(10):
        gpu.work(2.0, host=0.1)
        record.step(None, 8)
    record.end()
    assert gpu.host == pytest.approx(1.0), "the host waited"
    gpu.wait()
    gpu.work(100.0)  # the validation
    record.validated(0.5)
    assert next(tmp_path.iterdir()).read_text().split()[2:] == ["20.1,0.5"]


def test_cumulative_time_continues_after_resume_within_epoch(tmp_path: Path, gpu: FakeGpu) -> None:
    config = dataclasses.replace(RunConfig(), csv_dir=str(tmp_path))
    position = Position()
    record = EpochRecord(config, WORLD, position)
    gpu.host += 4.0
    record.step(None, 8)
    record.end()
    position.epoch = 1
    record.validated(0.5)
    record.begin()
    assert record.measure_total() == 4.0
    gpu.host += 3.0
    record.step(None, 8)
    record.pause(gpu.host - 1.0, gpu.host, 1.0)
    saved = record.measure_total()
    assert saved == 6.0
    gpu.host += 100.0  # until the restart
    resumed = EpochRecord(config, WORLD, Position(epoch=1, consumed=8), saved)
    gpu.host += 2.0
    resumed.step(None, 8)
    resumed.end()
    assert resumed.measure_total() == 8.0
    assert resumed.validated(0.6)["cumulative_seconds"] == 8.0
    assert resumed.measure_total() == 8.0
    assert next(tmp_path.iterdir()).read_text().split()[2:] == ["4.0,0.5", "8.0,0.6"]
