"""The configured run reads or refuses every setting: with each registered part, over all settings."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_trainer import assembly, trainer
from ddp_trainer.api import Trainer
from ddp_trainer.cli import main, parse
from ddp_trainer.config.options import build, merge, options
from ddp_trainer.config.presets import PRESETS
from ddp_trainer.config.run import RunConfig, resolve
from ddp_trainer.config.unread import RULES, Choice, find_changed, find_unread, refuse_unread
from ddp_trainer.data import AUGMENTATIONS, CACHES, DATASETS, DataConfig
from ddp_trainer.data.arrays import Datasets, ImageData
from ddp_trainer.distributed import RankEnv
from ddp_trainer.errors import UserError
from ddp_trainer.models import MODELS, ModelConfig, build_model
from ddp_trainer.optim import OPTIMIZERS, SCHEDULES, OptimConfig
from tests.support.setting_reads import Recording
from tests.support.tiny_datasets import write_cifar10, write_fashion_mnist, write_voc2012
from tests.support.trainer_plugins import COLOURED

OPTIONS = {option.key: option for option in options(RunConfig)}
# Read only on a GPU, by several ranks or with little memory: test_option_effects shows their effects there.
OF_MACHINE = {
    "data.workers",
    "distributed.backend", "distributed.timeout_seconds", "distributed.bucket_mb",
    "distributed.bucket_view", "distributed.find_unused_parameters", "distributed.broadcast_buffers",
    "distributed.compression", "schedule.warmup_by_node",
}  # fmt: skip
# Read in every run, but without effect where they are refused.
LOOKED_AT = {
    "model.sync_batchnorm", "precision.channels_last",
    "checkpoint.every_epochs", "checkpoint.every_steps", "data.download", "data.validation_augment",
}  # fmt: skip


def flat(config: ModelConfig, in_channels: int, num_classes: int) -> nn.Module:
    """A user's model that reads no setting."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, num_classes))


def with_dropout(config: ModelConfig, in_channels: int, num_classes: int) -> nn.Module:
    """A model that reads the probability of dropout."""
    return nn.Sequential(flat(config, in_channels, num_classes), nn.Dropout(config.dropout))


