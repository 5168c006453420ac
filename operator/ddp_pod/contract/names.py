"""Names and limits of a pod that launcher and operator share; the operator's ``constants`` re-exports them.

Values are API: change them only with a migration. ``docs/pod-contract.md`` explains them.
"""

from typing import Final

# Environment of the training container, set by the operator, or read by torchrun and Kubernetes by convention.
ENV_COMPLETION_INDEX: Final = "JOB_COMPLETION_INDEX"
ENV_LAUNCHER_CONFIG: Final = "DDP_LAUNCHER_CONFIG"  # JSON: see plan.PodPlan
ENV_METRICS_PORT: Final = "DDP_METRICS_PORT"
ENV_INPUTS: Final = "DDP_INPUTS"  # JSON, in the pod that fetches the inputs: see sources.InputState
ENV_GRACE_SECONDS: Final = "DDP_GRACE_SECONDS"
ENV_TERMINATION_LOG: Final = "DDP_TERMINATION_LOG"
ENV_TRACKING_RUN: Final = "DDP_TRACKING_RUN"  # identifies the run in experiment trackers: spec.tracking
ENV_CHECKPOINT_DIR: Final = "DDP_CHECKPOINT_DIR"
ENV_RUN_ID: Final = "DDP_RUN_ID"
ENV_ATTEMPT: Final = "DDP_ATTEMPT"
ENV_POD_IP: Final = "DDP_POD_IP"
ENV_RENDEZVOUS_SECRET: Final = "DDP_RENDEZVOUS_SECRET"  # removed by the launcher: scripts log their environment  # noqa: S105
ENV_MASTER_ADDR: Final = "MASTER_ADDR"
ENV_MASTER_PORT: Final = "MASTER_PORT"
ENV_OMP_NUM_THREADS: Final = "OMP_NUM_THREADS"
# Under `ddp run` only: a mark on every process of a pod; the file for the metrics port in use; and a descriptor that
# reaches its end of file when the pod's owner ends.
ENV_LOCAL_POD: Final = "DDP_LOCAL_POD"
ENV_PORT_FILE: Final = "DDP_PORT_FILE"
ENV_LIFELINE_FD: Final = "DDP_LIFELINE_FD"
# Environment of every worker process (set by the launcher).
ENV_RUNTIME_DIR: Final = "DDP_RUNTIME_DIR"
ENV_MEMORY_DIR: Final = "DDP_MEMORY_DIR"  # folder in shared memory for ddp_sdk.memory, set by the operator
ENV_MEMORY_INTERVAL: Final = "DDP_MEMORY_INTERVAL"  # steps between two copies
ENV_RUN_FD: Final = "DDP_RUN_FD"  # removed by the launcher: from which one on standby reads its run
ENV_RANK_FEATURES: Final = "DDP_RANK_FEATURES"  # the launcher's features with a part in the ranks, comma-separated
ENV_AGENT_PID: Final = "DDP_AGENT_PID"  # removed by the shim

# Folder of a record, see features.check.contract. `ddp check` sets it in its own environment, so templates may set it.
CHECK_VARIABLE: Final = "DDP_CHECK"

OPTIONAL_FEATURES: Final = ("check", "dev", "mirror")
"""Features of the launcher that an archive has only if the job uses them."""

# Files of the runtime directory.
STOPPING_FILE: Final = "stopping"  # exists after the pod has received a stop signal
RUN_STEP_FILE: Final = "step.json"  # the run's step in pod 0, which its agent shares with peer pods
COUNTERS_FILE: Final = "counters"  # the ranks' counters of optimizer steps: memory that the launcher reads
STEP_HINT_FILE: Final = "step-hint.json"  # what makes the steps of rank 0 visible: {"hint": …}
PAGES: Final = ("port", "prom", "log")
"""Sources of a rank's progress, the best first: the port of its exporter, the page that the exporter wrote at its end,
the values in its log."""
CHILD_ERROR: Final = "error"  # the suffix of the file with the exception that ended a process of a rank's program
ENDING: Final = "ending"  # the suffix of the file with what keeps a rank's process alive after its program
FINISHED: Final = "finished"  # the suffix of the file with the process id of a rank that has run its exit handlers
MAPPINGS: Final = "maps"  # the suffix of the file with the data files that a rank maps

# Exit codes of the launcher, and of a worker that knows its own category. The launcher maps every other exit code of
# a worker to one of them. The Job's podFailurePolicy acts on them.
EXIT_OK: Final = 0
EXIT_USER_ERROR: Final = 81  # a retry cannot help: a bad flag, a missing script, unreadable data
EXIT_RETRYABLE: Final = 82  # a worker failed; another attempt may succeed
EXIT_HANG: Final = 83  # no progress for too long
EXIT_OOM: Final = 84  # host or device memory
EXIT_PREEMPTED: Final = 85  # stopped by a signal; the script could save a checkpoint before
EXIT_PEER_LOST: Final = 86  # secondary: this pod lost a peer pod or the rendezvous

DEFAULT_RENDEZVOUS_PORT: Final = 29400
TERMINATION_MESSAGE_LIMIT: Final = 4096  # bytes; the kubelet truncates the rest

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
INPUTS_FOLDER: Final = "ddp-inputs"  # in a claim or a node cache: has a folder for each input
HISTORY_FOLDER: Final = "ddp-history"  # has a folder of records for each namespace
LAUNCHER_PHASES: Final = ("Starting", "WaitingForMaster", "Rendezvous", "Running", "Stopping", "Done", "Held")
"""Values of the label ``phase`` of METRIC_LAUNCHER_PHASE, in the order in which a pod passes them.

Held: between two runs of `ddp dev`."""
STALLED_STATES: Final = ("Stopped", "Behind", "IO", "Busy", "Waiting")
"""Values of the label ``state`` of METRIC_STALLED_RANK; ranks for which their peers wait come first."""
PREFLIGHT_CHECKS: Final = ("dns", "tcp", "allreduce", "transport", "pairs")
STACK_LIMIT: Final = 64 * 1024  # characters kept of a worker's stacks
