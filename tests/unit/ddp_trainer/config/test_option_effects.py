"""Every option of the trainer has an effect: on the weights, the lines, the files, or the calls to torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_sdk.errors import UserError
from ddp_sdk.exporter import Exporter
from ddp_trainer import assembly, engine
from ddp_trainer.api import Trainer
from ddp_trainer.cli import parse
from ddp_trainer.config.run import RunConfig
from ddp_trainer.data import reader
from ddp_trainer.distributed import ddp
from ddp_trainer.distributed.world import RankEnv
from ddp_trainer.options import options
from tests.support.tiny_datasets import write_cifar10
from tests.support.trainer_plugins import COLOURED

BASE = (
    "--data", COLOURED, "--batch-size", "25", "--epochs", "2", "--lr", "0.05", "--device", "cpu", "--log-every", "2",
    "--output-dir", "out",
)  # fmt: skip
CIFAR = ("--data", "cifar10", "--max-steps", "1", "--data-verify", "false")
WIDE = ("--model", "wide-resnet", "--model-widen", "1", "--max-steps", "1")
KEPT = ("--checkpoint-dir", "kept")
# option -> a value with an effect, and the options that it needs for this effect
CASES: dict[str, tuple[str, ...]] = {
    "epochs": ("3",),
    "max_steps": ("1",),
    "seed": ("1",),
    "log_every": ("1",),
    "nonfinite": ("stop", "--lr", "1e30", *KEPT),
    "task": ("nowhere:Task",),
    "train_accuracy": ("true",),
    "csv_dir": ("tables",),
    "log_dir": ("figures",),
    "output_dir": ("elsewhere",),
    "data.name": ("digits",),
    "data.dir": ("nowhere", *CIFAR),
    "data.download": ("true", *CIFAR),
    "data.verify": ("true", *CIFAR),
    "data.cache": ("none", "--workers", "0"),
    "data.workers": ("1", "--data-cache", "none"),
    "data.image_size": ("16", "--data", "voc2012"),
    "data.batch_size": ("30",),
    "data.eval_batch_size": ("5",),
    "data.augment": ("flip",),
    "data.crop_padding": ("1", "--augment", "crop"),
    "data.rotation": ("90", "--augment", "rotate"),
    "data.shear": ("45", "--augment", "affine"),
    "data.scale_min": ("0.5", "--augment", "affine"),
    "data.scale_max": ("1.9", "--augment", "affine"),
    "data.jitter": ("0.9", "--augment", "jitter"),
    "data.drop_last": ("true",),
    "data.validation_fraction": ("0.5", "--data", "digits", "--max-steps", "1"),
    "data.validation_as_training": ("true", "--eval-batch-size", "5"),
    "data.validation_augment": ("true", "--augment", "jitter", "--jitter", "1"),
    "model.name": ("resnet18", "--max-steps", "1"),
    "model.width": ("8",),
    "model.dropout": ("0.5",),
    "model.widen": ("2", *WIDE),
    "model.pool": ("2", *WIDE),
    "model.num_outputs": ("4",),
    "optim.name": ("adamw",),
    "optim.lr": ("0.1",),
    "optim.momentum": ("0.5",),
    "optim.nesterov": ("true",),
    "optim.beta1": ("0.5", "--optimizer", "adamw"),
    "optim.beta2": ("0.5", "--optimizer", "adamw"),
    "optim.grad_averaging": ("false", "--optimizer", "novograd"),
    "optim.weight_decay": ("0.1",),
    "optim.norm_bias_decay": ("false", "--weight-decay", "0.1"),
    "optim.clip_norm": ("0.01",),
    "schedule.name": ("cosine",),
    "schedule.warmup_epochs": ("1", "--warmup-start", "0.1"),
    "schedule.warmup_start": ("0.5", "--warmup-epochs", "1"),
    "schedule.warmup_stairs": ("true", "--warmup-epochs", "2", "--warmup-start", "0.1"),
    "schedule.final": ("0.5", "--schedule", "cosine"),
    "precision.name": ("bf16",),
    "precision.channels_last": ("true",),
    "precision.deterministic": ("true",),
    "precision.compile": ("true",),
    "precision.compile_mode": ("reduce-overhead", "--compile", "true"),
    "early_stop.target_accuracy": ("0.1", "--patience", "1"),
    "early_stop.patience": ("1", "--target-accuracy", "0.1"),
    "checkpoint.dir": ("kept",),
    "checkpoint.every_epochs": ("0", *KEPT),
    "checkpoint.every_steps": ("1", *KEPT, "--checkpoint-keep", "9"),
    "checkpoint.keep": ("1", *KEPT, "--checkpoint-every-steps", "1"),
    "metrics.port": ("0",),
}
# The same for options with an effect on several ranks only; one rank is compared.
OF_RANKS: dict[str, tuple[str, ...]] = {
    "model.sync_batchnorm": ("true",),
    "optim.lr_scaling": ("linear",),
    "schedule.warmup_by_node": ("true", "--warmup-epochs", "1"),
    "distributed.device": ("cuda",),
    "distributed.timeout_seconds": ("7",),
    "distributed.find_unused_parameters": ("true",),
    "distributed.data_parallel": ("true",),
}
WITHOUT: dict[tuple[int | str, ...], list[str]] = {}
"""The results of a run with only the required options, by number of ranks and these options: equal for equal keys."""
FLAGS = {option.key: option.flag for option in options(RunConfig)}


def test_every_option_has_case() -> None:
    assert sorted([*CASES, *OF_RANKS]) == sorted(FLAGS)


def parse_small(arguments: Sequence[str]) -> RunConfig:
    """The configuration of a small run. If ``arguments`` name no model, it gets a narrow one."""
    narrow = () if "--model" in arguments else ("--model", "small-resnet", "--model-width", "4")
    return parse([*BASE, *narrow, *arguments])


class CallRecorder(list[str]):
    """Calls to torch and the exporter."""

    def note(self, name: str, answer: Any = None) -> Any:
        """Return a function that records its arguments and returns ``answer`` or its first argument."""

        def call(*args: Any, **named: Any) -> Any:
            plain = [arg for arg in args if isinstance(arg, str | int | float | bool)]
            self.append(f"{name} {plain} {sorted((key, str(value)) for key, value in named.items())}")
            return args[0] if answer is None else answer

        return call


def observe(
    arguments: Sequence[str], env: RankEnv, asked: CallRecorder, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """Run in the working directory. Return everything observable except times and the configuration itself."""
    refused = ""
    try:
        Trainer(parse_small(arguments), env=env).fit()
    except UserError as error:
        refused = str(error)
    message = capsys.readouterr()
    lines = [
        re.sub(r"\d+ samples/s|\b[\d.]+ s\b|ETA [\d:]+", "", line)
        for line in (message.out.partition("training:")[2] + message.err).splitlines()
    ]
    files = sorted(str(path) for path in Path().rglob("*") if path.is_file() and "data" not in path.parts)
    weights = [
        f"{path} {name} {hashlib.sha256(tensor.contiguous().float().numpy().tobytes()).hexdigest()} {tensor.stride()}"
        for path in sorted(Path().rglob("model.pt"))
        for name, tensor in torch.load(path, weights_only=True).items()
    ]
    return [*asked, refused, *lines, *files, *weights]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CallRecorder:
    """Disable compilation, downloads and the endpoint, and record the calls."""
    call_recorder = CallRecorder()
    monkeypatch.setenv("DDP_METRICS_PORT", "9400")
    monkeypatch.delenv("DDP_CHECKPOINT_DIR", raising=False)
    monkeypatch.setattr(torch, "compile", call_recorder.note("compile"))
    monkeypatch.setattr(torch, "use_deterministic_algorithms", call_recorder.note("deterministic"))
    monkeypatch.setattr(assembly, "download", call_recorder.note("download"))
    monkeypatch.setattr(Exporter, "_serve", lambda self, port, folder: call_recorder.append(f"port {port}"))
    validation = assembly.ValidationLoader

    def validate(*args: Any, **named: Any) -> Any:
        loader = validation(*args, **named)
        call_recorder.append(f"validations of {len(list(loader.rounds()))} batches")
        return loader

    monkeypatch.setattr(assembly, "ValidationLoader", validate)
    made = reader.DataLoader
    monkeypatch.setattr(
        reader, "DataLoader",
        lambda *args, **named: call_recorder.append(f"workers {named['num_workers']}") or made(*args, **named),
    )  # fmt: skip
    return call_recorder


def fresh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder that has the data in ``data``."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    (Path("data")).mkdir()
    write_cifar10(Path("data"))


def test_repeated_run_has_equal_effects(
    asked: CallRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    for name in ("one", "other"):
        fresh(tmp_path / name, monkeypatch)
        asked.clear()
        seen.append(observe(["--train-accuracy", "true", *KEPT], RankEnv(), asked, capsys))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("key", CASES)
def test_option_changes_effects_of_run(
    key: str, asked: CallRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value, *needs = CASES[key]

    def see(name: str, *more: str) -> list[str]:
        fresh(tmp_path / name, monkeypatch)
        asked.clear()
        try:
            parse_small([*needs, *more])
        except UserError as error:  # the observable effect is the refusal
            return [str(error)]
        return observe([*needs, *more], RankEnv(), asked, capsys)

    if (1, *needs) not in WITHOUT:
        WITHOUT[1, *needs] = see("without")
    assert see("with", FLAGS[key], value) != WITHOUT[1, *needs]


@pytest.mark.parametrize("key", OF_RANKS)
def test_option_changes_effects_of_ranks(
    key: str, asked: CallRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value, *needs = OF_RANKS[key]

    def gather(everyone: list[Any], mine: Any) -> None:
        everyone[:] = [mine] * len(everyone)

    class Replica(torch.nn.Module):
        def __init__(self, module: torch.nn.Module, **named: Any) -> None:
            super().__init__()
            self.module = module
            asked.note("ddp", self)(**named)

        def forward(self, x: torch.Tensor) -> Any:
            return self.module(x)

    class Done:
        def wait(self) -> None: ...

    for name, meeting in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, meeting)
    for name in ("init_process_group", "broadcast", "all_reduce"):
        monkeypatch.setattr(torch.distributed, name, asked.note(name, answer=Done()))
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(ddp, "DistributedDataParallel", Replica)
    monkeypatch.setattr(engine, "replicate", ddp.replicate)
    monkeypatch.setattr(assembly, "convert", asked.note("sync batch norm"))

    def see(name: str, *more: str) -> list[str]:
        fresh(tmp_path / name, monkeypatch)
        asked.clear()
        return observe([*needs, *more], RankEnv(world_size=2, local_world_size=2), asked, capsys)

    if (2, *needs) not in WITHOUT:
        WITHOUT[2, *needs] = see("without")
    assert see("with", FLAGS[key], value) != WITHOUT[2, *needs]
