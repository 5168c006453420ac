"""The seconds between two writes count for the job's activity then, and their sum is the time that it held GPUs."""

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api.status import ENDED_PHASES, LostUsage, Profile, Status, Usage
from ddp_operator.decide import conditions as c
from ddp_operator.decide.decide import decide
from ddp_operator.decide.stalls import is_stalled, stalled_since
from ddp_operator.decide.state import Stall, SuspendResource
from ddp_operator.decide.transitions import PRODUCTIVE, WAITING, Used, find_transitions, is_minor_change, list_purposes
from tests.support.builders import NOW, child_job, child_pod, decode, job, last_words, observe, page, template, trainer
from tests.support.decisions import present

GPUS = template(trainer(resources={"limits": {"nvidia.com/gpu": 4}}))


class JobTimeline:
    """A job of two pods with four GPUs each, pass by pass."""

    def __init__(self, **spec: Any) -> None:
        self.status = Status()
        self.spec = {"template": GPUS, **spec}
        self.at = NOW

    def later(self, seconds: float, *pods: Any, text: str = "", jobs: Any = None) -> dict[str, int]:
        """Run passes this many seconds after the last, until one changes nothing. Return the use of the GPUs."""
        self.at += timedelta(seconds=seconds)
        self.actions: list[Any] = []
        for _ in range(5):
            before = self.status
            typed = job(status=before, nodes=2, **self.spec)
            attempts = [child_job(n) for n in range(1, before.attempt + 1)] if jobs is None else jobs
            result = decode(text) if text else None
            stall = Stall(stalled_since(result, self.at)) if result is not None and is_stalled(typed, result) else None
            seen = observe(typed, attempts, pods, result, stall=stall)
            decision = decide(typed, seen, self.at)
            self.status = decision.status
            self.requeue = decision.requeue_after
            self.actions += decision.actions
            if self.status == before:
                break
            text = text if self.status.attempt == before.attempt else ""
        return list_purposes(self.status.usage)


def pods(phase: str = "Running", *, attempt: int = 1, **changes: Any) -> list[Any]:
    return [child_pod(index, phase, attempt=attempt, **changes) for index in range(2)]


def training(step: int, made: int, **values: Any) -> str:
    return page(phase="Running", step=step, steps=made, **values)


def test_usage_of_whole_job_sums_up() -> None:
    life = JobTimeline()
    assert life.later(0) == {}
    assert life.later(100, *pods("Pending")) == {}, "no node, no GPU"
    assert life.later(10, *pods("Pending", node="a")) == {PRODUCTIVE: 0, WAITING: 0}
    assert life.later(20, *pods()) == {PRODUCTIVE: 0, WAITING: 160}
    first = life.later(5, *pods(), text=training(1, 1))
    assert first == {PRODUCTIVE: 0, WAITING: 200}
    assert life.later(50, *pods(), text=training(101, 101)) == {PRODUCTIVE: 400, WAITING: 200}
    words = last_words("CUDAError", progress={"step": 121.0})
    crashed = [child_pod(0), child_pod(1, "Failed", code=82, message=words)]
    assert life.later(10, *crashed, text=training(121, 121)) == {PRODUCTIVE: 480, WAITING: 200}
    assert life.status.attempt == 2
    assert life.later(30, *pods(attempt=2)) == {PRODUCTIVE: 480, WAITING: 200, "CUDAError": 120}
    again = life.later(10, *pods(attempt=2), text=training(122, 1))
    assert again == {PRODUCTIVE: 480, WAITING: 200, "CUDAError": 200}
    done = life.later(10, *pods("Succeeded", attempt=2), jobs=[child_job(2, conditions={"Complete": ""})])
    assert done == {PRODUCTIVE: 560, WAITING: 200, "CUDAError": 200}
    usage = present(life.status.usage)
    assert life.status.phase in ENDED_PHASES
    assert (usage.gpus, usage.gpu_seconds) == (0, sum(done.values()))
    assert life.later(1000, *pods("Succeeded", attempt=2)) == done


