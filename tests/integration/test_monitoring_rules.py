"""Dashboards, alerts and runbook without a server: only series that exist, a heading and a boundary for each alert."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_operator.decide.purposes import PRODUCTIVE
from ddp_operator.decide.transitions import Used
from ddp_operator.manager.telemetry import OperatorMetrics
from ddp_pod.contract.log_patterns import LOG_GROUPS
from ddp_pod.contract.series import (
    METRIC_LAUNCHER_PHASE,
    METRIC_LAUNCHER_RESTARTS,
    METRIC_MEMORY_SAVES,
    METRIC_MEMORY_STALLED,
    METRIC_MEMORY_STEP,
    METRIC_MEMORY_TIME,
)
from ddp_pod.contract.series import SERIES as RANK_SERIES
from ddp_sdk.metrics_table import METRICS
from docs.pages.tables import SAMPLE_RESOURCE
from tests.support import ROOT

MONITORING = ROOT / "deploy" / "monitoring"
BOARDS = sorted((MONITORING / "dashboards").glob("*.json"))
ALERT_FILES = sorted((MONITORING / "alerts").glob("*.yaml"))

RECORDED = re.compile(r"\bddp:\w+:\w+")
SERIES = re.compile(r"\b(?:ddp_(?!job\b|attempt\b)|process_)\w+")


def exported() -> set[str]:
    """Return every name of a series that trainer, launcher and operator export."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    names = {metric.name + end for metric in METRICS for end in suffixes.get(metric.kind, ("",))}
    names |= {METRIC_LAUNCHER_PHASE, METRIC_LAUNCHER_RESTARTS, *(RANK_SERIES[name] for name in LOG_GROUPS.values())}
    names |= {METRIC_MEMORY_STEP, METRIC_MEMORY_TIME, METRIC_MEMORY_SAVES, METRIC_MEMORY_STALLED}
    operator = OperatorMetrics(lambda: 0.0, lambda: (SAMPLE_RESOURCE,))
    operator.on_reconcile(0.1, None)
    operator.on_call("get", "pods", "200")
    operator.on_transition("team", Used(PRODUCTIVE, 1))
    return names | {sample.name for family in operator.registry.collect() for sample in family.samples}


def rules(path: Path) -> list[dict[str, Any]]:
    """Return the rules of a file."""
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = [rule for path in ALERT_FILES for rule in rules(path) if "alert" in rule]


def panels(path: Path) -> list[dict[str, Any]]:
    """Return the panels of a dashboard that show something."""
    return [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]


board = pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)


