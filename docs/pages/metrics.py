"""Print docs/metrics.md with the table of series as it is now: ``python -m docs.pages.metrics``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ddp_trainer.observability.metrics_table import BUCKETS, METRICS

# Name of a series -> how it is computed.
FORMULAS = {
    "ddp_samples_total": (
        "Sum of the batch sizes of this process's steps. Starts at 0 with the process, also after a resume."
    ),
    "ddp_tokens_total": "Samples of this rank * tokens a sample. sum(rate(…)) over the ranks is the job's rate.",
    "ddp_steps_total": "One a step. Starts at 0 with the process; the run's own count is ddp_step.",
    "ddp_step": "Number of finished steps, taken up from the checkpoint on a resume.",
    "ddp_planned_steps": "min(epochs * steps an epoch, max_steps).",
    "ddp_progress_ratio": "ddp_step / ddp_planned_steps.",
    "ddp_epoch": "The epoch of the last step.",
    "ddp_planned_epochs": "The setting `epochs`.",
    "ddp_step_duration_seconds": (
        "End of a step minus end of the step before; validation and checkpoints between two steps are left out. On a "
        "GPU the host's time: it runs ahead of the device for a few steps at most, so sums over many steps agree."
    ),
    "ddp_data_wait_seconds_total": "Sum of the host's time in the loader.",
    "ddp_compute_seconds_total": (
        "From the batch being there to the gradient of the model's first parameter, which backward reaches last. On a"
        " CPU wall time; all-reduces that overlap with backward share its cores and are counted in. On a GPU the time"
        " between two device events, read when they have passed. With accumulation the last micro-batch ends it."
    ),
    "ddp_loss": "Mean of this rank's batch losses since the last log line; read from the device only then.",
    "ddp_nonfinite_losses_total": (
        "Every step's loss is looked at when ddp_loss is read. With `--nonfinite stop` the first one ends the run."
    ),
    "ddp_learning_rate": "The schedule at that step.",
    "ddp_grad_norm": "2-norm over all parameters; only with `clip_norm`, read at log intervals.",
    "ddp_validation_accuracy_ratio": (
        "Right answers of all ranks / samples of all ranks; every sample counts once. In segmentation the mean IoU;"
        " a task of your own whose score is something else has none."
    ),
    "ddp_validation_loss": "Sum of the sample losses of all ranks / samples of all ranks.",
    "ddp_checkpoint_duration_seconds": "From taking the snapshot to the manifest's rename.",
    "ddp_checkpoint_step": "Set after the manifest is in place, and on a resume.",
    "ddp_gpu_memory_peak_bytes": "torch.cuda.max_memory_allocated, read at log intervals.",
    "ddp_world_size": "WORLD_SIZE.",
    "ddp_heartbeats_total": "Calls of `heartbeat()`; the trainer makes one for each batch of a validation.",
    "ddp_saving": "Inside `with exporter.saving():`; the watchdog then allows `spec.watchdog.checkpointSeconds`.",
    "ddp_last_step_timestamp_seconds": "Wall clock at the step's end.",
}
_GENERATED = re.compile(r"(?<=from here by `make generate`. -->\n).*(?=<!-- Generated to here)", re.DOTALL)


def render(page: str) -> str:
    """``page`` with its generated part written anew."""
    rows = "".join(f"| `{m.name}` | {m.kind} | {m.help} | {FORMULAS[m.name]} |\n" for m in METRICS)
    buckets = "".join(
        f"Buckets of `{name}`, seconds: {', '.join(f'{edge:g}' for edge in edges)}.\n\n"
        for name, edges in BUCKETS.items()
    )
    table = f"\n| name | type | meaning | formula |\n|---|---|---|---|\n{rows}\n{buckets}"
    return _GENERATED.sub(lambda _: table, page)


if __name__ == "__main__":
    sys.stdout.write(render(Path("docs/metrics.md").read_text(encoding="utf-8")))
