"""A run's logs: their content after an interrupted run; a failing log neither ends nor delays a run."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_sdk.errors import UserError
from ddp_sdk.rank_env import RankEnv
from ddp_trainer.api import Trainer
from ddp_trainer.cli import main, parse
from ddp_trainer.config.run import RunConfig, resolve
from ddp_trainer.distributed.world import World
from ddp_trainer.observability import logs
from ddp_trainer.observability.logs import FILE, JsonLines, ScalarLogs

WORLD = World(RankEnv(), torch.device("cpu"))
DIGITS = [
    "--preset", "digits-resnet", "--model-width", "4", "--batch-size", "64", "--epochs", "2", "--device", "cpu",
    "--log-every", "5", "--train-accuracy", "--clip-norm", "1", "--metrics-port", "0",
]  # fmt: skip
TIMES = {"time", "train/samples_per_second", "epoch/seconds", "epoch/cumulative_seconds", "epoch/samples_per_second"}


@pytest.fixture(autouse=True)
def _no_services(monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix in ("WANDB_", "MLFLOW_", "TENSORBOARD_"):
        for name in [name for name in logs.os.environ if name.startswith(prefix)]:
            monkeypatch.delenv(name)


def config(**values: Any) -> RunConfig:
    return resolve("digits-resnet", None, values)


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_run_logs_lines_and_epochs_and_resumed_run_continues(tmp_path: Path) -> None:
    def train(name: str, *more: str) -> list[dict[str, Any]]:
        folder = tmp_path / name
        Trainer(
            parse([*DIGITS, "--log-dir", str(folder), "--checkpoint-dir", str(folder / "kept"), *more]), env=RankEnv()
        ).fit()
        return [{key: item[key] for key in item if key not in TIMES} for item in read(folder)]

    whole = train("whole")
    # 23 steps an epoch; the first step has a line too.
    assert [item["step"] for item in whole] == [1, 5, 10, 15, 20, 23, 25, 30, 35, 40, 45, 46, 46]
    assert whole[1].keys() == {"step", "train/epoch", "train/loss", "train/lr", "train/grad_norm"}
    assert whole[5].keys() == {"step", "train/epoch", "validation/loss", "validation/accuracy", "epoch/accuracy"}
    assert (whole[1]["train/epoch"], whole[5]["train/epoch"]) == (pytest.approx(5 * 64 / 1438), 1.0)
    assert 0 < whole[5]["epoch/accuracy"] < whole[-1]["epoch/accuracy"] < 1
    # The run was killed while it wrote a line; its newest checkpoint is the first epoch's.
    train("cut", "--checkpoint-keep", "9")
    for path in (tmp_path / "cut" / "kept").glob("step-*46.*"):
        path.unlink()
    with (tmp_path / "cut" / FILE).open("a") as file:
        file.write('{"step": 7, "tra')
    resumed = train("cut")
    assert [item["step"] for item in resumed] == [1, 5, 10, 15, 20, 23, 24, 25, 30, 35, 40, 45, 46, 46]
    # The resumed process logs its own first step; the mean of the next line leaves this step out.
    assert [item for item in resumed if item["step"] not in (24, 25)] == [item for item in whole if item["step"] != 25]


def test_restarted_run_replaces_file_and_folder_that_can_t_be_written_is_mistake(tmp_path: Path) -> None:
    for step in (0, 0):
        log = JsonLines(tmp_path / FILE, step)
        log.write(1, {"loss": math.nan, "rate": math.inf, "lr": 0.1})
        log.close()
    (line,) = read(tmp_path)
    assert {**line, "time": 0} == {"step": 1, "time": 0, "loss": None, "rate": None, "lr": 0.1}
    with pytest.raises(UserError, match=r"^log_dir: cannot write to .*; make it writable"):
        ScalarLogs(config(log_dir=str(tmp_path / FILE / "logs")), WORLD, 0)


class Failing:
    """A log that fails at open, write or close."""

    run = "1"

    def __init__(self, when: str) -> None:
        self.when = when
        self.written = 0
        self._fail("open")

    def _fail(self, now: str) -> None:
        if self.when == now:
            raise OSError(28, "No space left on device")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.written += 1
        self._fail("write")

    def close(self) -> None:
        self._fail("close")


@pytest.mark.parametrize("when", ["open", "write", "close"])
def test_failed_log_warns_once_and_run_and_other_logs_continue(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    services = [logs._Service("MLflow", "MLFLOW_", "json", lambda settings, run: Failing(when))]  # type: ignore[arg-type]
    monkeypatch.setattr(logs, "_SERVICES", services)
    assert main([*DIGITS, "--max-steps", "11", "--log-dir", str(tmp_path)]) == 0
    message = capsys.readouterr()
    (line,) = [line for line in message.err.splitlines() if "MLflow" in line]
    assert line.endswith("warning: MLflow is disabled for the rest of this run: [Errno 28] No space left on device")
    assert "done: 11 steps" in message.out
    assert [item["step"] for item in read(tmp_path)] == [1, 5, 10, 11, 11]


def test_hanging_log_blocks_neither_step_nor_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never = threading.Event()
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(logs, "_MAX_WAIT_SECONDS", 0.0)

    def hang(settings: Any, run: str | None) -> Any:
        never.wait()
        return Failing("never")

    monkeypatch.setattr(logs, "_SERVICES", [logs._Service("W&B", "WANDB_", "json", hang)])  # type: ignore[arg-type]
    some = ScalarLogs(config(), WORLD, 0)
    some.write(1, {"loss": 1.0})
    some.close()
    some.close()
    assert capsys.readouterr().err.count("W&B did not finish in time") == 1
    never.set()


def test_missing_or_broken_service_warns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "digits")
    monkeypatch.setenv("MLFLOW_RUN_ID", "1")
    services = [
        logs._Service("W&B", "WANDB_", "no_such_module", Failing),  # type: ignore[arg-type]
        logs._Service("MLflow", "MLFLOW_", "antigravity.broken", Failing),  # type: ignore[arg-type]
    ]
    monkeypatch.setattr(logs, "_SERVICES", services)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "no_such_module" else object())
    ScalarLogs(config(), WORLD, 0).close()
    message = capsys.readouterr().err
    assert "WANDB_PROJECT is set, but no_such_module is not installed: nothing is sent to W&B" in message
    assert "MLflow is disabled for the rest of this run: No module named 'antigravity.broken'" in message


@pytest.mark.parametrize("named", [False, True])
def test_tensorboard_reader_finds_no_step_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    if named:  # by spec.tracking
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    for step in (0, 4):
        some = ScalarLogs(config(log_dir=None if named else str(tmp_path)), WORLD, step)
        for number in range(step + 1, step + 9):
            some.write(number, {"loss": number / 2})
        some.close()
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    assert [(Scalar.step, Scalar.value) for Scalar in events.Scalars("loss")] == [
        (step, step / 2) for step in range(1, 13)
    ]


@pytest.mark.parametrize("named", [False, True])
def test_mlflow_run_continues_after_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "runs"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    source = mlflow.MlflowClient().create_run("0").info.run_id if named else ""
    for step in (0, 4):
        if named:  # as the launcher does, before each start of rank 0
            monkeypatch.setenv("MLFLOW_RUN_ID", source)
        some = ScalarLogs(config(checkpoint={"dir": str(tmp_path)}), WORLD, step)
        for number in range(step + 1, step + 9):
            some.write(number, {"train/loss": number / 2})
        some.close()
    (search_run,) = mlflow.search_runs(output_format="list")
    assert search_run.data.params["optim.lr"] == "0.1"
    history = mlflow.MlflowClient().get_metric_history(search_run.info.run_id, "train/loss")
    assert [(item.step, item.value) for item in history] == [(step, step / 2) for step in range(1, 13)]


def test_wandb_run_id_is_stored_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[dict[str, Any]] = []

    def init(**named: Any) -> Any:
        began.append(named)
        return SimpleNamespace(
            id=named["id"] or f"run-{len(began)}", log=lambda figures, step: None, finish=lambda: None
        )

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else object())
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("DDP_JOB_NAME", "digits")
    for step in (0, 0, 4):
        some = ScalarLogs(config(checkpoint={"dir": str(tmp_path)}), WORLD, step)
        some.write(5, {"loss": 1.0})
        some.close()
    assert [(item["name"], item["id"], item["resume"]) for item in began] == [
        ("digits", None, None), ("digits", None, None), ("digits", "run-2", "allow"),
    ]  # fmt: skip
    assert began[0]["config"]["optim"]["lr"] == 0.1