class TestDashboards:
    def test_uids_match_links(self) -> None:
        assert {path.stem: json.loads(path.read_text())["uid"] for path in BOARDS} == {
            "fleet": "ddp-fleet", "job": "ddp-job", "operator": "ddp-operator"
        }  # fmt: skip

    @board
    def test_queries_name_only_series_that_exist(self, path: Path) -> None:
        named = set(SERIES.findall(json.dumps([panel["targets"] for panel in panels(path)])))
        named |= set(SERIES.findall(json.dumps(json.loads(path.read_text())["annotations"])))
        assert named
        assert named - exported() == set()

    def test_recorded_series_of_dashboards_have_rules(self) -> None:
        """Every recorded series is used by a dashboard or by another rule."""
        known = {rule["record"] for path in ALERT_FILES for rule in rules(path) if "record" in rule}
        shown = set(RECORDED.findall("".join(path.read_text() for path in BOARDS)))
        used = {name for path in ALERT_FILES for rule in rules(path) for name in RECORDED.findall(rule["expr"])}
        assert shown
        assert shown - known == set()
        assert known - shown - used == set()

    @board
    def test_panels_do_not_overlap_on_grid(self, path: Path) -> None:
        taken: set[tuple[int, int]] = set()
        for panel in json.loads(path.read_text())["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, panel["title"]
            taken |= cells

    @board
    def test_panels_have_title_unit_and_source(self, path: Path) -> None:
        shown = panels(path)
        assert len({panel["id"] for panel in shown}) == len(shown)
        for panel in shown:
            assert panel["title"]
            assert panel["description"]
            assert all(target["datasource"]["uid"] == "$datasource" for target in panel["targets"])
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])

    @pytest.mark.parametrize(
        ("name", "shown"),
        [
            ("fleet", {"Jobs by phase": "timeseries", "GPUs in use": "stat", "Goodput": "timeseries",
                       "Failures by category": "timeseries", "Jobs": "table"}),
            ("job", {"Samples per second": "timeseries", "Loss": "timeseries", "Validation accuracy": "timeseries",
                     "Mean step": "timeseries", "Own work per step, by rank": "heatmap",
                     "Checkpoint time": "timeseries"}),
            ("operator", {"Leaders": "stat", "Reconcile time": "timeseries", "Errors by cause": "timeseries"}),
        ],
    )  # fmt: skip
    def test_each_dashboard_shows_its_purpose(self, name: str, shown: dict[str, str]) -> None:
        path = MONITORING / "dashboards" / f"{name}.json"
        results = {panel["title"]: panel["type"] for panel in panels(path)}
        assert shown.items() <= results.items()

    def test_restarts_are_annotations_of_job(self) -> None:
        annotations = json.loads((MONITORING / "dashboards" / "job.json").read_text())["annotations"]["list"]
        assert [annotation["name"] for annotation in annotations] == ["Restart in the same pods", "New attempt"]
        assert all(annotation["enable"] for annotation in annotations)

    @pytest.mark.prometheus
    def test_queries_about_restarts_and_goodput_match_history(self, tmp_path: Path) -> None:
        """A job whose attempt 1 restarts in the same pods at 5 min and ends at 10; attempt 2 resumes at step 480."""
        labels = 'namespace="a", ddp_job="j"'
        first = f'{labels}, ddp_attempt="1"'
        two = f'{labels}, ddp_attempt="2"'
        series = {
            # A step per second, half of which is the step itself; the last 120 steps of attempt 1 are repeated.
            f"ddp_step{{{first}}}": "0+60x10", f"ddp_step{{{two}}}": "_x12 480+60x10",
            f"ddp_step_duration_seconds_sum{{{first}}}": "0+30x10",
            f"ddp_step_duration_seconds_sum{{{two}}}": "_x12 0+30x10",
            f"ddp_step_duration_seconds_count{{{first}}}": "0+60x10",
            f"ddp_step_duration_seconds_count{{{two}}}": "_x12 0+60x10",
            f'ddp_launcher_in_place_restarts_total{{{first}, pod="0"}}': "0x4 1x5",
            f'ddp_launcher_in_place_restarts_total{{{two}, pod="0"}}': "_x12 0x10",
        }  # fmt: skip
        board = json.loads((MONITORING / "dashboards" / "job.json").read_text())
        restarted, attempted = (result["expr"] for result in board["annotations"]["list"])
        fleet = json.loads((MONITORING / "dashboards" / "fleet.json").read_text())["panels"]
        (goodput,) = (p["targets"][0]["expr"] for p in fleet if p["title"] == "Goodput" and p["type"] == "timeseries")

        def case(expr: str, minute: int, value: float | None) -> dict[str, Any]:
            filled = expr.replace("$cluster", "").replace("$namespace", "a").replace("$ddp_job", "j")
            expected = [] if value is None else [{"labels": "{}", "value": value}]
            return {"expr": f"sum({filled})", "eval_time": f"{minute}m", "exp_samples": expected}

        cases = [
            *(case(f"count({restarted})", minute, value) for minute, value in ((4, None), (5, 1), (7, None))),
            *(case(f"count({attempted})", minute, value) for minute, value in ((11, None), (12, 1), (14, None))),
            # 1,080 steps of half a second within 22 minutes.
            case(f"round({goodput}, 0.01)", 22, 0.41),
        ]  # fmt: skip
        test = {"interval": "1m", "promql_expr_test": cases}
        test["input_series"] = [{"series": name, "values": values} for name, values in series.items()]
        path = tmp_path / "test.yaml"
        recorded = [str(MONITORING / "alerts" / "jobs.yaml")]
        path.write_text(yaml.safe_dump({"evaluation_interval": "1m", "rule_files": recorded, "tests": [test]}))
        ran = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stdout + ran.stderr

    def test_variables_choose_namespace_and_job(self) -> None:
        variables = {
            path.stem: [result["name"] for result in json.loads(path.read_text())["templating"]["list"]]
            for path in BOARDS
        }
        assert variables["fleet"] == ["datasource", "cluster", "namespace"]
        assert variables["job"] == ["datasource", "cluster", "namespace", "ddp_job", "logs"]
        assert variables["operator"] == ["datasource", "cluster"]

    def test_jobs_of_same_name_are_drawn_separately(self) -> None:
        chosen = json.loads((MONITORING / "dashboards" / "job.json").read_text())["templating"]["list"]
        assert not any(result.get("multi") for result in chosen), "one cluster, one namespace, one job"
        for panel in panels(MONITORING / "dashboards" / "fleet.json"):
            for target in panel["targets"]:
                if "ddp_job" in target["expr"]:
                    assert "ddp_job" not in target["expr"].replace("cluster, namespace, ddp_job", ""), panel["title"]

    @board
    def test_numbers_over_time_are_rates_over_windows(self, path: Path) -> None:
        for panel in panels(path):
            if panel["type"] == "timeseries":
                assert "$__range]" not in json.dumps(panel["targets"]), panel["title"]
                assert panel["options"]["legend"]["calcs"] == ["lastNotNull", "max"]
            if panel["type"] == "stat":
                assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"], panel["title"]
        assert json.loads(path.read_text())["graphTooltip"] == 1, "one crosshair on all panels"

    def test_links_lead_from_fleet_to_job_and_to_its_pods_logs(self) -> None:
        fleet, job = (json.dumps(panels(MONITORING / "dashboards" / f"{name}.json")) for name in ("fleet", "job"))
        for label in ("cluster", "namespace", "ddp_job"):
            assert f"var-{label}=${{__data.fields.{label}}}" in fleet
            assert f"var-{label}=${{__field.labels.{label}}}" in fleet
        assert "/explore?schemaVersion=1" in job
        assert "${__field.labels.pod}" in job


