"""The metrics over time that pod 0 keeps."""

from typing import Final

POINT_COLUMNS: Final = (
    "epoch",
    "step",
    "loss",
    "learning_rate",
    "val_loss",
    "val_accuracy",
    "samples_per_second",
    "share",
    "checkpoint_step",
    "steps",
    "samples",
    "step_seconds",
    "data_seconds",
    "compute_seconds",
    "last_step_time",
    "world_size",
)
"""The numbers of rank 0 that pod 0 keeps over time, and serves as CSV after the column time."""
