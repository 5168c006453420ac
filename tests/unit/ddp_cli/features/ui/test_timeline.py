"""The bars of a job's life."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_cli.features.ui.run import LoggedEvent, RecordedRun
from ddp_cli.features.ui.timeline import list_bars
from ddp_operator.api.parse import parse_status
from tests.support.builders import NOW, resource
from tests.unit.ddp_cli.features.ui.test_rows import condition

Bars = list[tuple[str, float, float]]


def draw(steps: list[float], *events: tuple[float, str], end: float = 200.0, **status: Any) -> Bars:
    """Return the bars of a job with steps at these times; a step before the one before it is another process's."""
    ended = {
        "phase": "Failed",
        "startTime": "1970-01-01T00:00:00Z",
        "completionTime": f"1970-01-01T00:{int(end // 60):02}:{end % 60:02.0f}Z",
    }
    job = resource() | {"status": ended | status}
    rows = []
    count = 0
    attempt = 1
    for time in steps:
        count += 1
        if time < 0:
            attempt += 1
            count = 1
        rows.append({"time": abs(time), "steps": float(count), "attempt": float(attempt)})
    logged = [LoggedEvent(time, "Normal", reason, "") for time, reason in events]
    run = RecordedRun(job, parse_status(job), rows, logged, name="x", under_way=True)
    return [(bar.kind, bar.start, bar.end) for bar in list_bars(run, NOW)]


BEGUN = [(5.0, "Scheduled"), (12.0, "Rendezvoused")]
START: Bars = [("queue", 0.0, 5.0), ("start", 5.0, 12.0), ("first step", 12.0, 14.0)]
STEPS = [14.0, 20.0, 26.0]
"""At a known distance: a pause up to it is none."""
AGAIN = [-100.0, 106.0, 112.0]


def test_job_without_events_and_steps_has_one_bar() -> None:
    assert draw([], end=30.0) == [("queue", 0.0, 30.0)]


def test_bars_follow_queue_start_steps_and_restart() -> None:
    bars = draw([*STEPS, *AGAIN], *BEGUN, (28.0, "FailureKilled"), (30.0, "Rendezvoused"), end=115.0)
    assert bars == [*START, ("steps", 14.0, 26.0), ("restart", 26.0, 100.0), ("steps", 100.0, 115.0)]


@pytest.mark.parametrize("reported", [18.0, 20.0, 21.0, 23.0])
def test_restart_that_is_shorter_than_the_distance_of_points_is_shown(reported: float) -> None:
    bars = draw([14.0, 18.0, -21.0, 25.0], *BEGUN, (reported, "FailureKilled"), end=25.0)
    assert bars == [*START, ("steps", 14.0, 18.0), ("restart", 18.0, 21.0), ("steps", 21.0, 25.0)]


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        ("Stalled", "stalled"),
        ("FailureHang", "stalled"),
        ("NodeSilent", "no contact"),
        ("PeerUnreachable", "no contact"),
        ("FailureNodeLost", "pod lost"),
        ("FailurePodDeleted", "pod lost"),
        ("PodReplacement", "pod lost"),
        ("FailureKilled", "no steps"),
        ("Disrupted", "no steps"),
    ],
)
def test_time_between_the_last_step_and_what_was_found_is_named_by_it(found: str, kind: str) -> None:
    bars = draw([*STEPS, *AGAIN], *BEGUN, (70.0, found), (80.0, "FailureNetwork"), end=115.0)
    assert bars[len(START) :][:2] == [
        ("steps", 14.0, 26.0),
        (kind, 26.0, 80.0 if found in ("Stalled", "NodeSilent", "PeerUnreachable") else 70.0),
    ]
    assert bars[-2:] == [("restart", bars[-3][2], 100.0), ("steps", 100.0, 115.0)]


def test_restart_without_a_known_time_is_no_steps() -> None:
    assert draw([*STEPS, *AGAIN], end=115.0)[1:] == [
        ("steps", 14.0, 26.0), ("no steps", 26.0, 100.0), ("steps", 100.0, 115.0),
    ]  # fmt: skip


def test_steps_after_a_stall_of_the_same_process_are_steps() -> None:
    assert draw([*STEPS, 100.0, 106.0], *BEGUN, (70.0, "Stalled"), end=110.0) == [
        *START, ("steps", 14.0, 26.0), ("stalled", 26.0, 100.0), ("steps", 100.0, 110.0),
    ]  # fmt: skip


