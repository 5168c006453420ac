"""``Trainer(config).fit()`` with a program's own model, data and task."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ddp_trainer import (
    CheckpointConfig,
    Classification,
    DataConfig,
    Datasets,
    Metrics,
    OptimConfig,
    Result,
    RunConfig,
    Task,
    Trainer,
    UserError,
)
from ddp_trainer.cli import main, parse
from ddp_trainer.config.run import MetricsConfig
from ddp_trainer.distributed import DistributedConfig
from ddp_trainer.trainer import TrainingLoop
from tests.support.own_task import example
from tests.support.saved_states import load, same

EXAMPLE = example()


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("DDP_METRICS_PORT", "0")
    monkeypatch.delenv("DDP_CHECKPOINT_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def config(folder: Path | None = None, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "epochs": 2,
        "data": DataConfig(batch_size=8, workers=0, eval_batch_size=16),
        "optim": OptimConfig(lr=0.05),
        "distributed": DistributedConfig(device="cpu"),
        "metrics": MetricsConfig(port=0),
    }
    if folder is not None:
        values["checkpoint"] = CheckpointConfig(dir=str(folder), keep=99, every_steps=1)
    return RunConfig(**(values | changes))


class TupleSamples(Dataset[Any]):
    """Samples of several tensors of several types, one of them random."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], tuple[Tensor, int]]:
        tokens = torch.arange(index, index + 5) % 11
        return {"tokens": tokens, "noise": torch.rand(())}, ((tokens + 1) % 11, index % 3)


