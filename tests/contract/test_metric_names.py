"""The names of all exported series follow Prometheus' conventions, and their readers use the same names."""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry

from ddp_operator.manager.telemetry import OperatorMetrics
from ddp_pod.contract import series
from ddp_pod.progress import log_patterns
from ddp_sdk.metrics_table import BUCKETS, METRICS
from tests.support import ROOT

# Unit and number of values other than times, bytes or shares, by the last part of their names.
PARTS = re.compile(r"_(bucket|sum|count)$")


def list_operator_families() -> list[tuple[str, str]]:
    registry: CollectorRegistry = OperatorMetrics(lambda: 0.0).registry
    families = [(family.name, family.type) for family in registry.collect() if family.name.startswith("ddp_")]
    return [(name + "_total" if kind == "counter" else name, kind) for name, kind in families]


FAMILIES = [*((metric.name, metric.kind) for metric in METRICS), *list_operator_families()]
LAUNCHER = [value for name, value in vars(series).items() if name.startswith("METRIC_")]


@pytest.mark.parametrize(("name", "kind"), FAMILIES)
def test_name_of_series_follows_from_its_kind(name: str, kind: str) -> None:
    assert (kind == "counter") == name.endswith("_total")
    assert (kind == "histogram") == name.endswith("_duration_seconds")
    assert not name.endswith("_per_second"), "a counter has every rate"


def test_shares_are_called_ratios() -> None:
    shares = {metric.name for metric in METRICS if "0 to 1" in metric.help}
    assert shares
    assert all(name.endswith("_ratio") for name in shares)


def test_buckets_belong_to_histograms() -> None:
    assert BUCKETS.keys() == {metric.name for metric in METRICS if metric.kind == "histogram"}


def test_dashboards_and_alerts_read_series_that_are_exported() -> None:
    exported = {name for name, _ in FAMILIES} | set(LAUNCHER) | set(log_patterns.LOG_GROUPS.values())
    labels = {"ddp_job", "ddp_attempt", "ddp_run"}
    used = set()
    for folder in ("deploy/monitoring/alerts", "deploy/monitoring/dashboards"):
        for path in (ROOT / folder).glob("*.yaml" if folder.endswith("alerts") else "queries.py"):
            used |= set(re.findall(r"\bddp_[a-z0-9_]+", path.read_text(encoding="utf-8")))
    used = {PARTS.sub("", name) for name in used} - labels
    assert used
    assert used <= {PARTS.sub("", name) for name in exported}
