"""A script's half of the pod contract: environment variables, exit codes, ports and metric names.

``ddp_pod.contract.names`` defines the same names. Scripts must not import the operator: this module repeats them, and
``tests/contract`` checks that they are equal. ``docs/pod-contract.md`` explains them.
"""

from typing import Final

# Set by the operator in the training container, or by `ddp run` for a process; unset without them.
ENV_METRICS_PORT: Final = "DDP_METRICS_PORT"
ENV_CHECKPOINT_DIR: Final = "DDP_CHECKPOINT_DIR"
ENV_GRACE_SECONDS: Final = "DDP_GRACE_SECONDS"
ENV_ATTEMPT: Final = "DDP_ATTEMPT"
ENV_RUN_ID: Final = "DDP_RUN_ID"
ENV_JOB_NAME: Final = "DDP_JOB_NAME"
ENV_MEMORY_DIR: Final = "DDP_MEMORY_DIR"
ENV_MEMORY_INTERVAL: Final = "DDP_MEMORY_INTERVAL"
# Set by the launcher for every worker process.
ENV_RUNTIME_DIR: Final = "DDP_RUNTIME_DIR"

# A worker's files in the runtime directory, by local rank.
RUNTIME_PORT_FILE: Final = "metrics/{local_rank}.port"
RUNTIME_FINAL_PAGE: Final = "metrics/{local_rank}.prom"
RUNTIME_ERROR_FILE: Final = "errors/{local_rank}.json"

# Exit codes that classify a worker's end.
EXIT_OK: Final = 0
EXIT_USER_ERROR: Final = 81  # a restart can't help: a wrong flag, unreadable data
EXIT_RETRYABLE: Final = 82
EXIT_HANG: Final = 83
EXIT_OOM: Final = 84
EXIT_PREEMPTED: Final = 85  # stopped by SIGTERM, with a checkpoint if a checkpoint folder is set
EXIT_PEER_LOST: Final = 86

DEFAULT_METRICS_PORT: Final = 9400

# Series that the operator reads. ``metrics_table`` has all series of a rank with their meaning.
METRIC_SAMPLES: Final = "ddp_samples_total"
METRIC_STEPS: Final = "ddp_steps_total"
METRIC_TOKENS: Final = "ddp_tokens_total"
METRIC_LOSS: Final = "ddp_loss"
METRIC_EPOCH: Final = "ddp_epoch"
METRIC_EPOCHS: Final = "ddp_planned_epochs"
METRIC_TOTAL_STEPS: Final = "ddp_planned_steps"
METRIC_PROGRESS: Final = "ddp_progress_ratio"
METRIC_VAL_ACCURACY: Final = "ddp_validation_accuracy_ratio"
METRIC_VAL_LOSS: Final = "ddp_validation_loss"
METRIC_LEARNING_RATE: Final = "ddp_learning_rate"
METRIC_WORLD_SIZE: Final = "ddp_world_size"
METRIC_LAST_STEP: Final = "ddp_last_step_timestamp_seconds"
METRIC_CHECKPOINT_STEP: Final = "ddp_checkpoint_step"
METRIC_GLOBAL_STEP: Final = "ddp_step"
METRIC_NONFINITE: Final = "ddp_nonfinite_losses_total"
METRIC_HEARTBEATS: Final = "ddp_heartbeats_total"
METRIC_SAVING: Final = "ddp_saving"
