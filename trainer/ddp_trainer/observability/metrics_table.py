"""Every series of the exporter: name, kind, unit and meaning. ``docs/metrics.md`` is generated from it."""

from dataclasses import dataclass
from typing import Literal

from ddp_trainer import contract


@dataclass(frozen=True)
class Metric:
    """One series; its only label is ``rank``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str


METRICS = (
    Metric(contract.METRIC_SAMPLES, "counter", "Training samples this rank has processed."),
    Metric(contract.METRIC_TOKENS, "counter", "Training tokens this rank has processed; 0 without a language model."),
    Metric(contract.METRIC_STEPS, "counter", "Optimiser steps this process has taken."),
    Metric(contract.METRIC_GLOBAL_STEP, "gauge", "Optimiser steps of the whole run, across restarts."),
    Metric(contract.METRIC_TOTAL_STEPS, "gauge", "Steps after which the run is complete."),
    Metric(contract.METRIC_PROGRESS, "gauge", "Share of the run that is done, 0 to 1."),
    Metric(contract.METRIC_EPOCH, "gauge", "Current epoch, counted from 1."),
    Metric(contract.METRIC_EPOCHS, "gauge", "Epochs of the run."),
    Metric(
        "ddp_step_duration_seconds",
        "histogram",
        "Wall time of a training step, from the wait for its batch to its end.",
    ),
    Metric("ddp_data_wait_seconds_total", "counter", "Time the rank spent waiting for or making batches."),
    Metric("ddp_compute_seconds_total", "counter", "Time of forward and backward, before the wait for other ranks."),
    Metric(contract.METRIC_LOSS, "gauge", "Training loss of this rank."),
    Metric(contract.METRIC_NONFINITE, "counter", "Steps whose loss on this rank was not a finite number."),
    Metric(contract.METRIC_LEARNING_RATE, "gauge", "Learning rate of the last step."),
    Metric("ddp_grad_norm", "gauge", "Norm of the gradients before clipping."),
    Metric(contract.METRIC_VAL_ACCURACY, "gauge", "Accuracy of the last validation, over all ranks, 0 to 1."),
    Metric(contract.METRIC_VAL_LOSS, "gauge", "Loss of the last validation, over all ranks."),
    Metric("ddp_checkpoint_duration_seconds", "histogram", "Time to write a checkpoint (rank 0)."),
    Metric(contract.METRIC_CHECKPOINT_STEP, "gauge", "Step of the newest complete checkpoint (rank 0)."),
    Metric("ddp_gpu_memory_peak_bytes", "gauge", "Most device memory this rank's tensors have held; only with a GPU."),
    Metric(contract.METRIC_WORLD_SIZE, "gauge", "Number of ranks."),
    Metric(contract.METRIC_HEARTBEATS, "counter", "Signs of life between steps, for the launcher's watchdog."),
    Metric(contract.METRIC_SAVING, "gauge", "1 while training waits for a checkpoint, else 0."),
    Metric(contract.METRIC_LAST_STEP, "gauge", "When the last step ended, Unix time."),
)

BUCKETS = {
    # Between a millisecond (a toy on a GPU) and minutes (segmentation on a CPU).
    "ddp_step_duration_seconds": (
        1e-3,
        2.5e-3,
        5e-3,
        0.01,
        0.025,
        0.05,
        0.1,
        0.25,
        0.5,
        1.0,
        2.5,
        5.0,
        10.0,
        30.0,
        60.0,
        120.0,
    ),
    "ddp_checkpoint_duration_seconds": (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
}
