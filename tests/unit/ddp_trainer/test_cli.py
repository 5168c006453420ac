from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from ddp_trainer import contract
from ddp_trainer.cli import build_parser, main, parse
from ddp_trainer.config.options import build
from ddp_trainer.config.presets import PRESETS, get_preset
from ddp_trainer.config.run import describe, resolve
from ddp_trainer.errors import UserError


def test_flags_override_file_and_file_overrides_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("epochs: 5\ndata: {batch_size: 7}\noptim:\n  lr: 0.5\n")
    config = parse(["--preset", "digits-resnet", "--config", str(file), "--batch-size", "9"])
    assert config.preset == "digits-resnet"
    assert config.epochs == 5
    assert config.optim.lr == 0.5
    assert config.data.batch_size == 9
    assert config.optim.momentum == PRESETS["digits-resnet"].values["optim"]["momentum"]


def test_file_may_name_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"preset": "digits-resnet"}')
    assert parse(["--config", str(file)]).model.name == "small-resnet"


def test_saved_configuration_starts_same_run(tmp_path: Path) -> None:
    config = parse(["--preset", "digits-resnet", "--lr", "0.3"])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(asdict(config)))
    assert parse(["--config", str(file)]) == config


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_resolves_as_meant_and_as_published(name: str) -> None:
    for as_published in (False, True):
        config = resolve(name, None, {}, as_published=as_published)
        assert build(type(config), asdict(config)) == config


def test_help_lists_presets_and_every_group() -> None:
    text = build_parser().format_help()
    assert all(name in text for name in PRESETS)
    assert "--checkpoint-dir" in text
    assert "--metrics-port" in text


def test_help_needs_no_torch() -> None:
    code = "import sys; from ddp_trainer.cli import build_parser; build_parser().format_help(); "
    code += "print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_checkpoint_folder_is_read_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.ENV_CHECKPOINT_DIR, "/ckpt")
    assert parse(["--preset", "digits-resnet"]).checkpoint.dir == "/ckpt"
    assert parse(["--preset", "digits-resnet", "--checkpoint-dir", "/mine"]).checkpoint.dir == "/mine"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ([], "preset"),
        (["--preset", "digits-resnt"], "preset"),
        (["--preset", "digits-resnet", "--nonsense"], "command line"),
        (["--preset", "digits-resnet", "--epochs", "0"], "epochs"),
        (["--preset", "digits-resnet", "--epochs", "x"], "epochs"),
        (["--preset", "digits-resnet", "--max-steps", "0"], "max_steps"),
        (["--preset", "digits-resnet", "--seed", "-1"], "seed"),
        (["--preset", "digits-resnet", "--log-every", "0"], "log_every"),
        (["--preset", "digits-resnet", "--batch-size", "0"], "data.batch_size"),
        (["--preset", "digits-resnet", "--eval-batch-size", "0"], "data.eval_batch_size"),
        (["--preset", "digits-resnet", "--crop-padding", "-1"], "data.crop_padding"),
        (["--preset", "digits-resnet", "--validation-fraction", "1"], "data.validation_fraction"),
        (["--preset", "digits-resnet", "--augment", "crop,spin"], "data.augment"),
        (["--preset", "digits-resnet", "--data", "mnisst"], "data.name"),
        (["--preset", "digits-resnet", "--model", "resnet19"], "model.name"),
        (["--preset", "digits-resnet", "--model-width", "6"], "model.width"),
        (["--preset", "digits-resnet", "--dropout", "1"], "model.dropout"),
        (["--preset", "digits-resnet", "--optimizer", "lion"], "optim.name"),
        (["--preset", "digits-resnet", "--lr", "-1"], "optim.lr"),
        (["--preset", "digits-resnet", "--lr", "nan"], "optim.lr"),
        (["--preset", "digits-resnet", "--momentum", "0"], "optim.nesterov"),
        (["--preset", "digits-resnet", "--momentum", "1"], "optim.momentum"),
        (["--preset", "digits-resnet", "--beta2", "1"], "optim.beta2"),
        (["--preset", "digits-resnet", "--weight-decay", "-1"], "optim.weight_decay"),
        (["--preset", "digits-resnet", "--clip-norm", "0"], "optim.clip_norm"),
        (["--preset", "digits-resnet", "--accumulate", "0"], "optim.accumulate"),
        (["--preset", "digits-resnet", "--warmup-epochs", "-1"], "schedule.warmup_epochs"),
        (["--preset", "digits-resnet", "--warmup-start", "2"], "schedule.warmup_start"),
        (["--preset", "digits-resnet", "--lr-final", "2"], "schedule.final"),
        (["--preset", "digits-resnet", "--precision", "fp8"], "precision.name"),
        (
            ["--preset", "digits-resnet", "--compile", "--compile-mode", "reduce-overhead", "--accumulate", "2"],
            "precision.compile_mode",
        ),
        (["--preset", "digits-resnet", "--device", "tpu"], "distributed.device"),
        (["--preset", "digits-resnet", "--collective-timeout-seconds", "0"], "distributed.timeout_seconds"),
        (["--preset", "digits-resnet", "--bucket-mb", "0"], "distributed.bucket_mb"),
        (["--preset", "digits-resnet", "--checkpoint-keep", "0"], "checkpoint.keep"),
        (["--preset", "digits-resnet", "--checkpoint-every-steps", "-1"], "checkpoint.every_steps"),
        (["--preset", "digits-resnet", "--resume", "maybe"], "checkpoint.resume"),
        (["--preset", "digits-resnet", "--metrics-port", "70000"], "metrics.port"),
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
    assert parse([flag, "--preset", "digits-resnet"]) == parse(["--preset", "digits-resnet"])
    assert flag.partition("=")[0] not in build_parser().format_help()


@pytest.mark.parametrize("text", ["epochs: [", "- 1", ""])
def test_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match="--config"):
        parse(["--preset", "digits-resnet", "--config", str(file)])


def test_unknown_preset_gets_nearest_name() -> None:
    with pytest.raises(UserError, match="did you mean 'cifar10-resnet18'"):
        get_preset("cifar-resnet18")


def test_user_error_is_one_stderr_line_with_exit_code_81(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--preset", "digits-resnet", "--lr", "0"]) == contract.EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "ddp_trainer: error: optim.lr: 0.0 is out of range; it must be above 0\n"


def test_only_rank_0_prints_user_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(contract.ENV_RUNTIME_DIR, str(tmp_path))
    assert main(["--preset", "nothing"]) == contract.EXIT_USER_ERROR
    assert capsys.readouterr().err == ""
    record = json.loads((tmp_path / "errors" / "1.json").read_text())
    assert record["message"].startswith("preset: 'nothing' is not known")
    assert record | {"message": "", "time": 0} == {
        "type": "UserError",
        "message": "",
        "traceback": "",
        "exitCode": 81,
        "rank": 1,
        "localRank": 1,
        "restart": 3,
        "time": 0,
    }


def test_description_shows_every_setting() -> None:
    config = parse(["--preset", "digits-resnet"])
    text = describe(config)
    for group, values in asdict(config).items():
        assert group in text
        if isinstance(values, dict):
            assert all(f"{name}=" in text for name in values)
