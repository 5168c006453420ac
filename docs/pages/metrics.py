"""Print docs/metrics.md with the current table of series: ``python -m docs.pages.metrics``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ddp_trainer.observability.metrics_table import BUCKETS, METRICS

# Name of a series -> its computation.
FORMULAS = {
    "ddp_samples_total": (
        "Sum of the batch sizes of this process's steps. Starts at 0 with the process, also after a resume."
    ),
    "ddp_tokens_total": "Samples of this rank * tokens per sample. sum(rate(…)) over the ranks is the job's rate.",
    "ddp_steps_total": "One per step. Starts at 0 with the process; ddp_step counts the steps of the run.",
    "ddp_step": "Number of finished steps; a resume continues the checkpoint's count.",
    "ddp_planned_steps": "min(epochs * steps per epoch, max_steps).",
    "ddp_progress_ratio": "ddp_step / ddp_planned_steps.",
    "ddp_epoch": "The epoch of the last step.",
    "ddp_planned_epochs": "The setting `epochs`.",
    "ddp_step_duration_seconds": (
        "End of a step minus end of the previous step, without validation and checkpoints between them. On a "
        "GPU the host's time: the host is at most a few steps ahead of the device, so sums over many steps agree."
    ),
    "ddp_data_wait_seconds_total": "Sum of the host's time in the loader.",
    "ddp_compute_seconds_total": (
        "From the start of forward to the gradient of the model's first parameter, the last one of backward. On a"
        " CPU wall time, including all-reduces that overlap with backward and share its cores. On a GPU the time"
        " between two device events. With accumulation it ends in the last part of the batch."
    ),
    "ddp_loss": "Mean of this rank's batch losses since the last log line; read from the device only then.",
    "ddp_nonfinite_losses_total": (
        "Every step's loss is checked when ddp_loss is read. With `--nonfinite stop` the first one ends the run."
    ),
    "ddp_learning_rate": "The schedule at that step.",
    "ddp_grad_norm": "2-norm over all parameters; only with `clip_norm`, read at log intervals.",
    "ddp_validation_accuracy_ratio": (
        "Correct answers of all ranks / samples of all ranks; every sample counts once. In segmentation the mean IoU;"
        " absent for your own task with another score."
    ),
    "ddp_validation_loss": "Sum of the sample losses of all ranks / samples of all ranks.",
    "ddp_checkpoint_duration_seconds": "From taking the snapshot to the manifest's rename.",
    "ddp_checkpoint_step": "Set after the manifest is written, and on a resume.",
    "ddp_gpu_memory_peak_bytes": "torch.cuda.max_memory_allocated, read at log intervals.",
    "ddp_world_size": "WORLD_SIZE.",
    "ddp_heartbeats_total": "Calls of `heartbeat()`; the trainer calls it for each batch of a validation.",
    "ddp_saving": "Inside `with exporter.saving():`; the watchdog then allows `spec.watchdog.checkpointSeconds`.",
    "ddp_last_step_timestamp_seconds": "Wall clock at the step's end.",
}
_GENERATED = re.compile(r"(?<=from here by `make generate`. -->\n).*(?=<!-- Generated to here)", re.DOTALL)


def render(page: str) -> str:
    """Return ``page`` with its generated part replaced."""
    rows = "".join(f"| `{m.name}` | {m.kind} | {m.help} | {FORMULAS[m.name]} |\n" for m in METRICS)
    buckets = "".join(
        f"Buckets of `{name}`, seconds: {', '.join(f'{edge:g}' for edge in edges)}.\n\n"
        for name, edges in BUCKETS.items()
    )
    table = f"\n| name | type | meaning | formula |\n|---|---|---|---|\n{rows}\n{buckets}"
    return _GENERATED.sub(lambda _: table, page)


if __name__ == "__main__":
    sys.stdout.write(render(Path("docs/metrics.md").read_text(encoding="utf-8")))
