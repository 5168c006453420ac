"""Argo CD's health of jobs: the Lua file on statuses that the operator writes."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import msgspec
import pytest

from ddp_operator.api.status import Status
from ddp_operator.decide.state import Refusal
from tests.support import ROOT
from tests.support.builders import child_job, child_pod, last_words
from tests.support.decisions import RUNNING, STARTED
from tests.unit.ddp_operator.decide.test_decide import run, trained

pytestmark = pytest.mark.lua

HEALTH = ROOT / "deploy" / "argocd" / "health.lua"
FAILED = [child_pod(0), child_pod(1, "Failed", code=1, message=last_words("CUDA error"))]
REFUSED = Refusal("InvalidSpec", "spec.x: is wrong")
QUOTED = 'he said "a\\b"\n{…} ]]'


def to_lua(value: Any) -> str:
    """Return a value of JSON as Argo CD passes it: objects and arrays are tables, and null is absent."""
    if isinstance(value, dict):
        return "{" + ",".join(f"[{to_lua(key)}]={to_lua(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "{" + ",".join(map(to_lua, value)) + "}"
    if isinstance(value, str):
        return '"' + "".join(f"\\{byte:03d}" for byte in value.encode()) + '"'
    return "nil" if value is None else json.dumps(value)


def judge(status: Any, generation: int = 1) -> tuple[str, str]:
    """Return Argo CD's status and message of a job with this status."""
    resource = {"metadata": {"name": "j", "generation": generation}, "spec": {}}
    if status is not None:
        resource["status"] = status
    program = f"""
        obj = {to_lua(resource)}
        local function judge()
            {HEALTH.read_text()}
        end
        local health = judge()
        print(health.status .. "|" .. health.message)
    """
    ran = subprocess.run(["lua5.4", "-"], input=program, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    status, _, message = ran.stdout.removesuffix("\n").partition("|")
    return status, message


def written(status: Status, **changes: Any) -> Any:
    """Return a status as JSON, of the operator's last read of generation 1."""
    return msgspec.to_builtins(msgspec.structs.replace(status, observed_generation=1), str_keys=True) | changes


@pytest.mark.parametrize(
    ("status", "health", "message"),
    [
        (None, "Progressing", "not read this version"),
        (written(run(Status(), ()).status), "Progressing", ""),
        (written(run(pods=[child_pod(0, "Pending"), child_pod(1, "Pending")]).status), "Progressing", ""),
        (written(trained()), "Progressing", ""),
        (written(run(trained(), pods=FAILED).status), "Progressing", ""),
        (written(run(STARTED, jobs=(), suspend=True).status), "Suspended", "suspend"),
        (written(run(Status(), (), refusal=REFUSED).status), "Degraded", "spec.x: is wrong"),
        (written(run(trained(), pods=FAILED, recovery={"maxRestarts": 0}).status), "Degraded", "CUDA error"),
        (written(run(jobs=[child_job(conditions={"Complete": ""})], pods=RUNNING).status), "Healthy", ""),
        ({"phase": "Failed", "conditions": [{"type": "Failed", "message": QUOTED}]}, "Degraded", QUOTED),
        ({"phase": "Running", "observedGeneration": 1}, "Progressing", "Running"),
    ],
)  # fmt: skip
def test_health_of_each_phase(status: Any, health: str, message: str) -> None:
    result = judge(status)
    assert result[0] == health, status
    assert message in result[1]
    assert result[1]


@pytest.mark.parametrize(("phase", "health"), [("Rejected", "Progressing"), ("Failed", "Degraded")])
def test_status_of_former_version_counts_only_after_the_end(phase: str, health: str) -> None:
    assert judge({"phase": phase, "observedGeneration": 1, "conditions": []}, generation=2)[0] == health


def test_queued_job_shows_what_it_waits_for() -> None:
    status = {"phase": "Pending", "reason": "QuotaPending", "observedGeneration": 1}
    conditions = [
        {"type": "Accepted", "status": "True", "reason": "Valid", "message": "valid"},
        {"type": "Scheduled", "status": "False", "reason": "QuotaPending", "message": "2 GPUs are missing"},
    ]
    assert judge(status | {"conditions": conditions}) == ("Progressing", "2 GPUs are missing")
