"""All series of the exporter: name, kind, unit and meaning. ``docs/metrics.md`` is generated from this table."""

from dataclasses import dataclass
from typing import Literal

from ddp_sdk import contract


@dataclass(frozen=True)
class Metric:
    """A series; its only label is ``rank``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str


METRICS = (
    Metric(contract.METRIC_SAMPLES, "counter", "Training samples this rank has processed."),
    Metric(contract.METRIC_TOKENS, "counter", "Training tokens this rank has processed; 0 without a language model."),
    Metric(contract.METRIC_STEPS, "counter", "Optimizer steps this process has taken."),
    Metric(contract.METRIC_GLOBAL_STEP, "gauge", "Optimizer steps of the whole run, across restarts."),
    Metric(contract.METRIC_TOTAL_STEPS, "gauge", "Steps after which the run is complete."),
    Metric(contract.METRIC_PROGRESS, "gauge", "Completed share of the run, 0 to 1."),
    Metric(contract.METRIC_EPOCH, "gauge", "Current epoch, counted from 1."),
    Metric(contract.METRIC_EPOCHS, "gauge", "Epochs of the run."),
    Metric(
        "ddp_step_duration_seconds",
        "histogram",
        "Wall time of a training step, from the wait for its batch to its end.",
    ),
    Metric("ddp_data_wait_seconds_total", "counter", "Time this rank has waited for batches or built them."),
    Metric("ddp_compute_seconds_total", "counter", "Time of forward and backward, before the wait for other ranks."),
    Metric(contract.METRIC_LOSS, "gauge", "Training loss of this rank."),
    Metric(contract.METRIC_NONFINITE, "counter", "Steps whose loss on this rank was not a finite number."),
    Metric(contract.METRIC_LEARNING_RATE, "gauge", "Learning rate of the last step."),
    Metric("ddp_grad_norm", "gauge", "Norm of the gradients before clipping."),
    Metric(contract.METRIC_VAL_ACCURACY, "gauge", "Accuracy of the last validation, over all ranks, 0 to 1."),
    Metric(contract.METRIC_VAL_LOSS, "gauge", "Loss of the last validation, over all ranks."),
    Metric("ddp_checkpoint_duration_seconds", "histogram", "Time to write a checkpoint (rank 0)."),
    Metric(contract.METRIC_CHECKPOINT_STEP, "gauge", "Step of the newest complete checkpoint (rank 0)."),
    Metric("ddp_gpu_memory_peak_bytes", "gauge", "Peak device memory of this rank's tensors; only with a GPU."),
    Metric(contract.METRIC_WORLD_SIZE, "gauge", "Number of ranks."),
    Metric(contract.METRIC_HEARTBEATS, "counter", "Heartbeats between steps, for the launcher's watchdog."),
    Metric(contract.METRIC_SAVING, "gauge", "1 while training waits for a checkpoint, else 0."),
    Metric(contract.METRIC_LAST_STEP, "gauge", "Unix time of the last step's end."),
)

BUCKETS = {
    # From a millisecond (a small model on a GPU) to minutes (segmentation on a CPU).
    "ddp_step_duration_seconds": (
        1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
    ),
    "ddp_checkpoint_duration_seconds": (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
}  # fmt: skip
