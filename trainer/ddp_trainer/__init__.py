"""The trainer: ``torchrun -m ddp_trainer --preset NAME``, on one process or on several.

In a program: ``Trainer(config).fit()``, see docs/trainer.md. Names are imported on first use, and torch with them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ddp_sdk import RankEnv, UserError

if TYPE_CHECKING:
    from ddp_trainer.api import Result, Trainer
    from ddp_trainer.checkpoint import CheckpointConfig
    from ddp_trainer.cli import exit_code
    from ddp_trainer.config.run import RunConfig, resolve
    from ddp_trainer.data import DataConfig
    from ddp_trainer.data.arrays import Datasets
    from ddp_trainer.distributed import DistributedConfig
    from ddp_trainer.errors import Preempted
    from ddp_trainer.models import ModelConfig
    from ddp_trainer.optim import OptimConfig, ScheduleConfig
    from ddp_trainer.precision import PrecisionConfig
    from ddp_trainer.tasks import Classification, Metrics, Segmentation, Task

_HOMES = {
    "CheckpointConfig": "checkpoint", "Classification": "tasks", "DataConfig": "data", "Datasets": "data.arrays",
    "DistributedConfig": "distributed", "Metrics": "tasks", "ModelConfig": "models", "OptimConfig": "optim",
    "PrecisionConfig": "precision", "Preempted": "errors", "Result": "api", "RunConfig": "config.run",
    "ScheduleConfig": "optim", "Segmentation": "tasks", "Task": "tasks", "Trainer": "api", "exit_code": "cli",
    "resolve": "config.run",
}  # fmt: skip

__all__ = [
    "CheckpointConfig", "Classification", "DataConfig", "Datasets", "DistributedConfig", "Metrics", "ModelConfig",
    "OptimConfig", "PrecisionConfig", "Preempted", "RankEnv", "Result", "RunConfig", "ScheduleConfig", "Segmentation",
    "Task", "Trainer", "UserError", "exit_code", "resolve",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