def draw_two_processes(seconds: float, *events: tuple[float, str]) -> Bars:
    """Return the bars of a job whose second process has made steps for so long at its first row, at 100 s."""
    ended = resource() | {"status": {"phase": "Failed", "startTime": "1970-01-01T00:00:00Z"}}
    rows = [
        {"time": 14.0, "steps": 1.0, "step_seconds": 3.0},
        {"time": 20.0, "steps": 3.0, "step_seconds": 8.0},
        {"time": 100.0, "steps": 1.0, "step_seconds": seconds},
        {"time": 110.0, "steps": 5.0, "step_seconds": seconds + 5.0},
    ]
    logged = [LoggedEvent(time, "Warning", reason, "") for time, reason in events]
    run = RecordedRun(ended, parse_status(ended), rows, logged, name="x", under_way=False)
    return [(bar.kind, bar.start, bar.end) for bar in list_bars(run, NOW)]


@pytest.mark.parametrize(("seconds", "begin"), [(4.0, 96.0), (0.0, 100.0), (90.0, 100.0), (1e9, 100.0)])
def test_steps_before_the_first_row_of_a_process_are_steps(seconds: float, begin: float) -> None:
    assert draw_two_processes(seconds) == [
        ("queue", 0.0, 11.0), ("steps", 11.0, 20.0), ("no steps", 20.0, begin), ("steps", begin, 110.0),
    ]  # fmt: skip


@pytest.mark.parametrize(("reason", "kinds"), [("FailureKilled", ["no steps", "restart"]), ("Stalled", ["stalled"])])
def test_what_is_reported_after_the_first_step_has_begun_is_not_hidden_by_steps(reason: str, kinds: list[str]) -> None:
    bars = draw_two_processes(20.0, (90.0, reason))
    assert [kind for kind, _, _ in bars[2:]] == [*kinds, "steps"]
    assert bars[-1][1] == 100.0


def test_rows_without_a_new_step_are_no_steps() -> None:
    ended = resource() | {"status": {"phase": "Failed", "startTime": "1970-01-01T00:00:00Z"}}
    rows = [{"time": float(time), "steps": min(time, 20.0)} for time in range(14, 60)]
    events = [LoggedEvent(55.0, "Warning", "Stalled", "")]
    run = RecordedRun(ended, parse_status(ended), rows, events, name="x", under_way=False)
    assert [(bar.kind, bar.start) for bar in list_bars(run, NOW)][1:] == [("steps", 14.0), ("stalled", 20.0)]


def test_time_from_the_last_step_to_the_end_has_no_steps() -> None:
    assert draw(STEPS, end=34.0)[1:] == [("steps", 14.0, 26.0), ("no steps", 26.0, 34.0)]
    assert draw(STEPS, end=30.0)[1:] == [("steps", 14.0, 30.0)], "the next point was not due"


def test_no_bar_is_later_than_the_end() -> None:
    assert draw(STEPS, end=24.0)[1:] == [("steps", 14.0, 24.0)]


def test_rendezvous_that_is_reported_after_the_first_step_is_no_restart() -> None:
    bars = draw([14.0], (5.0, "Scheduled"), (15.0, "Rendezvoused"), end=18.0)
    assert bars == [("queue", 0.0, 5.0), ("start", 5.0, 14.0), ("steps", 14.0, 18.0)]


@pytest.mark.parametrize(("phase", "kind"), [("Failed", "stalled"), ("Running", "restart")])
def test_last_failure_begins_a_restart_only_of_a_job_that_goes_on(phase: str, kind: str) -> None:
    bars = draw(STEPS, *BEGUN, (100.0, "FailureHang"), phase=phase)
    assert bars[len(START) + 1] == ("stalled", 26.0, 200.0 if phase == "Failed" else 100.0)
    assert bars[-1][0] == kind


def test_stall_of_which_the_event_is_deleted_is_known_from_the_status() -> None:
    stalled = condition("Progressing", "False", "Stalled") | {"lastTransitionTime": "1970-01-01T00:01:10Z"}
    assert draw(STEPS, phase="Running", conditions=[stalled])[-1] == ("stalled", 26.0, 200.0)


def test_newest_steps_of_a_training_job_need_not_be_read() -> None:
    training = condition("Progressing", "True", "Training")
    assert draw(STEPS, phase="Running", conditions=[training])[-1] == ("steps", 14.0, 200.0)
    assert draw(STEPS, phase="Running")[-1] == ("no steps", 26.0, 200.0)