def test_steps_that_are_repeated_are_lost() -> None:
    life = JobTimeline()
    life.later(0)
    life.later(0, *pods())
    life.later(0, *pods(), text=training(1, 1))
    two_a_second = {"step_seconds": 50.5}
    assert life.later(50, *pods(), text=training(101, 101, **two_a_second))[PRODUCTIVE] == 400
    words = last_words("CUDAError", progress={"step": 101.0})
    life.later(0, *pods("Failed", code=82, message=words))
    assert life.later(0, *pods(attempt=2))[PRODUCTIVE] == 400
    after = life.later(10, *pods(attempt=2), text=training(62, 1))
    # 40 steps at two a second on eight GPUs, beside the ten seconds without a step.
    assert after == {PRODUCTIVE: 400 - 160, WAITING: 0, "CUDAError": 80 + 160}


@pytest.mark.parametrize("resources", [{}, {"limits": {"cpu": "4"}}])
def test_job_without_gpus_has_no_usage(resources: Any) -> None:
    life = JobTimeline(template=template(trainer(resources=resources)))
    life.later(0)
    assert life.later(10, *pods()) == {}
    assert life.status.usage is None


def test_usage_alone_causes_no_write() -> None:
    life = JobTimeline()
    life.later(0)
    life.later(0, *pods())
    before = life.status
    life.later(3600, *pods())
    assert life.status == before
    assert life.later(0, *pods(), text=training(1, 1))[WAITING] == 8 * 3600


def test_usage_change_is_minor_and_counted_once() -> None:
    old = Status(phase="Running", usage=Usage(since=NOW, gpus=8, gpu_seconds=10, waiting=10))
    assert old.usage is not None
    lost = (LostUsage(cause="OOM", gpu_seconds=5),)
    new = replace(old, usage=replace(old.usage, gpu_seconds=35, productive=20, lost=lost))
    assert is_minor_change(old, new)
    assert find_transitions(old, new, NOW) == (Used(PRODUCTIVE, 20), Used("OOM", 5))
    assert find_transitions(new, new, NOW) == ()
    of_profile = replace(new, profile=Profile(kind="ClusterDDPTrainingProfile", name="h100", digest="d", job={}))
    assert find_transitions(old, of_profile, NOW)[0] == Used(PRODUCTIVE, 20, "h100")


class TestIdle:
    @staticmethod
    def idle(life: JobTimeline) -> tuple[str, str]:
        result = present(life.status.condition(c.IDLE))
        return result.status, result.message

    def test_idle_job_is_suspended_after_its_condition_is_written(self) -> None:
        life = JobTimeline(idle={"minutes": 10, "action": "Suspend"})
        life.later(0)
        life.later(0, *pods())
        life.later(5, *pods(), text=training(1, 1))
        life.later(3600, *pods(), text=training(9, 9))
        assert self.idle(life) == ("False", "")
        stalled = training(9, 9, heartbeat_age=200)
        life.later(200, *pods(), text=stalled)
        assert life.requeue is not None
        assert SuspendResource() not in life.actions
        life.later(599, *pods(), text=stalled)
        assert self.idle(life)[0] == "False"
        life.later(1, *pods(), text=stalled)
        since = "2026-11-20T13:03:25Z"
        statement = f"8 GPUs are held and no step was made since {since}"
        statement += "; the job is suspended: `ddp resume train` resumes it"
        assert self.idle(life) == ("True", statement)
        assert life.actions.count(SuspendResource()) == 1
        life.spec["suspend"] = True
        life.later(1, *pods(deleting=True))
        life.later(60)
        assert self.idle(life) == ("True", statement), "why it is suspended stays"
        life.spec["suspend"] = False
        life.later(5)
        assert self.idle(life) == ("False", "")

    def test_pods_waiting_for_peer_are_idle(self) -> None:
        life = JobTimeline(idle={"minutes": 1, "action": "Suspend"})
        life.later(0)
        life.later(0, child_pod(0), child_pod(1, "Pending"))
        life.later(61, child_pod(0), child_pod(1, "Pending"))
        assert SuspendResource() in life.actions

    @pytest.mark.parametrize("action", ["Suspend", "Report"])
    def test_running_job_without_steps_is_not_suspended(self, action: str) -> None:
        life = JobTimeline(idle={"minutes": 1, "action": action})
        life.later(0)
        life.later(0, *pods(), text=page(phase="Running"))
        life.later(61, *pods(), text=page(phase="Running"))
        assert self.idle(life)[1].endswith("; its script has reported no step yet")
        assert SuspendResource() not in life.actions
