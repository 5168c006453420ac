"""Names of the series at ``/metrics``, and of those of a script's own exporter: API. The operator reads reports."""

from typing import Final

# Series that the launcher writes.
METRIC_LAUNCHER_PHASE: Final = "ddp_launcher_phase"
METRIC_LAUNCHER_RESTARTS: Final = "ddp_launcher_in_place_restarts_total"
METRIC_RESTART_STEP: Final = "ddp_launcher_restart_step"
METRIC_HEARTBEAT_AGE: Final = "ddp_launcher_heartbeat_age_seconds"
METRIC_HANGS: Final = "ddp_launcher_hangs_total"
METRIC_STALLED: Final = "ddp_launcher_stalled_seconds"
METRIC_STALLED_RANK: Final = "ddp_launcher_stalled_rank_info"
METRIC_PREFLIGHT_PASSED: Final = "ddp_launcher_preflight_passed"
METRIC_PREFLIGHT_SECONDS: Final = "ddp_launcher_preflight_duration_seconds"
METRIC_ALL_REDUCE_RATE: Final = "ddp_launcher_all_reduce_bytes_per_second"
METRIC_NETWORK: Final = "ddp_launcher_network_info"
METRIC_SLOWEST_PAIR: Final = "ddp_launcher_slowest_pair_bytes_per_second"
METRIC_TRACKING: Final = "ddp_launcher_tracking_info"
METRIC_UPLOAD_STEP: Final = "ddp_checkpoint_upload_step"
METRIC_UPLOAD_TIME: Final = "ddp_checkpoint_upload_timestamp_seconds"
METRIC_UPLOAD_BYTES: Final = "ddp_checkpoint_upload_bytes_total"
METRIC_UPLOAD_FAILURES: Final = "ddp_checkpoint_upload_consecutive_failures"
METRIC_MEMORY_STEP: Final = "ddp_memory_checkpoint_step"
METRIC_MEMORY_TIME: Final = "ddp_memory_checkpoint_timestamp_seconds"
METRIC_MEMORY_BYTES: Final = "ddp_memory_checkpoint_bytes"
METRIC_MEMORY_SAVES: Final = "ddp_memory_checkpoint_saves_total"
METRIC_MEMORY_STALLED: Final = "ddp_memory_checkpoint_stalled_seconds_total"
# Series of a rank that the launcher reads, or derives from the script's log.
METRIC_GLOBAL_STEP: Final = "ddp_step"
METRIC_STEPS: Final = "ddp_steps_total"
METRIC_STEP_INTERVAL: Final = "ddp_step_interval"  # in a page from the log: steps between two lines
METRIC_TOTAL_MARGIN: Final = "ddp_planned_steps_margin"  # in a page from the log: steps by which the total may be off
METRIC_STEP_SECONDS: Final = "ddp_step_duration_seconds_sum"
METRIC_LAST_STEP: Final = "ddp_last_step_timestamp_seconds"
METRIC_PROGRESS: Final = "ddp_progress_ratio"
METRIC_WORLD_SIZE: Final = "ddp_world_size"
METRIC_HEARTBEATS: Final = "ddp_heartbeats_total"
METRIC_SAVING: Final = "ddp_saving"
METRIC_CHECKPOINT_STEP: Final = "ddp_checkpoint_step"
METRIC_SAMPLES: Final = "ddp_samples_total"
METRIC_LOSS: Final = "ddp_loss"
METRIC_LOST_LOSS: Final = "ddp_loss_not_finite_step"  # the step since which the loss is NaN or infinite
METRIC_EPOCH: Final = "ddp_epoch"
METRIC_EPOCHS: Final = "ddp_planned_epochs"
METRIC_TOTAL_STEPS: Final = "ddp_planned_steps"
METRIC_VAL_ACCURACY: Final = "ddp_validation_accuracy_ratio"
METRIC_VAL_LOSS: Final = "ddp_validation_loss"
METRIC_LEARNING_RATE: Final = "ddp_learning_rate"
METRIC_GLOBAL_RATE: Final = "ddp_global_samples_per_second"
METRIC_DATA_SECONDS: Final = "ddp_data_wait_seconds_total"
METRIC_COMPUTE_SECONDS: Final = "ddp_compute_seconds_total"

SERIES: Final = {
    "step": METRIC_GLOBAL_STEP,
    "steps": METRIC_STEPS,
    "total_steps": METRIC_TOTAL_STEPS,
    "total_margin": METRIC_TOTAL_MARGIN,
    "step_interval": METRIC_STEP_INTERVAL,
    "share": METRIC_PROGRESS,
    "epoch": METRIC_EPOCH,
    "epochs": METRIC_EPOCHS,
    "loss": METRIC_LOSS,
    "lost_loss_step": METRIC_LOST_LOSS,
    "learning_rate": METRIC_LEARNING_RATE,
    "val_loss": METRIC_VAL_LOSS,
    "val_accuracy": METRIC_VAL_ACCURACY,
    "samples": METRIC_SAMPLES,
    "samples_per_second": METRIC_GLOBAL_RATE,
    "step_seconds": METRIC_STEP_SECONDS,
    "data_seconds": METRIC_DATA_SECONDS,
    "compute_seconds": METRIC_COMPUTE_SECONDS,
    "last_step_time": METRIC_LAST_STEP,
    "world_size": METRIC_WORLD_SIZE,
    "heartbeats": METRIC_HEARTBEATS,
    "saving": METRIC_SAVING,
    "checkpoint_step": METRIC_CHECKPOINT_STEP,
}
"""The series of each number of a RankProgress."""
FIELDS: Final = {series: name for name, series in SERIES.items()}
"""The number of a RankProgress that each series is."""
