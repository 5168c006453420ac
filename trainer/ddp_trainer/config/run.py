"""The configuration of a run, composed of the groups of settings."""

import json
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from ddp_sdk.errors import UserError, require
from ddp_trainer.checkpoint import CheckpointConfig
from ddp_trainer.config.presets import PRESETS, get_preset
from ddp_trainer.data import DataConfig
from ddp_trainer.distributed import DistributedConfig
from ddp_trainer.models import ModelConfig
from ddp_trainer.optim import OptimConfig, ScheduleConfig
from ddp_trainer.options import MAX_SEED, SettingsGroup, build, merge, option, options
from ddp_trainer.plan import EarlyStopConfig
from ddp_trainer.precision import PrecisionConfig


@dataclass(frozen=True)
class MetricsConfig(SettingsGroup, group="metrics"):
    """The Prometheus endpoint."""

    port: int | None = option(
        None,
        "port of local rank 0 (default: DDP_METRICS_PORT or 9400; 0: any free one)",
        flag="--metrics-port",
        at_least=0,
        at_most=65535,
    )


@dataclass(frozen=True)
class RunConfig(SettingsGroup):
    """All settings of a run."""

    preset: str = ""
    epochs: int = option(1, "passes over the training data", at_least=1)
    max_steps: int | None = option(None, "steps after which the run ends, before its last epoch", at_least=1)
    seed: int = option(
        0, "seed of initial weights, sample order, augmentation and dropout", at_least=0, at_most=MAX_SEED
    )
    log_every: int = option(10, "steps between progress lines", at_least=1)
    nonfinite: str = option(
        "count",
        "on a loss that is not a finite number: count it and continue, or stop all ranks and report step and rank",
        choices=("count", "stop"),
    )
    train_accuracy: bool = option(False, "also print the accuracy on every epoch's training batches")
    csv_dir: str | None = option(None, "folder for a CSV file with training time and validation accuracy per epoch")
    log_dir: str | None = option(
        None, "folder for metrics.jsonl and, if tensorboard is installed, TensorBoard's event files"
    )
    output_dir: str | None = option(None, "folder for config.json and model.pt (default: the checkpoint folder)")
    task: str | None = option(
        None, "module:Class of your own ddp_trainer.Task, with loss and metrics; none: the task that fits the labels"
    )
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not (self.distributed.data_parallel and self.precision.compile),
            "distributed.data_parallel",
            "DataParallel copies the model in every step, which torch.compile does not support",
            "omit --data-parallel or --compile",
        )


def resolve(
    preset: str | None = None,
    file: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    *,
    as_published: bool = False,
) -> RunConfig:
    """Build the configuration from a preset, a file and flags, each of which overrides the ones before.

    ``file`` and ``flags`` are settings by name, nested by group: ``{"data": {"batch_size": 64}}``. ``file`` may name
    the preset. Raises :class:`UserError` for invalid settings.
    """
    file = dict(file or {})
    preset_of_file = file.pop("preset", None)
    name = preset or preset_of_file
    values: dict[str, Any] = {}
    if name:
        chosen = get_preset(str(name))
        values = merge(chosen.values, chosen.as_published) if as_published else dict(chosen.values)
        values["preset"] = chosen.name
    return build(RunConfig, merge(merge(values, file), flags or {}))


def refuse_unread(config: RunConfig, flags: Set[str] = frozenset()) -> None:
    """Raise :class:`UserError` for a setting that the user set and nothing reads, such as the dropout of a GPT.

    The user set those on the command line, ``flags`` by their dotted names, and all that differ from the preset. A
    user's own part (``module:function``) may read any setting. Settings that depend on the machine (the device, the
    number of ranks, free memory) are never refused: one configuration serves a laptop and a cluster.
    """
    references = [RunConfig()]
    if config.preset in PRESETS:
        references += [resolve(config.preset), resolve(config.preset, as_published=True)]
    known = {setting.key: setting for setting in options(RunConfig)}
    for key, setting in known.items():
        get = attrgetter(key)
        if key not in flags and any(get(config) == get(reference) for reference in references):
            continue
        for governor, values in setting.only.items():
            present = attrgetter(governor)(config)
            names = present if isinstance(present, tuple) else (present,)
            is_own = any(":" in str(name) for name in names)
            if is_own or (any(name in values for name in names) if values else present):
                continue
            condition = f"{known[governor].flag} {' or '.join(values)}".strip()
            raise UserError(
                key, f"nothing reads {setting.flag} without {condition}", f"leave it out, or give {condition}"
            )


def read_file(path: str) -> dict[str, Any]:
    """Read settings from a JSON or YAML file; raises :class:`UserError` if it can't be read or is not a mapping."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("--config", f"{path} can't be read: {error}", "give the path of a YAML or JSON file") from error
    loaded: Any
    try:
        if path.endswith(".json"):
            loaded = json.loads(text)
        else:
            import yaml

            loaded = yaml.safe_load(text)
    except ImportError as error:
        raise UserError("--config", "reading YAML needs PyYAML", "pip install PyYAML, or give a .json file") from error
    except Exception as error:  # yaml.YAMLError can't be named without yaml; JSON raises ValueError
        raise UserError("--config", f"{path} is not valid: {' '.join(str(error).split())}", "fix the file") from error
    if not isinstance(loaded, dict):
        raise UserError("--config", f"{path} is not a mapping", "give for example 'epochs: 3'")
    return loaded


def describe(config: RunConfig) -> str:
    """Format the resolved configuration for the log, one line per group."""
    plain = asdict(config)
    top = {name: value for name, value in plain.items() if not isinstance(value, dict)}
    lines = ["config: " + _line(top)]
    lines += [f"  {name}: {_line(group)}" for name, group in plain.items() if isinstance(group, dict)]
    return "\n".join(lines)


def _line(values: Mapping[str, Any]) -> str:
    return " ".join(
        f"{name}={json.dumps(value) if isinstance(value, tuple) else value}" for name, value in values.items()
    )