class TestAlerts:
    @pytest.mark.parametrize("path", ALERT_FILES, ids=lambda path: path.stem)
    def test_rules_name_only_series_that_exist(self, path: Path) -> None:
        named = {name for rule in rules(path) for name in SERIES.findall(rule["expr"])}
        assert named
        assert named - exported() == set()

    @pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
    def test_has_severity_summary_and_heading_in_runbook(self, alert: dict[str, Any]) -> None:
        assert alert["labels"]["severity"] in {"critical", "warning"}
        assert alert["annotations"]["summary"]
        assert len(alert["annotations"]["description"]) > len("what it means and what to do")
        page, _, heading = alert["annotations"]["runbook_url"].partition("#")
        assert heading == alert["alert"].lower()
        text = (ROOT / page).read_text(encoding="utf-8")
        assert f"\n## {alert['alert']}\n" in text

    def test_runbook_has_no_heading_without_alert(self) -> None:
        headings = re.findall(r"^## (\w+)$", (ROOT / "docs/runbook.md").read_text(), flags=re.MULTILINE)
        assert headings == [alert["alert"] for alert in ALERTS]

    @pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
    def test_has_boundary_test_silent_before_firing_after(self, alert: dict[str, Any]) -> None:
        cases = [
            case
            for path in (MONITORING / "tests").glob("*.yaml")
            for test in yaml.safe_load(path.read_text())["tests"]
            for case in test.get("alert_rule_test", [])
            if case["alertname"] == alert["alert"]
        ]
        minutes = {bool(case.get("exp_alerts")): int(case["eval_time"].removesuffix("m")) for case in reversed(cases)}
        assert minutes[False] + 1 <= minutes[True] <= minutes[False] + 3

    @pytest.mark.prometheus
    def test_rules_pass_promtool(self) -> None:
        for command in (["check", "rules", *ALERT_FILES], ["test", "rules", *(MONITORING / "tests").glob("*.yaml")]):
            ran = subprocess.run(["promtool", *map(str, command)], capture_output=True, text=True, timeout=60)
            assert ran.returncode == 0, ran.stdout + ran.stderr

    @pytest.mark.prometheus
    def test_configuration_for_this_machine_passes_promtool(self) -> None:
        command = ["promtool", "check", "config", MONITORING / "prometheus" / "prometheus.yaml"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "FAILED" not in ran.stdout + ran.stderr
