"""The GPU-seconds of a job by purpose."""

from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api.status import ENDED_PHASES
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.purposes import PRODUCTIVE, WAITING
from ddp_operator.features.usage import FEATURE
from tests.support.builders import child_job, child_pod, claiming, last_words, template, trainer
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness
from tests.support.timeline import JobTimeline, pods, training

HOOKS = Hooks((FEATURE,))


def start(**spec: Any) -> JobTimeline:
    life = JobTimeline(**spec)
    life.hooks = HOOKS
    return life


def test_usage_of_whole_job_sums_up() -> None:
    life = start()
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
    life = start()
    life.later(0)
    life.later(0, *pods())
    life.later(0, *pods(), text=training(1, 1))
    assert life.later(50, *pods(), text=training(101, 101))[PRODUCTIVE] == 400
    life.status = replace(life.status, progress=replace(present(life.status.progress), steps_per_second="2"))
    words = last_words("CUDAError", progress={"step": 101.0})
    life.later(0, *pods("Failed", code=82, message=words))
    assert life.later(0, *pods(attempt=2))[PRODUCTIVE] == 400
    after = life.later(10, *pods(attempt=2), text=training(62, 1))
    # 40 steps at two a second on eight GPUs, beside the ten seconds without a step.
    assert after == {PRODUCTIVE: 400 - 160, WAITING: 0, "CUDAError": 80 + 160}


@pytest.mark.parametrize("resources", [{}, {"limits": {"cpu": "4"}}])
def test_job_without_gpus_has_no_usage(resources: Any) -> None:
    life = start(template=template(trainer(resources=resources)))
    life.later(0)
    assert life.later(10, *pods()) == {}
    assert life.status.usage is None


def test_usage_alone_causes_no_write() -> None:
    life = start()
    life.later(0)
    life.later(0, *pods())
    before = life.status
    life.later(3600, *pods())
    assert life.status == before
    assert life.later(0, *pods(), text=training(1, 1))[WAITING] == 8 * 3600


async def test_stated_processes_are_the_gpus_of_a_claiming_pod() -> None:
    harness = await ReconcilerHarness(nodes=2, template=claiming(), procPerNode=4, hooks=HOOKS).train()
    assert present(harness.status.usage).gpus == 8


async def test_count_in_the_status_of_a_former_version_is_ignored() -> None:
    harness = await ReconcilerHarness(nodes=2, template=claiming(), procPerNode=4, hooks=HOOKS).train()
    assert harness.raw is not None
    harness.cluster.store.change(harness.raw, status={**harness.raw["status"], "claims": {"gpus": 8, "digest": "a"}})
    harness.restart_operator()
    await harness.settle()
    assert (harness.status.phase, present(harness.status.usage).gpus) == ("Running", 8)
    assert harness.state("Accepted") == ("True", "Valid")
