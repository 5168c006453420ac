"""The table of `make compare`, and the calls that it counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_operator.api.job_file import parse_manifest
from ddp_operator.features import SCHEMA
from tests.bench.compare import AuditLog, format_table, list_lost_rows
from tests.bench.neighbours import JOBSET, OURS, TOOLS, TRAINER


def test_table_has_median_range_and_reason_of_missing_tool() -> None:
    results = {OURS.key: {"rate": [3.0, 1.0, 2.0]}, JOBSET.key: {"rate": [1.5]}}
    table = format_table(results, {TRAINER.key: "not measured: no binary (TRAINER_BIN names none)"})
    [row] = [line for line in table.splitlines() if line.startswith("| jobs per second")]
    assert "| 2.0 (1.0 to 3.0) | 1.5 | not measured: no binary (TRAINER_BIN names none) |" in row


@pytest.mark.parametrize(("key", "ours", "theirs", "is_lost"), [("rate", 1, 2, True), ("rate", 2, 1, False),
                                                               ("cpu", 2, 1, True), ("cpu", 1, 1, False)])  # fmt: skip
def test_row_is_lost_if_another_median_is_better(key: str, ours: float, theirs: float, is_lost: bool) -> None:
    results: dict[str, dict[str, list[float]]] = {tool.key: {} for tool in TOOLS}
    results[OURS.key] = {key: [ours]}
    results[JOBSET.key] = {key: [theirs]}
    assert bool(list_lost_rows(results)) is is_lost


def audit(user: str, verb: str, resource: str) -> str:
    event: dict[str, Any] = {"user": {"username": f"system:serviceaccount:default:{user}"}, "verb": verb}
    return json.dumps(event | {"objectRef": {"resource": resource}}) + "\n"


def test_audit_log_counts_calls_of_account_once(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    lines = [("jobset", "create", "jobs"), ("jobset", "watch", "jobs"), ("jobset", "update", "leases")]
    path.write_text("".join(audit(*line) for line in [*lines, ("other", "create", "jobs")]) + '{"half')
    log = AuditLog(path)
    assert (log.count_calls("jobset"), log.count_calls("jobset")) == (1, 0)


def test_own_sample_is_valid_and_all_samples_get_names() -> None:
    assert parse_manifest(OURS.sample.read_text(), SCHEMA).job.spec.nodes == 2
    for tool in TOOLS:
        assert tool.load_job("job-7")["metadata"]["name"] == "job-7"
    assert "mine-node" not in json.dumps(JOBSET.load_job("job-7"))


def test_jobset_master_address_names_its_job() -> None:
    text = json.dumps(JOBSET.load_job("job-7"))
    assert "--master-addr=job-7-node-0-0.job-7 " in text
