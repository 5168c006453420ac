"""The patterns of spec.metrics.logPatterns: their groups and their check."""

import re
from collections.abc import Collection

# The groups that a pattern may name, as in status.progress, and the field of RankProgress that each is.
LOG_GROUPS = {
    "step": "step",
    "totalSteps": "total_steps",
    "epoch": "epoch",
    "epochs": "epochs",
    "loss": "loss",
    "learningRate": "learning_rate",
    "samples": "samples",
    "samplesPerSecond": "samples_per_second",
    "valAccuracy": "val_accuracy",
    "valLoss": "val_loss",
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