class _Keeping(nn.Module):
    def __init__(self, config: ModelConfig, layers: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def keeping(config: ModelConfig, in_channels: int, num_classes: int) -> nn.Module:
    """A model that keeps its settings, so that it may read any of them later."""
    return _Keeping(config, flat(config, in_channels, num_classes))


def per_pixel(config: ModelConfig, in_channels: int, num_classes: int) -> nn.Module:
    """A model that returns a class per pixel."""
    return nn.Conv2d(in_channels, num_classes, 1)


def grey(config: DataConfig) -> Datasets:
    """A user's data, stored as images; their number is read from the settings."""
    images = torch.zeros(8, 1, config.image_size or 8, config.image_size or 8, dtype=torch.uint8)
    data = ImageData(images, torch.arange(8) % 2)
    return Datasets(data, data, 2, mean=(0.0,), std=(1.0,))


FLAT = f"{__name__}:flat"
WITH_DROPOUT = f"{__name__}:with_dropout"
BASE: Mapping[str, Any] = {
    "max_steps": 1,
    "data": {"name": COLOURED, "batch_size": 30},
    "model": {"name": FLAT},
    "distributed": {"device": "cpu"},
    "metrics": {"port": 0},
}
TEXT = {
    "task": "ddp_trainer.tasks:LanguageModel",
    "data": {"name": "python-reference", "validation_fraction": 0.01, "workers": 0},
    "model": {"name": "gpt", "width": 32},
}
VOC = {"data": {"name": "voc2012", "image_size": 32, "batch_size": 4}, "model": {"name": f"{__name__}:per_pixel"}}
OF_DATA: dict[str, dict[str, Any]] = {
    "python-reference": TEXT,
    "voc2012": VOC,
}
# Names, and changes to BASE: one for each registered part, and for each switch that other settings need.
RUNS: dict[str, dict[str, Any]] = {
    "base": {},
    **{f"data {name}": merge({"data": {"name": name}}, OF_DATA.get(name, {})) for name in DATASETS},
    **{f"optimizer {name}": {"optim": {"name": name, "weight_decay": 0.1}} for name in OPTIMIZERS},
    **{f"schedule {name}": {"schedule": {"name": name}} for name in SCHEDULES},
    **{
        f"augmentation {name}": merge(VOC if name == "scale" else {}, {"data": {"augment": [name]}})
        for name in AUGMENTATIONS
    },
    "augmentation crop of masks": merge(VOC, {"data": {"augment": ["crop"]}}),
    **{f"cache {name}": {"data": {"cache": name}} for name in CACHES},
    "warm-up": {"schedule": {"warmup_epochs": 0.4}, "max_steps": 2},
    "warm-up from a start": {"schedule": {"warmup_epochs": 0.4, "warmup_start": 0.0}, "max_steps": 2},
    "target": {"early_stop": {"target_accuracy": 0.9}},
    "checkpoints": {"checkpoint": {"dir": "kept"}, "max_steps": 2},
    "own optimizer": {"optim": {"name": "tests.unit.ddp_trainer.optim.test_user_optimizer:adamw"}},
    "own schedule": {"schedule": {"name": "tests.unit.ddp_trainer.optim.test_user_optimizer:falling"}},
    "data parallel": {"distributed": {"data_parallel": True}},
}
SMALL = {"small-resnet": {"width": 4}, "gpt": {"width": 32}, "wide-resnet": {"widen": 1}}


@pytest.fixture(autouse=True)
def _in_a_folder_with_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DDP_CHECKPOINT_DIR", raising=False)


def configure(changes: Mapping[str, Any]) -> RunConfig:
    return build(RunConfig, merge(BASE, changes))


class Reads:
    """A configuration that records which settings of all groups are read."""

    def __init__(self, config: RunConfig) -> None:
        whole = Recording(config)
        self._recordings = [whole]
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if dataclasses.is_dataclass(value):
                group = Recording(value)
                object.__setattr__(whole.config, field.name, group.config)
                self._recordings.append(group)
        self.config: RunConfig = whole.config

    @property
    def keys(self) -> set[str]:
        return {name for recording in self._recordings for name in recording.reads}


def record_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Train. Return the settings that are read, except by the description of the run."""
    monkeypatch.setattr(trainer, "describe", lambda config: "")
    monkeypatch.setattr(assembly, "asdict", lambda config: {})
    reads = Reads(config)
    program = Trainer(config, env=RankEnv())
    program.config = reads.config
    program.fit()
    return reads.keys


def assert_each_is_read_or_refused(config: RunConfig, reads: set[str]) -> None:
    names = {"data.name": config.data.name, "model.name": config.model.name}
    # A user's own model and data may read any setting of their kind.
    of_own = {key for rule in RULES if ":" in names.get(rule.key, "") for key in rule.governed}  # type: ignore[attr-defined]
    unread = {setting.key for setting in find_unread(config)}
    ignored = OPTIONS.keys() - reads - unread - OF_MACHINE - of_own
    assert not ignored, f"declare who reads them, or read them: {sorted(ignored)}"
    refused_in_vain = unread & reads - LOOKED_AT
    assert not refused_in_vain, f"declared unread, and read: {sorted(refused_in_vain)}"
    for key in unread:
        with pytest.raises(UserError) as caught:
            refuse_unread(config, {key})
        assert caught.value.field == key
        assert OPTIONS[key].flag in caught.value.problem


@pytest.mark.parametrize("name", RUNS)
def test_each_setting_of_run_is_read_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(RUNS[name])
    write = {"cifar10": write_cifar10, "fashion-mnist": write_fashion_mnist, "voc2012": write_voc2012}
    if config.data.name in write:
        write[config.data.name](Path("data"))
    if config.data.verify and config.data.name in ("cifar10", "fashion-mnist"):
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, verify=False))
    assert_each_is_read_or_refused(config, record_run(config, monkeypatch))


@pytest.fixture(scope="module")
def common_reads() -> set[str]:
    """The settings that a run reads with any model."""
    with pytest.MonkeyPatch.context() as patch:
        return record_run(configure({}), patch)


@pytest.mark.parametrize("name", MODELS)
def test_each_setting_of_model_is_read_or_refused(name: str, common_reads: set[str]) -> None:
    config = configure({"model": {"name": name, **SMALL.get(name, {})}})
    recording = Recording(config.model)
    with torch.device("meta"):
        build_model(recording.config, 3, 10)
    unread = {setting.key for setting in find_unread(config)}
    builders = {key for rule in RULES if isinstance(rule, Choice) and rule.key == "model.name" for key in rule.governed}
    assert not recording.reads & unread
    missing = {key for key in builders - unread if key.startswith("model.")} - recording.reads - LOOKED_AT
    assert not missing, f"declared to be read by {name}, and not read: {sorted(missing)}"
    assert_each_is_read_or_refused(config, recording.reads | (common_reads - {"model.name"}) | {"model.name"})


def test_each_choice_lists_all_values_of_its_setting() -> None:
    for rule in RULES:
        choices = OPTIONS[rule.key].choices  # type: ignore[attr-defined]
        if isinstance(rule, Choice) and choices is not None:
            assert set(rule.reads) == set(choices)
        assert rule.governed <= OPTIONS.keys()


@pytest.mark.parametrize("as_published", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_preset_sets_only_values_that_its_parts_read(name: str, as_published: bool) -> None:
    config = resolve(name, as_published=as_published)
    values = PRESETS[name].values if not as_published else PRESETS[name].as_published
    named = {f"{group}.{key}" for group, part in values.items() if isinstance(part, Mapping) for key in part}
    unread = {setting.key for setting in find_unread(dataclasses.replace(config, checkpoint=KEPT))}
    default = find_changed(dataclasses.replace(config, preset=""))
    assert not unread & default
    assert as_published or not unread & named


KEPT = RunConfig().checkpoint.__class__(dir="kept")
GPT = ["--preset", "python-reference-gpt"]
RESNET = ["--preset", "cifar10-resnet18"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*GPT, "--dropout", "0.5"], "model gpt does not read --dropout; leave it out, or give --model small-resnet or "
         "wide-resnet, which read it; gpt reads --model-width"),
        ([*GPT, "--momentum", "0.1"], "optimizer adamw does not read --momentum; leave it out, or give --optimizer "
         "sgd, which reads it; adamw reads --beta1, --beta2, --lr, --norm-bias-decay, --weight-decay"),
        ([*GPT, "--momentum", "0.9"], "optim.momentum: optimizer adamw"),  # given, although it is the default
        ([*RESNET, "--dropout", "0.5"], "model.dropout: model resnet18 does not read --dropout"),
        ([*RESNET, "--dropout", "0.5", "--rotation", "45"], "data.rotation: augmentation crop, flip does not read "
         "--rotation; leave it out, or give --augment rotate, which reads it; crop, flip reads --crop-padding. Also: "
         "model resnet18 does not read --dropout"),
        ([*RESNET, "--model-norm", "group"], "model resnet18 does not read --model-norm"),
        ([*RESNET, "--model-width", "64"], "model resnet18 does not read --model-width"),
        ([*RESNET, "--image-size", "64"], "data cifar10 does not read --image-size"),
        ([*RESNET, "--augment", "", "--jitter", "0.1"], "no augmentation is chosen that reads --jitter"),
        ([*RESNET, "--patience", "3"], "nothing reads --patience without --target-accuracy"),
        ([*RESNET, "--checkpoint-every-steps", "9"], "nothing reads --checkpoint-every-steps without --checkpoint-dir"),
        ([*RESNET, "--data-parallel", "--compression", "bf16"], "nothing reads --compression beside --data-parallel"),
    ],
)  # fmt: skip
def test_unread_flag_is_refused_with_its_part_and_remedy(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(arguments)
    assert message in str(caught.value)


def test_unread_setting_of_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"optim": {"momentum": 0.1}}))
    with pytest.raises(UserError, match=r"optim\.momentum: optimizer adamw does not read --momentum"):
        parse([*GPT, "--config", str(file)])


@pytest.mark.parametrize("name", PRESETS)
def test_saved_configuration_of_changed_run_is_accepted(name: str, tmp_path: Path) -> None:
    config = parse(["--preset", name, "--as-published", "--optimizer", "adamw", "--augment", ""])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(dataclasses.asdict(config)))
    assert parse(["--config", str(file)]) == config


def test_unread_setting_of_program_is_refused() -> None:
    with pytest.raises(UserError, match=r"optim\.momentum: optimizer adamw does not read --momentum"):
        Trainer(RunConfig(optim=OptimConfig(name="adamw", momentum=0.5)))
    config = resolve("python-reference-gpt", {"model": {"dropout": 0.5}})
    with pytest.raises(UserError, match=r"model\.dropout: model gpt does not read --dropout"):
        Trainer(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": WITH_DROPOUT, "dropout": 0.5}},
        {"model": {"name": f"{__name__}:keeping", "dropout": 0.5}},
        {"data": {"name": f"{__name__}:grey", "image_size": 16, "cache": "device", "batch_size": 4}},
        {"data": {"name": f"{__name__}:grey", "augment": ["crop"], "crop_padding": 1, "batch_size": 4}},
    ],
)
def test_setting_that_function_of_users_own_reads_is_accepted(changes: Any) -> None:
    assert Trainer(configure(changes), env=RankEnv()).fit().steps == 1


def test_unread_override_of_resumed_run_is_refused_and_keeps_checkpoints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--preset", "digits-resnet", "--model-width", "4", "--device", "cpu", "--metrics-port", "0"]
    arguments += ["--checkpoint-dir", "kept", "--max-steps"]
    assert main([*arguments, "1"]) == 0
    before = sorted((path.name, path.stat().st_mtime_ns) for path in Path("kept").iterdir())
    assert main([*arguments, "2", "--beta1", "0.5"]) == 81
    assert "optimizer sgd does not read --beta1" in capsys.readouterr().err
    assert sorted((path.name, path.stat().st_mtime_ns) for path in Path("kept").iterdir()) == before


@pytest.mark.parametrize(
    ("flag", "suggestion"),
    [
        ("--clip_norm", "--clip-norm"),
        ("--clip-nrm", "--clip-norm"),
        ("--learning-rate", "--lr"),
        ("--width", "--model-width"),
        ("--optim-momentum", "--momentum"),
        ("--scheduler", "--schedule"),
        ("--pressets=x", "--preset"),
    ],
)
def test_unknown_flag_is_reported_with_nearest_one(flag: str, suggestion: str) -> None:
    with pytest.raises(UserError, match=rf"unrecognized arguments: {flag}.*did you mean {suggestion}\?"):
        parse([*GPT, flag, "1"])


def test_recording_config_is_equal_in_values_and_pickles_as_plain_settings() -> None:
    config = ModelConfig(dropout=0.5)
    recording = Recording(config)
    assert isinstance(recording.config, ModelConfig)
    assert pickle.loads(pickle.dumps(recording.config)) == config
    assert recording.config.dropout == 0.5
    assert recording.reads == {"model.dropout"}


def test_every_pair_of_setting_and_part_is_covered() -> None:
    covered = {name.partition(" ")[2] for name in RUNS} | set(MODELS)
    parts = itertools.chain(MODELS, DATASETS, OPTIMIZERS, SCHEDULES, AUGMENTATIONS, CACHES)
    assert set(parts) <= covered
