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

PAGES: Final = ("port", "prom", "log")
"""Sources of a rank's progress, the best first: the port of its exporter, the page that the exporter wrote at its end,
the values in its log."""

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

INPUTS_FOLDER: Final = "ddp-inputs"  # in a claim or a node cache: has a folder for each input
LAUNCHER_PHASES: Final = ("Starting", "WaitingForMaster", "Rendezvous", "Running", "Stopping", "Done", "Held")
"""Values of the label ``phase`` of series.METRIC_LAUNCHER_PHASE, in the order in which a pod passes them.

Held: between two runs of `ddp dev`."""
STALLED_STATES: Final = ("Stopped", "Behind", "IO", "Busy", "Waiting")
"""Values of the label ``state`` of series.METRIC_STALLED_RANK; ranks for which their peers wait come first."""
PREFLIGHT_CHECKS: Final = ("dns", "tcp", "allreduce", "transport", "pairs")
