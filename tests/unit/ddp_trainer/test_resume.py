"""Interrupt a run anywhere and resume it in this process: bitwise the same result; and reasons that refuse a resume."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_sdk.meters import Timeline
from ddp_sdk.rank_env import RankEnv
from ddp_trainer.api import Trainer
from ddp_trainer.checkpoint.store import Checkpointer
from ddp_trainer.cli import main, parse
from ddp_trainer.data.loader import ValidationLoader
from ddp_trainer.engine import Engine
from tests.support import trainer_plugins as plugins
from tests.support.fake_gpu import FakeGpu
from tests.support.saved_states import load, same

# Everything that has a state or draws numbers: batch norm, dropout, augmentation, momentum, schedule.
STATEFUL = [
    "--preset", "digits-resnet", "--model-width", "4", "--batch-size", "192", "--dropout", "0.2",
    "--augment", "crop,flip", "--epochs", "2", "--device", "cpu", "--checkpoint-keep", "99",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _like_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_METRICS_PORT", "0")


def train(*arguments: str) -> None:
    Trainer(parse([*STATEFUL, *arguments]), env=RankEnv()).fit()


@pytest.mark.parametrize(
    ("options", "cuts"),
    [
        ("--optimizer sgd --augment crop,flip,rotate,jitter --train-accuracy", (1, 2, 5, 7, 8, 9, 12, 15)),
        ("--optimizer novograd --schedule cosine", (3, 8)),
        ("--optimizer adamw --clip-norm 1 --precision bf16 --weight-decay 0.1 --norm-bias-decay false", (1, 9)),
    ],
    ids=("sgd", "novograd", "adamw"),
)
def test_run_cut_after_any_step_ends_in_bitwise_same_state(
    options: str, cuts: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    arguments = options.split()
    with monkeypatch.context() as patch:
        save = Checkpointer.save

        def save_every(self: Checkpointer, *arguments: Any, **named: Any) -> None:
            save(self, *arguments, **named)
            self.wait()

        patch.setattr(Checkpointer, "save", save_every)
        train(*arguments, "--checkpoint-dir", str(whole), "--checkpoint-every-steps", "1")
    paths = sorted(whole.glob("step-*.pt"))
    steps = [load(path)["position"]["step"] for path in paths]
    # 1,438 samples: seven steps of 192 and one of 94 in an epoch.
    assert steps == list(range(1, 17))
    weights = load(whole / "model.pt")
    for path in (paths[step - 1] for step in cuts):
        cut = tmp_path / path.stem
        cut.mkdir()
        shutil.copy(path, cut)
        shutil.copy(path.with_suffix(".json"), cut)
        torch.manual_seed(12345)  # for any state of the new process's generator
        train(*arguments, "--checkpoint-dir", str(cut))
        assert same(load(cut / paths[-1].name), load(paths[-1])), path.stem
        assert same(load(cut / "model.pt"), weights), path.stem
        shutil.rmtree(cut)


def train_until_failure(cut: int, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str]) -> None:
    """Train, with an exception before the step ``cut``, counted from 0."""
    step = Engine.step

    def fail(self: Engine, batch: Any, number: int, lr: float) -> Any:
        if number == cut:
            raise RuntimeError("fails here")
        return step(self, batch, number, lr)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", fail)
        with pytest.raises(RuntimeError, match="fails here"):
            train(*arguments)


@pytest.mark.parametrize("cut", [3, 8])
def test_run_that_fails_continues_from_memory_to_bitwise_the_same_state(
    cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--checkpoint-every-epochs", "0"]
    train(*arguments, "--checkpoint-dir", str(tmp_path / "whole"))
    monkeypatch.setenv("DDP_MEMORY_DIR", str(tmp_path / "memory"))
    monkeypatch.setenv("DDP_MEMORY_INTERVAL", "1")
    arguments += ["--checkpoint-dir", str(tmp_path / "cut")]
    train_until_failure(cut, monkeypatch, arguments)
    torch.manual_seed(12345)
    train(*arguments)
    assert f"resumed from memory: {cut} steps are done" in capsys.readouterr().out
    name = "step-000000016.pt"
    assert same(load(tmp_path / "cut" / name), load(tmp_path / "whole" / name))
    assert same(load(tmp_path / "cut" / "model.pt"), load(tmp_path / "whole" / "model.pt"))


def test_damaged_checkpoint_does_not_refuse_older_copy_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DDP_MEMORY_DIR", str(tmp_path / "memory"))
    monkeypatch.setenv("DDP_MEMORY_INTERVAL", "1")
    folder = tmp_path / "run"
    arguments = ["--checkpoint-every-steps", "2", "--checkpoint-dir", str(folder)]
    train_until_failure(5, monkeypatch, arguments)
    manifest = json.loads((folder / "step-000000004.json").read_text())
    data = (folder / "step-000000004.pt").read_bytes()
    (folder / "step-000000007.pt").write_bytes(bytes(len(data)))
    manifest |= {"step": 7, "file": "step-000000007.pt"}
    (folder / "step-000000007.json").write_text(json.dumps(manifest))
    train(*arguments)
    assert "resumed from memory: 5 steps are done" in capsys.readouterr().out


def read_accuracies(folder: Path) -> dict[int, float | None]:
    """The accuracy of each checkpoint by its step."""
    manifests = [json.loads(path.read_text()) for path in folder.glob("step-*.json")]
    return {manifest["step"]: manifest["accuracy"] for manifest in manifests}


def test_copies_of_another_checkpoint_folder_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DDP_MEMORY_DIR", str(tmp_path / "memory"))
    train("--checkpoint-dir", str(tmp_path / "first"), "--max-steps", "3")
    train("--checkpoint-dir", str(tmp_path / "second"), "--max-steps", "3")
    assert "resumed from memory" not in capsys.readouterr().out
    assert (tmp_path / "second" / "step-000000003.pt").exists()


@pytest.mark.parametrize("steps", [8, 5], ids=("epoch", "max-steps"))
def test_signal_aborts_validation_and_resume_repeats_it(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    arguments = [*STATEFUL, "--model", plugins.INTERRUPTING, "--max-steps", str(steps), "--eval-batch-size", "100"]
    assert main([*arguments, "--checkpoint-dir", str(whole)]) == 0
    monkeypatch.setenv("TEST_INTERRUPT", "0:2:VALIDATIONSIGTERM")
    capsys.readouterr()
    assert main([*arguments, "--checkpoint-dir", str(cut)]) == 85
    message = capsys.readouterr().out
    assert f"preempted: stopped after step {steps}; checkpoint saved" in message
    assert "validation:" not in message
    monkeypatch.delenv("TEST_INTERRUPT")
    assert main([*arguments, "--checkpoint-dir", str(cut)]) == 0
    message = capsys.readouterr().out
    assert message.count("validation:") == 1
    assert " loss " not in message.split("training:")[1].split("validation:")[0]
    name = max(whole.glob("step-*.pt")).name
    assert same(load(cut / name), load(whole / name))
    assert same(load(cut / "model.pt"), load(whole / "model.pt"))


@pytest.mark.parametrize(
    ("cut", "again", "words"),
    [
        ("3", ["--seed", "7"], "(seed was 0, is 7)"),
        ("3", ["--validation-fraction", "0.5"], "(samples was 1438, is 899)"),
        ("3", [], ""),
        ("8", ["--seed", "7"], ""),  # between two epochs no order is stored
    ],
    ids=("seed", "samples", "same", "between-epochs"),
)
def test_changed_sample_order_within_epoch_warns(
    cut: str, again: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--checkpoint-dir", str(tmp_path)]
    train(*folder, "--max-steps", cut)
    capsys.readouterr()
    train(*folder, "--max-steps", "9", *again)
    message = capsys.readouterr()
    assert f"{cut} steps" in message.out
    assert ("order of the samples" in message.err) == bool(words)
    assert words in message.err


def test_checkpoint_between_validations_has_no_accuracy_of_older_weights(tmp_path: Path) -> None:
    # It would count as the best one, beside or before the validated one.
    train("--checkpoint-dir", str(tmp_path), "--checkpoint-every-steps", "3")
    manifests = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("step-*.json"))]
    steps = {manifest["step"] for manifest in manifests}  # a slow disk still writes the former one at some of them
    assert {3, 16} <= steps <= {3, 6, 8, 9, 12, 15, 16}
    with_accuracy = [manifest["step"] for manifest in manifests if manifest["accuracy"] is not None]
    assert with_accuracy == sorted(steps & {8, 16})


@pytest.mark.parametrize("nonfinite", ["count", "stop"])
def test_training_time_has_no_validations_and_checkpoints_and_all_of_devices_work(
    nonfinite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, capsys: pytest.CaptureFixture[str]
) -> None:
    def taking(seconds: float, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            gpu.host += seconds
            return original(*arguments, **named)

        return call

    monkeypatch.setattr(Engine, "step", taking(1.0, Engine.step))
    monkeypatch.setattr(Timeline, "wait", taking(4.0, Timeline.wait))
    monkeypatch.setattr(ValidationLoader, "__iter__", taking(500.0, ValidationLoader.__iter__))
    monkeypatch.setattr(Checkpointer, "save", taking(500.0, Checkpointer.save))
    monkeypatch.setenv("DDP_RUNTIME_DIR", str(tmp_path))
    arguments = ["--checkpoint-dir", str(tmp_path / "run"), "--csv-dir", str(tmp_path / "csv"), "--log-every", "4"]
    arguments += ["--checkpoint-every-steps", "3", "--nonfinite", nonfinite]
    assert main([*STATEFUL, *arguments]) == 0
    # An epoch has eight steps and a wait at its end; it contains two or three checkpoints, each after a wait.
    seconds = (12, 24) if nonfinite == "count" else (20, 44)
    (csv,) = (tmp_path / "csv").iterdir()
    assert [line.split(",")[0] for line in csv.read_text().split()[2:]] == [f"{each:.1f}" for each in seconds]
    assert (
        f'ddp_step_duration_seconds_sum{{rank="0"}} {seconds[1]:.1f}' in (tmp_path / "metrics" / "0.prom").read_text()
    )
    rates = [int(rate) for rate in re.findall(r" (\d+) samples/s", capsys.readouterr().out)]
    assert max(rates) <= 192


def test_training_continues_while_disk_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = threading.Event()
    waited: list[bool] = []
    sync = os.fsync

    def slow(descriptor: int) -> None:
        if threading.current_thread().name == "ddp-checkpoint":
            # If the step loop waited for the disk, it would wait without end.
            waited.append(late.wait(30.0))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setenv("TEST_INTERRUPT", "0:6:SIGUSR1")
    old = signal.signal(signal.SIGUSR1, lambda number, frame: late.set())
    try:
        train(
            "--model", plugins.INTERRUPTING, "--checkpoint-dir", str(tmp_path), "--checkpoint-every-steps", "1",
            "--checkpoint-every-epochs", "0", "--max-steps", "7",
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert waited
    assert all(waited)
    # The first was being written, the last waited until the release, and those between were skipped.
    steps = [load(path)["position"]["step"] for path in sorted(tmp_path.glob("step-*.pt"))]
    assert steps[0] == 1
    assert steps[-1] == 7
    assert not {2, 3, 4} & set(steps)


def test_nonfinite_loss_ends_run_without_later_state_or_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TEST_INTERRUPT", "0:5:NAN")
    arguments = [*STATEFUL, "--model", plugins.INTERRUPTING, "--checkpoint-dir", str(tmp_path)]
    arguments += ["--checkpoint-every-steps", "2", "--log-every", "50"]
    assert main([*arguments, "--nonfinite", "stop"]) == 81
    message = capsys.readouterr()
    assert "nonfinite: the loss of step 5 on rank 0 is not a finite number" in message.err
    assert [load(path)["position"]["step"] for path in sorted(tmp_path.glob("step-*.pt"))] == [2, 4]
    assert not (tmp_path / "model.pt").exists()
    monkeypatch.setenv("DDP_RUNTIME_DIR", str(tmp_path))
    assert main([*arguments, "--checkpoint-dir", str(tmp_path / "counted"), "--max-steps", "7"]) == 0
    # Step 5, and the two after it, whose weights it has damaged.
    assert 'ddp_nonfinite_losses_total{rank="0"} 3.0' in (tmp_path / "metrics" / "0.prom").read_text()


def test_cumulative_time_and_scores_are_one_line_and_continue_after_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*STATEFUL, "--train-accuracy", "--checkpoint-dir", str(tmp_path)]
    assert main([*arguments, "--epochs", "1"]) == 0
    assert main([*arguments, "--epochs", "2"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch") and "cumulative" in line]
    pattern = (
        r"epoch \d/\d validation: loss [\d.]+ accuracy [\d.]+ in [\d.]+ s, training: ([\d.]+) s, \d+ samples/s, "
        r"cumulative ([\d.]+) s, training accuracy [\d.]+"
    )
    assert all(re.fullmatch(pattern, line) for line in lines), lines
    figures = [tuple(map(float, re.findall(pattern, line)[0])) for line in lines]
    assert len(figures) == 2
    assert figures[0][0] == figures[0][1]
    assert figures[1][1] == pytest.approx(figures[0][1] + figures[1][0], abs=0.11)
    assert figures[1][1] >= figures[1][0]
