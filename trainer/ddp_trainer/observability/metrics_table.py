"""Every series of the exporter: name, kind, unit, meaning and formula. ``docs/metrics.md`` is generated from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddp_trainer import contract


@dataclass(frozen=True)
class Metric:
    """One series; its only label is ``rank``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    formula: str


# Steps between a millisecond (a toy on a GPU) and minutes (segmentation on a CPU).
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
CHECKPOINT_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

METRICS = (
    Metric(
        contract.METRIC_SAMPLES,
        "counter",
        "Training samples this rank has processed.",
        "Sum of the batch sizes of this process's steps. Starts at 0 with the process, also after a resume.",
    ),
    Metric(
        contract.METRIC_STEPS,
        "counter",
        "Optimiser steps this process has taken.",
        "One a step. Starts at 0 with the process; the run's own count is ddp_step.",
    ),
    Metric(
        contract.METRIC_GLOBAL_STEP,
        "gauge",
        "Optimiser steps of the whole run, across restarts.",
        "Number of finished steps, taken up from the checkpoint on a resume.",
    ),
    Metric(
        contract.METRIC_TOTAL_STEPS,
        "gauge",
        "Steps after which the run is complete.",
        "min(epochs * steps an epoch, max_steps).",
    ),
    Metric(contract.METRIC_PROGRESS, "gauge", "Share of the run that is done, 0 to 1.", "ddp_step / ddp_total_steps."),
    Metric(contract.METRIC_EPOCH, "gauge", "Current epoch, counted from 1.", "The epoch of the last step."),
    Metric(contract.METRIC_EPOCHS, "gauge", "Epochs of the run.", "The setting `epochs`."),
    Metric(
        "ddp_step_seconds",
        "histogram",
        "Wall time of a training step, from the wait for its batch to its end.",
        "End of a step minus end of the step before; validation and checkpoints between two steps are left out. On a "
        "GPU the host's time: it runs ahead of the device for a few steps at most, so sums over many steps agree.",
    ),
    Metric(
        "ddp_data_wait_seconds_total",
        "counter",
        "Time the rank spent waiting for or making batches.",
        "Sum of the host's time in the loader.",
    ),
    Metric(
        "ddp_compute_seconds_total",
        "counter",
        "Time of forward and backward, before the wait for other ranks.",
        "From the batch being there to the gradient of the model's first parameter, which backward reaches last. On a "
        "CPU wall time; all-reduces that overlap with backward share its cores and are counted in. On a GPU the time "
        "between two device events, read when they have passed. With accumulation the last micro-batch ends it.",
    ),
    Metric(
        contract.METRIC_LOSS,
        "gauge",
        "Training loss of this rank.",
        "Mean of this rank's batch losses since the last log line; read from the device only then.",
    ),
    Metric(
        contract.METRIC_NONFINITE,
        "counter",
        "Steps whose loss on this rank was not a finite number.",
        "Every step's loss is looked at when ddp_loss is read. With `--nonfinite stop` the first one ends the run.",
    ),
    Metric(contract.METRIC_LEARNING_RATE, "gauge", "Learning rate of the last step.", "The schedule at that step."),
    Metric(
        "ddp_grad_norm",
        "gauge",
        "Norm of the gradients before clipping.",
        "2-norm over all parameters; only with `clip_norm`, read at log intervals.",
    ),
    Metric(
        contract.METRIC_VAL_ACCURACY,
        "gauge",
        "Accuracy of the last validation, over all ranks, 0 to 1.",
        "Right answers of all ranks / samples of all ranks; every sample counts once.",
    ),
    Metric(
        contract.METRIC_VAL_LOSS,
        "gauge",
        "Loss of the last validation, over all ranks.",
        "Sum of the sample losses of all ranks / samples of all ranks.",
    ),
    Metric(
        "ddp_checkpoint_seconds",
        "histogram",
        "Time to write a checkpoint (rank 0).",
        "From taking the snapshot to the manifest's rename.",
    ),
    Metric(
        contract.METRIC_CHECKPOINT_STEP,
        "gauge",
        "Step of the newest complete checkpoint (rank 0).",
        "Set after the manifest is in place, and on a resume.",
    ),
    Metric(
        "ddp_gpu_memory_bytes",
        "gauge",
        "Most device memory this rank's tensors have held; only with a GPU.",
        "torch.cuda.max_memory_allocated, read at log intervals.",
    ),
    Metric(contract.METRIC_WORLD_SIZE, "gauge", "Number of ranks.", "WORLD_SIZE."),
    Metric(
        contract.METRIC_HEARTBEATS,
        "counter",
        "Signs of life between steps, for the launcher's watchdog.",
        "Calls of `heartbeat()`; the trainer makes one for each batch of a validation.",
    ),
    Metric(
        contract.METRIC_SAVING,
        "gauge",
        "1 while training waits for a checkpoint, else 0.",
        "Inside `with exporter.saving():`; the watchdog then allows `spec.watchdog.checkpointSeconds`.",
    ),
    Metric(contract.METRIC_LAST_STEP, "gauge", "When the last step ended, Unix time.", "Wall clock at the step's end."),
)

BUCKETS = {"ddp_step_seconds": STEP_BUCKETS, "ddp_checkpoint_seconds": CHECKPOINT_BUCKETS}
