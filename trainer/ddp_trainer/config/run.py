"""The configuration of a run, composed of the groups of settings."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddp_trainer.checkpoint import CheckpointConfig
from ddp_trainer.config.options import MAX_SEED, SettingsGroup, build, merge, option
from ddp_trainer.config.presets import get_preset
from ddp_trainer.data import DataConfig
from ddp_trainer.distributed import DistributedConfig
from ddp_trainer.errors import UserError, require
from ddp_trainer.models import ModelConfig
from ddp_trainer.optim import OptimConfig, ScheduleConfig
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
    validate_every_steps: int = option(
        0, "steps between additional validations within an epoch; 0: only after each epoch", at_least=0
    )
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
    eval_only: bool = option(
        False, "only validate the newest checkpoint, or without one the weights of --init-from; save nothing"
    )
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
        require(
            self.optim.accumulate == 1 or self.precision.compile_mode == "default",
            "precision.compile_mode",
            f"the CUDA graphs of {self.precision.compile_mode} overwrite the gradients that --accumulate adds",
            "omit --accumulate or --compile-mode",
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
