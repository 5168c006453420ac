"""The list: what needs a person, in which order, and rows of jobs that cannot be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from ddp_cli.features.ui import run
from ddp_cli.features.ui.render import render_rows
from ddp_cli.features.ui.rows import Attention, build_row, sort_rows
from ddp_cli.view.why import Why
from tests.support.builders import NOW, resource


def condition(kind: str, status: str, reason: str, age: int = 10) -> dict[str, Any]:
    since = (NOW - timedelta(seconds=age)).isoformat()
    return {"type": kind, "status": status, "reason": reason, "message": "m", "lastTransitionTime": since}


LONG_AGO = (NOW - timedelta(days=3)).isoformat()
TRAINING = [condition("Accepted", "True", "Valid"), condition("Progressing", "True", "Training")]


def waits(kind: str, reason: str, age: int = 10) -> dict[str, Any]:
    return {"phase": "Running", "conditions": [condition(kind, "False", reason, age)]}


STATES: dict[str, tuple[dict[str, Any], Attention, str]] = {
    "training": ({"phase": "Running", "conditions": TRAINING}, Attention.TRAINING, "Training"),
    "stalled": (waits("Progressing", "Stalled"), Attention.NEEDS_YOU, "Hangs"),
    "nan": ({"phase": "Running", "conditions": TRAINING, "progress": {"loss": "nan"}}, Attention.NEEDS_YOU, "Diverged"),
    "same batches": (waits("TrainsAsOne", "SameBatches"), Attention.NEEDS_YOU, "At risk"),
    "joins": (waits("TrainsAsOne", "WaitingForGroup"), Attention.WAITING, "Waiting"),
    "queued": (waits("Scheduled", "QuotaPending", 9999), Attention.WAITING, "Waiting"),
    "no image": (waits("Scheduled", "ImagePull"), Attention.NEEDS_YOU, "Blocked"),
    "starts": (waits("Rendezvoused", "WaitingForRanks"), Attention.WAITING, "Waiting"),
    "starts long": (waits("Rendezvoused", "WaitingForRanks", 999), Attention.NEEDS_YOU, "Blocked"),
    "suspended": ({"phase": "Suspended", "conditions": TRAINING}, Attention.SUSPENDED, "Suspended"),
    "failed now": ({"phase": "Failed", "completionTime": NOW.isoformat()}, Attention.NEEDS_YOU, "Failed"),
    "failed long ago": ({"phase": "Failed", "completionTime": LONG_AGO}, Attention.ENDED, "Failed"),
    "succeeded": ({"phase": "Succeeded", "completionTime": NOW.isoformat()}, Attention.ENDED, "Succeeded"),
}


@pytest.mark.parametrize("state", STATES)
def test_state_of_a_job_decides_what_it_asks_of_a_person(state: str) -> None:
    status, attention, word = STATES[state]
    row = build_row(resource() | {"status": status}, NOW, key="run/x")
    assert (row.attention, row.state.word) == (attention, word)
    assert row.trains == (state in ("training", "nan", "same batches"))


def test_jobs_that_need_a_person_are_first_those_that_cost_gpus_before_others_then_the_newest() -> None:
    rows = []
    for number, (name, (status, _, _)) in enumerate(STATES.items()):
        started = (NOW + timedelta(seconds=number)).isoformat()
        rows.append(build_row(resource() | {"status": {**status, "startTime": started}}, NOW, key=name))
    pending = waits("Scheduled", "ImagePull") | {"phase": "Pending"}
    rows.append(build_row(resource() | {"status": pending}, NOW, key="pending"))
    ordered = [row.attention for row in sort_rows(rows)]
    assert ordered == sorted(ordered)
    needed = [row.key for row in sort_rows(rows) if row.attention is Attention.NEEDS_YOU]
    assert needed == ["starts long", "no image", "same batches", "nan", "stalled", "failed now", "pending"]


def test_job_that_has_not_started_has_the_time_of_its_submission() -> None:
    job = resource() | {"status": STATES["queued"][0] | {"startTime": NOW.isoformat()}}
    job["metadata"] = job["metadata"] | {"creationTimestamp": LONG_AGO}
    row = build_row(job, NOW, key="job/a/x")
    assert (row.waits, row.started) == (True, NOW - timedelta(days=3))
    started = build_row(job | {"status": job["status"] | {"progress": {"step": 1}}}, NOW, key="job/a/x")
    assert (started.waits, started.started) == (False, NOW)


@pytest.mark.parametrize("status", [{"phase": "Frozen"}, [1], {"conditions": 3, "phase": "Running"}, {"progress": "x"}])
def test_job_with_an_odd_status_has_a_row(status: Any) -> None:
    row = build_row(resource() | {"status": status}, NOW, key="run/x")
    assert row.name
    assert row.phase in ("Unknown", "Running", "Pending")


def test_job_that_cannot_be_read_has_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(resource: Mapping[str, Any], events: Sequence[Any], now: datetime) -> Why:
        raise LookupError("odd")

    monkeypatch.setattr(run, "explain_why", explain)
    row = build_row(resource(), NOW, key="job/a/x")
    assert row.attention is Attention.NEEDS_YOU
    assert row.reason == "This job cannot be read: LookupError: odd"


@pytest.mark.parametrize(
    ("phase", "usage", "gpus", "needs"),
    [
        ("Running", None, "2", False),
        ("Running", {"gpus": 1}, "1", False),
        ("Pending", {"gpus": 0}, "2", True),
        ("Suspended", None, "2", True),
        ("Held", None, "2", False),
        ("Failed", {"gpus": 2}, "", False),
        ("Succeeded", None, "", False),
    ],
)
def test_gpus_are_those_that_a_job_holds_or_needs(phase: str, usage: Any, gpus: str, needs: bool) -> None:
    job = resource(nodes=2) | {"status": {"phase": phase, **({"usage": usage} if usage else {})}}
    container = {"name": "trainer", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    job["spec"]["template"]["spec"]["containers"] = [container]
    row = build_row(job, NOW, key="job/a/x")
    assert (row.gpus, row.needs_gpus) == (gpus, needs)


@pytest.mark.parametrize(("state", "filters"), [("failed now", "0 4"), ("stalled", "0"), ("succeeded", "4")])
def test_failed_job_is_among_those_that_need_a_person_and_those_that_have_ended(state: str, filters: str) -> None:
    row = build_row(resource() | {"status": STATES[state][0]}, NOW, key="run/x")
    assert f'data-attention="{filters}"' in render_rows([row])["run/x"]


@pytest.mark.parametrize("spec", [None, {}, {"template": 3}, {"template": {"spec": None}}, {"nodes": []}])
def test_job_with_an_incomplete_spec_has_a_row_without_gpus(spec: Any) -> None:
    row = build_row(resource() | {"spec": spec, "status": {"phase": "Failed"}}, NOW, key="job/a/x")
    assert (row.phase, row.gpus) == ("Failed", "")


def test_doubtful_job_has_not_made_all_steps() -> None:
    short = condition("TrainingComplete", "False", "EndedShort")
    status = {"phase": "Succeeded", "conditions": [short], "progress": {"step": 5, "totalSteps": 10, "percent": "50%"}}
    assert build_row(resource() | {"status": status}, NOW, key="job/a/x").percent == 50.0


def test_row_has_a_curve_of_the_points() -> None:
    points = ["time,loss", "1,2.0", "2,nan", "3,1.0", "x,y"]
    row = build_row(resource() | {"status": {"phase": "Running", "points": points}}, NOW, key="run/x")
    assert row.curve == "0.0,1.0 96.0,23.0"


FAILURE = {"attempt": 1, "rank": 3, "pod": "x-1-3", "exitCode": 1, "category": "UserError", "message": "label 1000"}
QUEUE = {"clusterQueue": "gpu", "position": 3, "of": 17, "waitsFor": "nvidia.com/gpu"}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"phase": "Failed", "lastFailure": FAILURE}, "UserError of rank 3: label 1000"),
        (waits("Progressing", "Stalled") | {"progress": {"step": 4}}, "M"),
        (
            waits("Scheduled", "QuotaPending")
            | {"phase": "Pending", "queue": QUEUE | {"startP50": (NOW + timedelta(minutes=40)).isoformat()}},
            "Expected to start in about 40m. Place 3 of 17 in gpu, waits for nvidia.com/gpu",
        ),
        (
            {"phase": "Running", "conditions": TRAINING, "stragglers": [{"rank": 1, "ratio": "1.7", "cause": "data"}]},
            "Rank 1 works 1.7 times as long as its peers in each step",
        ),
        ({"phase": "Running", "conditions": TRAINING}, ""),
    ],
)
def test_reason_names_what_a_person_looks_for(status: dict[str, Any], reason: str) -> None:
    assert build_row(resource() | {"status": status}, NOW, key="k").reason == reason
