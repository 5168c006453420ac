"""Writes docs/operator-metrics.md from the operator's own series: ``python -m docs.pages.operator_metrics``."""

from __future__ import annotations

import sys
from typing import Final

import msgspec

from ddp_operator.decide import conditions as c
from ddp_operator.decide.transitions import RECOVERY_LEVELS, NodeFailed, Used
from ddp_operator.decide.usage import PRODUCTIVE
from ddp_operator.manager.telemetry import NOT_ACCEPTED, OTHER, PHASES, OperatorMetrics
from ddp_pod.contract.failure_table import CATEGORIES

SAMPLE_RESOURCE: Final = msgspec.json.encode(
    {
        "metadata": {"namespace": "team"},
        "status": {
            "phase": "Running",
            "goodput": "0.5",
            "conditions": [{"type": c.SCHEDULED, "status": "False", "reason": ""}],
        },
    }
)
"""A resource that has a sample in every series."""

_HEAD: Final = """\
# The operator's metrics

<!-- Generated from operator/ddp_operator/manager/telemetry.py by `make generate`. Do not edit. -->

The operator answers `GET /metrics` on its health port (8080), a standby too: without jobs, and `ddp_operator_leader` 0.
Dashboards and alerts sum over the replicas. What the trainer and the launcher export is in [metrics.md](metrics.md) and
[pod-contract.md](pod-contract.md). Counters count this process, so `rate()` and `increase()` hold across restarts;
gauges about jobs are counted from the resources at every scrape.

| name | type | labels | meaning |
|---|---|---|---|
"""


def write_page() -> str:
    """Return the page as Markdown."""
    metrics = OperatorMetrics(lambda: 0.0, lambda: (SAMPLE_RESOURCE,))
    metrics.on_call("get", "pods", "200")
    metrics.on_transition("team", Used(PRODUCTIVE, 1))
    metrics.on_transition("team", NodeFailed("node"))
    rows = []
    for family in metrics.registry.collect():
        if family.name.startswith("ddp_operator_"):
            names = {name for found in family.samples for name in found.labels} - {"le"}
            labels = ", ".join(f"`{name}`" for name in sorted(names))
            name = f"{family.name}_total" if family.type == "counter" else family.name
            rows.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |\n")
    phases = ", ".join(PHASES)
    levels = ", ".join(RECOVERY_LEVELS)
    return (
        _HEAD
        + "".join(sorted(rows))
        + f"\nPhases: {phases}.\n\nLevels: {levels}. Categories: {', '.join(CATEGORIES)}.\n\n"
        + f"Reasons of `ddp_operator_waiting_jobs`: {', '.join((*c.SCHEDULED_REASONS, NOT_ACCEPTED))}; any other is "
        + f"{OTHER}.\n\n"
        + "The page also has `process_*` of prometheus-client (CPU, memory, files).\n"
    )


if __name__ == "__main__":
    sys.stdout.write(write_page())
