"""Jobs that hold GPUs without steps: when they are idle, and which are suspended."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ddp_operator.api.status import Status, Usage
from ddp_operator.decide import conditions as c
from ddp_operator.decide.conditions import Fact, set_conditions
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.state import Observation, State, SuspendResource
from ddp_operator.features import usage as feature
from tests.support.builders import NOW, child_pod, job, page
from tests.support.decisions import present
from tests.support.timeline import JobTimeline, pods, training


def start(**spec: Any) -> JobTimeline:
    life = JobTimeline(**spec)
    life.hooks = Hooks((feature.FEATURE,))
    return life


def read_idle(life: JobTimeline) -> tuple[str, str]:
    result = present(life.status.condition(feature.IDLE))
    return result.status, result.message


def test_idle_job_is_suspended_after_its_condition_is_written() -> None:
    life = start(idle={"minutes": 10, "action": "Suspend"})
    life.later(0)
    life.later(0, *pods())
    life.later(5, *pods(), text=training(1, 1))
    life.later(3600, *pods(), text=training(9, 9))
    assert read_idle(life) == ("False", "")
    stalled = training(9, 9, heartbeat_age=200)
    life.later(200, *pods(), text=stalled)
    assert life.requeue is not None
    assert SuspendResource() not in life.actions
    life.later(599, *pods(), text=stalled)
    assert read_idle(life)[0] == "False"
    life.later(1, *pods(), text=stalled)
    since = "2026-11-20T13:03:25Z"
    statement = f"8 GPUs are held and no step was made since {since}"
    statement += "; the job is suspended: `ddp resume train` resumes it"
    assert read_idle(life) == ("True", statement)
    assert life.actions.count(SuspendResource()) == 1
    life.spec["suspend"] = True
    life.later(1, *pods(deleting=True))
    life.later(60)
    assert read_idle(life) == ("True", statement), "why it is suspended stays"
    life.spec["suspend"] = False
    life.later(5)
    assert read_idle(life) == ("False", "")


def test_ended_job_is_not_idle() -> None:
    status = Status(phase="Running", usage=Usage(gpus=8)).remember(idle_since=NOW)
    ended = set_conditions(status, [Fact(c.FAILED, "True", "UserError")], NOW, 1)
    later = NOW + timedelta(hours=1)
    for known, is_silent in ((status, False), (ended, True)):
        remark = feature.review(State(job(idle={"minutes": 1}, status=known), Observation(), later))
        assert (remark is None) == is_silent


def test_pods_waiting_for_peer_are_idle() -> None:
    life = start(idle={"minutes": 1, "action": "Suspend"})
    life.later(0)
    life.later(0, child_pod(0), child_pod(1, "Pending"))
    life.later(61, child_pod(0), child_pod(1, "Pending"))
    assert SuspendResource() in life.actions


@pytest.mark.parametrize("action", ["Suspend", "Report"])
def test_running_job_without_steps_is_not_suspended(action: str) -> None:
    life = start(idle={"minutes": 1, "action": action})
    life.later(0)
    life.later(0, *pods(), text=page(phase="Running"))
    life.later(61, *pods(), text=page(phase="Running"))
    assert read_idle(life)[1].endswith("; its script has reported no step yet")
    assert SuspendResource() not in life.actions