class NextToken(nn.Module):
    """(B, T) int64, and (B,) to logits (B, T, 11)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        hidden: Tensor = self.head(self.embedding(inputs["tokens"]) * (1 + inputs["noise"][:, None, None] / 10))
        return hidden


class NextTokenTask(Task):
    score = "right"
    greater_is_better = True

    def loss(self, output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target[0].flatten())

    def metrics(self, output: Tensor, target: tuple[Tensor, Tensor]) -> Metrics:
        return {"right": ((output.argmax(-1) == target[0]).sum(), target[0].numel()), "kind": (target[1].sum(), 1)}


def tokens(changed: RunConfig) -> Result:
    return Trainer(
        changed, model=NextToken, data=Datasets(TupleSamples(52), TupleSamples(20)), task=NextTokenTask()
    ).fit()


def test_worked_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert EXAMPLE.exit_code(EXAMPLE.main) == 0
    message = capsys.readouterr().out
    rmse = float(message.split("rmse ")[-1].split()[0])
    assert rmse < 0.2
    assert message.rstrip().endswith("after 189 steps and 3 epochs")
    assert "name=regression:build" in message
    assert json.loads(Path("checkpoints/config.json").read_text())["task"] == "regression:Regression"
    # The second start has nothing to train, and reports the same.
    EXAMPLE.main()
    assert capsys.readouterr().out.splitlines()[-1] == message.splitlines()[-1]


def test_result_reports_outcome_of_run(tmp_path: Path) -> None:
    result = tokens(config(tmp_path / "run"))
    assert (result.epochs, result.steps) == (2, 14)
    assert result.checkpoint == tmp_path / "run" / "step-000000014.pt"
    assert result.weights == tmp_path / "run" / "model.pt"
    assert same(load(result.weights), result.model.state_dict())
    # By hand over all samples: the mean of batch means would differ, because batches have different lengths.
    batch, target = torch.utils.data.default_collate([TupleSamples(20)[index] for index in range(20)])
    batch["noise"] = torch.zeros(20)
    assert result.metrics.keys() == {"loss", "right", "kind"}
    assert result.metrics["kind"] == sum(index % 3 for index in range(20)) / 2  # one sum per batch, for two batches
    right = float((result.model(batch).argmax(-1) == target[0]).float().mean())
    assert result.metrics["right"] == pytest.approx(right, abs=0.1)


@pytest.mark.parametrize("workers", [0, 2])
def test_run_of_user_parts_resumes_bitwise(workers: int, tmp_path: Path) -> None:
    data = DataConfig(batch_size=8, workers=workers)
    whole = tokens(config(tmp_path / "whole", data=data))
    cut = tmp_path / "cut"
    tokens(config(cut, data=data, max_steps=4))
    assert not (cut / "step-000000005.pt").exists()
    again = tokens(config(cut, data=data))
    assert same(load(cut / "step-000000014.pt")["engine"], load(tmp_path / "whole" / "step-000000014.pt")["engine"])
    assert again.metrics == whole.metrics
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("better", "sign"), [(False, -1), (True, 1)])
def test_checkpoints_are_rated_by_score_which_is_no_accuracy(
    better: bool, sign: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDP_RUNTIME_DIR", str(tmp_path / "runtime"))
    task = type("Odd", (EXAMPLE.Regression,), {"greater_is_better": better})()
    result = Trainer(config(tmp_path, epochs=1), model=EXAMPLE.build, data=DATA, task=task).fit()
    (manifest,) = tmp_path.glob("step-*.json")  # the one with the greatest accuracy is kept
    assert json.loads(manifest.read_text())["accuracy"] == sign * result.metrics["rmse"]
    page = (tmp_path / "runtime" / "metrics" / "0.prom").read_text()
    assert "ddp_validation_loss{" in page
    assert "ddp_validation_accuracy_ratio{" not in page


def test_metrics_can_be_added_to_classification(tmp_path: Path) -> None:
    class TopTwo(Classification):
        def metrics(self, output: Tensor, target: Tensor) -> Metrics:
            two = (output.topk(2).indices == target[:, None]).any(1).sum()
            return {**super().metrics(output, target), "top2": (two, len(target))}

    inputs = torch.rand(24, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(24) % 3
    data = Datasets(TensorDataset(inputs, labels), TensorDataset(inputs, labels))
    result = Trainer(config(train_accuracy=True), model=nn.Linear(3, 3), data=data, task=TopTwo()).fit()
    assert result.metrics["accuracy"] <= result.metrics["top2"] <= 1.0
    assert result.checkpoint is None


def test_parts_can_be_named_on_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_parts.py").write_text(
        "from tests.unit.ddp_trainer.test_api import EXAMPLE, Datasets\n"
        "Regression = EXAMPLE.Regression\n"
        "build = lambda config, in_channels, num_classes: EXAMPLE.build()\n"
        "load = lambda config: Datasets(EXAMPLE.samples(64, 0), EXAMPLE.samples(32, 1))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    named = ["--data", "own_parts:load", "--model", "own_parts:build", "--task", "own_parts:Regression"]
    assert main([*named, "--workers", "0", "--device", "cpu", "--lr", "0.01"]) == 0
    assert "validation rmse" in capsys.readouterr().out
    assert parse([*named]).task == "own_parts:Regression"
    assert main([*named[:4], "--device", "cpu"]) == 81
    assert "task: no task is named, and the data have no num_classes" in capsys.readouterr().err


def test_importing_package_imports_neither_torch_nor_kubernetes() -> None:
    code = (
        "import sys, ddp_trainer; print(sorted({'torch', 'numpy', 'kopf', 'kubernetes', 'msgspec'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "[]\n", ran.stderr


class NoLoss(Task):
    """A task without a required method."""


def giving(**made: Any) -> Task:
    """A regression whose methods return the given values."""
    return type("Odd", (EXAMPLE.Regression,), {name: lambda *_, value=value: value for name, value in made.items()})()


class Unsized(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(4), 0.0)])


INPUTS = torch.zeros(8, 4)
DATA = Datasets(TensorDataset(INPUTS, torch.zeros(8)), TensorDataset(INPUTS, torch.zeros(8)))


def of(*samples: Any) -> Any:
    return Datasets(list(samples), list(samples))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "data", "message"),
    [
        (NoLoss(), lambda: DATA, r"task\.loss: NoLoss does not define a loss; define loss\(self, output, target\)"),
        (giving(loss=3.0), lambda: DATA, r"task\.loss: returned float; return the mean"),
        (giving(loss=torch.zeros(2)), lambda: DATA, r"task\.loss: returned torch.float32 of shape \(2,\)"),
        (giving(loss=torch.zeros(())), lambda: DATA, r"task\.loss: does not depend on the model's parameters"),
        (giving(metrics={"mse": 1.0}), lambda: DATA, r"task\.metrics: 'mse' is 1.0; return \(sum, count\) for each"),
        (giving(metrics={"mse": ("a", 1)}), lambda: DATA, r"task\.metrics: 'mse' contains 'a'"),
        (giving(metrics={"mse": (torch.zeros(3), 1)}), lambda: DATA, r"'mse' contains torch.float32 of shape \(3,\)"),
        (giving(summarize={"loss": 1.0}), lambda: DATA, r"task\.score: 'rmse' is not among the metrics loss; name one"),
        (None, lambda: DATA, r"task: no task is named, and the data have no num_classes; give a task, or Datasets"),
        (None, lambda: Datasets(Unsized(), Unsized()), r"data: the training data are Unsized, an iterable dataset;"),
        (None, lambda: Datasets(3, 4), r"data: the training data are int, which has no __getitem__"),  # type: ignore[arg-type]
        (EXAMPLE.Regression(), lambda: of(torch.zeros(4)), r"data: a sample is Tensor .* pairs \(input, target\)"),
        (EXAMPLE.Regression(), lambda: of((torch.zeros(5), 0.0)), r"can't process inputs of shape \(B, 5\)"),
        (EXAMPLE.Regression(), lambda: of((torch.zeros(4).double(), 0.0)), r"\(B, 4\), torch\.float64: .*dtype"),
        (
            EXAMPLE.Regression(),
            lambda: Datasets(DATA.train, DATA.validation, collate=lambda samples: (torch.zeros(3, 4), torch.zeros(2))),
            r"data: the tensors of a batch have 2, 3 samples; give inputs and targets as tensors whose first",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named(task: Task | None, data: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(config(), model=EXAMPLE.build, data=data(), task=task).fit()


@pytest.mark.parametrize(
    ("changes", "model", "message"),
    [
        ({"train_accuracy": True}, None, r"train_accuracy: Regression does not count correct answers; define correct"),
        (
            {"data": DataConfig(augment=("flip",))},
            None,
            r"data\.augment: the trainer augments only images that it holds",
        ),
        ({}, lambda: 3, r"model: .* returned int; return a torch\.nn\.Module"),
    ],
)
def test_settings_unsupported_by_user_parts_are_rejected(changes: Any, model: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(config(**changes), model=model or EXAMPLE.build, data=DATA, task=EXAMPLE.Regression()).fit()


def test_metrics_that_change_their_names_are_refused() -> None:
    class Fickle(EXAMPLE.Regression):  # type: ignore[misc,name-defined]
        def metrics(self, output: Tensor, target: Tensor) -> Metrics:
            return {"mse" if len(target) == 1 else "other": (0.0, 1)}

        def summarize(self, means: dict[str, float]) -> dict[str, float]:
            return {"rmse": 0.0}

    with pytest.raises(UserError, match=r"task\.metrics: names changed from loss, mse to loss, other"):
        Trainer(config(), model=EXAMPLE.build, data=DATA, task=Fickle()).fit()


def test_sample_that_fails_is_named() -> None:
    class FailingSamples(TupleSamples):
        def __getitem__(self, index: int) -> Any:
            if index == 13:
                raise KeyError("colour")
            return super().__getitem__(index)

    for workers in (0, 1):
        changed = config(data=DataConfig(batch_size=8, workers=workers))
        trainer = Trainer(
            changed, model=NextToken, data=Datasets(FailingSamples(20), TupleSamples(8)), task=NextTokenTask()
        )
        with pytest.raises(KeyError) as raised:
            trainer.fit()
        assert "sample 13 of the data" in str(raised.value) + "".join(getattr(raised.value, "__notes__", []))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_fit_restores_signal_handlers_after_exception(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(*_: object) -> None:
        pass

    before = signal.signal(number, handle)
    try:
        with pytest.raises(UserError, match="augments only images"):
            tokens(config(data=DataConfig(augment=("flip",))))
        assert signal.getsignal(number) is handle

        def fail(self: TrainingLoop) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(TrainingLoop, "fit", fail)
        with pytest.raises(ZeroDivisionError):
            tokens(config())
        assert signal.getsignal(number) is handle
    finally:
        signal.signal(number, before)
