"""The command line: precedence of its sources, what it refuses, and the exit code of a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from ddp_sdk import contract
from ddp_sdk.errors import UserError
from ddp_trainer.cli import build_parser, main, parse
from ddp_trainer.config.presets import PRESETS
from ddp_trainer.config.run import resolve
from ddp_trainer.options import build

DIGITS = ["--preset", "digits-resnet"]
GPT = ["--preset", "python-reference-gpt"]


def test_flags_override_file_and_file_overrides_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("epochs: 5\ndata: {batch_size: 7}\noptim:\n  lr: 0.5\n")
    config = parse([*DIGITS, "--config", str(file), "--batch-size", "9"])
    assert (config.preset, config.epochs, config.optim.lr, config.data.batch_size) == ("digits-resnet", 5, 0.5, 9)
    assert config.optim.momentum == PRESETS["digits-resnet"].values["optim"]["momentum"]
    named = tmp_path / "run.json"
    named.write_text('{"preset": "digits-resnet"}')
    assert parse(["--config", str(named)]).model.name == "small-resnet"


@pytest.mark.parametrize("name", PRESETS)
def test_saved_configuration_starts_same_run(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for config in (resolve(name), resolve(name, as_published=True), parse(["--preset", name, "--lr", "0.3"])):
        assert build(type(config), asdict(config)) == config
        file.write_text(json.dumps(asdict(config)))
        assert parse(["--config", str(file)]) == config


def test_help_lists_presets_and_groups_and_needs_no_torch() -> None:
    code = "import sys; from ddp_trainer.cli import build_parser; print(build_parser().format_help()); "
    code += "print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(name in out for name in [*PRESETS, "--checkpoint-dir", "--metrics-port"])
    assert out.rstrip().endswith("False")


def test_checkpoint_folder_is_read_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.ENV_CHECKPOINT_DIR, "/ckpt")
    assert parse(DIGITS).checkpoint.dir == "/ckpt"
    assert parse([*DIGITS, "--checkpoint-dir", "/mine"]).checkpoint.dir == "/mine"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ([], "preset"),
        (["--preset", "digits-resnt"], "preset"),
        ([*DIGITS, "--nonsense"], "command line"),
        ([*DIGITS, "--epochs", "0"], "epochs"),
        ([*DIGITS, "--epochs", "x"], "epochs"),
        ([*DIGITS, "--augment", "crop,spin"], "data.augment"),
        ([*DIGITS, "--data", "mnisst"], "data.name"),
        ([*DIGITS, "--data", "mine:load", "--data-download"], "data.download"),
        ([*DIGITS, "--scale-min", "2"], "data.scale_min"),
        ([*DIGITS, "--model", "resnet19"], "model.name"),
        ([*DIGITS, "--model-width", "6"], "model.width"),
        ([*DIGITS, "--optimizer", "lion"], "optim.name"),
        ([*DIGITS, "--lr", "nan"], "optim.lr"),
        ([*DIGITS, "--momentum", "0"], "optim.nesterov"),
        ([*DIGITS, "--data-parallel", "--compile"], "distributed.data_parallel"),
        (["--config", "/nowhere/run.yaml"], "--config"),
    ],
)
def test_bad_command_line_names_setting(arguments: list[str], field: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(arguments)
    assert caught.value.field == field
    assert caught.value.remedy


@pytest.mark.parametrize("flag", ["--local-rank=1", "--local_rank=1"])
def test_arguments_of_torch_distributed_launch_are_accepted(flag: str) -> None:
    assert parse([flag, *DIGITS]) == parse(DIGITS)
    assert flag.partition("=")[0] not in build_parser().format_help()


@pytest.mark.parametrize("text", ["epochs: [", "- 1", ""])
def test_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match="--config"):
        parse([*DIGITS, "--config", str(file)])


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["--preset", "cifar-resnet18"], "cifar10-resnet18"),
        ([*GPT, "--clip_norm", "1"], "--clip-norm"),
        ([*GPT, "--learning-rate", "1"], "--lr"),
        ([*GPT, "--width", "1"], "--model-width"),
        ([*GPT, "--optim-momentum", "1"], "--momentum"),
        (["--pressets=x"], "--preset"),
    ],
)
def test_unknown_name_gets_nearest_one(arguments: list[str], suggestion: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(arguments)
    assert f"did you mean {suggestion}" in caught.value.remedy.replace("'", "")


RESNET = ["--preset", "cifar10-resnet18"]


@pytest.mark.parametrize(
    ("arguments", "field", "reader"),
    [
        ([*GPT, "--dropout", "0.5"], "model.dropout", "--model small-resnet or wide-resnet"),
        ([*GPT, "--momentum", "0.9"], "optim.momentum", "--optimizer sgd"),  # given, although it is the default
        ([*RESNET, "--rotation", "45"], "data.rotation", "--augment rotate"),
        ([*RESNET, "--image-size", "64"], "data.image_size", "--data voc2012"),
        ([*RESNET, "--augment", "", "--jitter", "0.1"], "data.jitter", "--augment jitter"),
        ([*RESNET, "--patience", "3"], "early_stop.patience", "--target-accuracy"),
        ([*RESNET, "--checkpoint-every-steps", "9"], "checkpoint.every_steps", "--checkpoint-dir"),
    ],
)
def test_setting_that_nothing_reads_is_refused_with_its_reader(arguments: list[str], field: str, reader: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(arguments)
    assert caught.value.field == field
    assert caught.value.remedy == f"leave it out, or give {reader}"


def test_unread_setting_of_file_is_refused_but_not_that_of_preset_or_own_part(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"optim": {"momentum": 0.1}}))
    with pytest.raises(UserError, match=r"optim\.momentum: nothing reads --momentum without --optimizer sgd"):
        parse([*GPT, "--config", str(file)])
    assert parse([*RESNET, "--optimizer", "adamw"]).optim.momentum == 0.9
    assert parse([*RESNET, "--model", "mine:build", "--dropout", "0.5"]).model.dropout == 0.5


@pytest.mark.parametrize("rank", [0, 1])
def test_user_error_is_one_line_of_rank_0_with_record_of_each_rank(
    rank: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environ = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "TORCHELASTIC_RESTART_COUNT": 3}
    for name, value in environ.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv(contract.ENV_RUNTIME_DIR, str(tmp_path))
    assert main([*DIGITS, "--lr", "0"]) == contract.EXIT_USER_ERROR
    captured = capsys.readouterr()
    message = "optim.lr: 0.0 is out of range; it must be above 0"
    assert (captured.out, captured.err) == ("", "" if rank else f"ddp_trainer: error: {message}\n")
    record = json.loads((tmp_path / "errors" / f"{rank}.json").read_text())
    assert record | {"time": 0} == {
        "type": "UserError", "message": message, "traceback": "", "exitCode": 81, "rank": rank, "localRank": rank,
        "restart": 3, "time": 0,
    }  # fmt: skip
