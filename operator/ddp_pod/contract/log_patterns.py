"""The patterns of spec.metrics.logPatterns: their groups and their check."""

import re
from collections.abc import Collection

SERIES_STEP = "ddp_step"
SERIES_PLANNED_STEPS = "ddp_planned_steps"
SERIES_EPOCH = "ddp_epoch"
SERIES_PLANNED_EPOCHS = "ddp_planned_epochs"
SERIES_SAMPLES = "ddp_samples_total"
# The groups that a pattern may name, as in status.progress, and the series that each becomes.
LOG_GROUPS = {
    "step": SERIES_STEP,
    "totalSteps": SERIES_PLANNED_STEPS,
    "epoch": SERIES_EPOCH,
    "epochs": SERIES_PLANNED_EPOCHS,
    "loss": "ddp_loss",
    "learningRate": "ddp_learning_rate",
    "samples": SERIES_SAMPLES,
    "samplesPerSecond": "ddp_global_samples_per_second",
    "valAccuracy": "ddp_validation_accuracy_ratio",
    "valLoss": "ddp_validation_loss",
}


def compile_log_pattern(text: str) -> re.Pattern[str]:
    """Compile one of metrics.logPatterns. Raises: ValueError with the remedy."""
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is not a valid Python regular expression ({error}); fix it or remove it") from None
    check_groups(pattern.groupindex)
    return pattern


def check_groups(groups: Collection[str]) -> None:
    """Check the named groups of one of metrics.logPatterns. Raises: ValueError with the remedy."""
    known = ", ".join(LOG_GROUPS)
    unknown = sorted(set(groups) - set(LOG_GROUPS))
    if unknown:
        raise ValueError(f"has the unknown group {unknown[0]}; known groups: {known}")
    if not groups:
        raise ValueError(f"has no named group, so it finds no value; write for example (?P<step>\\d+); groups: {known}")
