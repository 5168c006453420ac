"""Lives of a job, step by step in a simulation: actions of users, nodes and pods, but not of the operator."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from ddp_operator.api import constants
from tests.support.builders import last_words, page, resource, template, trainer
from tests.support.standin.kueue import Manages
from tests.support.standin.simulation import OperatorSimulation

TRAINING = page(step=7, total_steps=10, phase="Running")
ERROR = last_words("CUDAError", rank=1, podIndex=1)

Scenario = Callable[[OperatorSimulation], Awaitable[None]]


async def train(sim: OperatorSimulation, **spec: Any) -> None:
    """Create the job if it does not exist, and run its current attempt."""
    if sim.get(constants.KIND, "train") is None:
        sim.create(resource(**{"nodes": 2, **spec}))
    await sim.settle()
    for pod in sim.pods():
        if pod["status"]["phase"] == "Pending":
            sim.run_pod(pod)
    sim.page = TRAINING
    await sim.settle(11)


async def finish(sim: OperatorSimulation) -> None:
    """Complete the current attempt's pods."""
    for pod in sim.pods():
        sim.end_pod(pod)
    await sim.settle()


async def succeed(sim: OperatorSimulation) -> None:
    await train(sim)
    await finish(sim)


async def fail_once(sim: OperatorSimulation) -> None:
    await train(sim)
    sim.end_pod(sim.pods()[1], constants.EXIT_RETRYABLE, ERROR)
    await train(sim)
    await finish(sim)


async def exhaust_the_budget(sim: OperatorSimulation) -> None:
    await train(sim, recovery={"maxRestarts": 1})
    for _ in range(2):
        sim.end_pod(sim.pods()[1], constants.EXIT_RETRYABLE, ERROR)
        await train(sim)


async def make_a_mistake(sim: OperatorSimulation) -> None:
    await train(sim)
    sim.end_pod(sim.pods()[0], constants.EXIT_USER_ERROR, last_words("UserError"))
    await sim.settle()


async def run_out_of_memory(sim: OperatorSimulation) -> None:
    await train(sim)
    sim.end_pod(sim.pods()[1], 137, reason="OOMKilled")
    await train(sim)
    await finish(sim)


async def be_evicted(sim: OperatorSimulation) -> None:
    await train(sim)
    sim.evict(sim.pods()[1])
    await train(sim)
    await finish(sim)


async def lose_a_node(sim: OperatorSimulation) -> None:
    await train(sim, recovery={"forceDeleteAfterSeconds": 10})
    lost = sim.pods()[1]
    sim.lose_node(lost["spec"]["nodeName"])
    await sim.settle(15)
    sim.evict(lost, "DeletionByTaintManager")
    await sim.settle(15)
    await train(sim)
    await finish(sim)


async def resize(sim: OperatorSimulation) -> None:
    await train(sim)
    sim.edit(nodes=3)
    await train(sim)
    await finish(sim)


async def resize_in_place(sim: OperatorSimulation) -> None:
    await train(sim, elastic={"minNodes": 1, "maxNodes": 4})
    sim.edit(nodes=3)
    await train(sim)
    sim.edit(nodes=1)
    await train(sim)
    await finish(sim)


async def suspend_and_resume(sim: OperatorSimulation) -> None:
    await train(sim)
    sim.edit(suspend=True)
    await sim.settle(10)
    sim.edit(suspend=False)
    await train(sim)
    await finish(sim)


async def stop_in_a_queue(sim: OperatorSimulation) -> None:
    await train(sim, labels={constants.KUEUE_QUEUE_LABEL: "q"})
    sim.edit(suspend=True)
    await sim.settle(10)
    sim.edit(suspend=False)
    await sim.settle()


async def be_preempted(sim: OperatorSimulation, manages: Manages = "labelled", **spec: Any) -> None:
    """Wait for quota, train, lose the quota to other jobs for longer than any deadline, and get it back."""
    kueue = sim.install_kueue(manages, quota=0)
    sim.create(resource(nodes=2, pendingDeadlineSeconds=300, activeDeadlineSeconds=100, **spec))
    await sim.settle(200)
    kueue.quota = 2
    await train(sim)
    sim.move_clock(60)
    await train(sim)
    kueue.quota = 0
    kueue.preempt()
    await sim.settle(200)
    kueue.quota = 2
    await train(sim)
    await finish(sim)


async def be_preempted_with_a_label(sim: OperatorSimulation) -> None:
    await be_preempted(sim, labels={constants.KUEUE_QUEUE_LABEL: "q"})


async def be_preempted_in_a_default_queue(sim: OperatorSimulation) -> None:
    await be_preempted(sim, "default queue")


async def be_preempted_without_a_label(sim: OperatorSimulation) -> None:
    await be_preempted(sim, "all")


async def be_suspended_without_a_label(sim: OperatorSimulation) -> None:
    """Start suspended, resume, and suspend by the user, with Kueue managing every Job."""
    kueue = sim.install_kueue("all")
    sim.create(resource(nodes=2, suspend=True))
    await sim.settle(10)
    sim.edit(suspend=False)
    await train(sim)
    sim.edit(suspend=True)
    await sim.settle(10)
    kueue.quota = 0
    sim.edit(suspend=False)
    await sim.settle(10)
    sim.edit(suspend=True)
    await sim.settle(10)
    kueue.quota = 2
    sim.edit(suspend=False)
    await train(sim)
    await finish(sim)


async def mend(sim: OperatorSimulation) -> None:
    sim.create(resource(nodes=2, template=template(trainer(command=None))))
    await sim.settle(31)
    sim.edit(template=template())
    await train(sim)
    await finish(sim)


async def be_made_again(sim: OperatorSimulation) -> None:
    await train(sim)
    sim.delete(constants.KIND, "train")
    sim.create(resource(nodes=1))
    await sim.settle(10)
    await train(sim)
    await finish(sim)


async def pass_away(sim: OperatorSimulation) -> None:
    await train(sim, ttlSecondsAfterFinished=5)
    await finish(sim)
    await sim.settle(10)


ENDS: dict[Scenario, tuple[str, int, int] | None] = {
    succeed: ("Succeeded", 1, 0),
    fail_once: ("Succeeded", 2, 1),
    exhaust_the_budget: ("Failed", 2, 1),
    make_a_mistake: ("Failed", 1, 0),
    run_out_of_memory: ("Succeeded", 2, 1),
    be_evicted: ("Succeeded", 1, 0),
    lose_a_node: ("Succeeded", 2, 0),
    resize: ("Succeeded", 2, 0),
    resize_in_place: ("Succeeded", 1, 0),
    suspend_and_resume: ("Succeeded", 1, 0),
    stop_in_a_queue: ("Pending", 1, 0),
    be_preempted_with_a_label: ("Succeeded", 1, 0),
    be_preempted_in_a_default_queue: ("Succeeded", 1, 0),
    be_preempted_without_a_label: ("Succeeded", 1, 0),
    be_suspended_without_a_label: ("Succeeded", 1, 0),
    mend: ("Succeeded", 1, 0),
    be_made_again: ("Succeeded", 1, 0),
    pass_away: None,
}
"""Each scenario's final phase, attempt and counted restarts; None: the job is deleted."""
SCENARIOS = tuple(ENDS)


def end_of(sim: OperatorSimulation) -> Any:
    """Return the values that must not depend on faults, without times and random names."""
    jobs = [
        (job["metadata"]["name"], job["spec"]["completions"], job["spec"]["suspend"], job["metadata"]["generation"])
        for job in sim.list("Job")
    ]
    pods = [(pod["metadata"]["name"][:-5], pod["status"]["phase"]) for pod in sim.list("Pod")]
    peers = [thing["metadata"]["name"] for kind in ("Service", "ConfigMap") for thing in sim.list(kind)]
    made = sorted(write for write in sim.storage.writes if write[0] == "create" and write[1] in CHILDREN)
    status = None
    if sim.get(constants.KIND, "train") is not None:
        text = msgspec.json.encode(sim.status()).decode()
        text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "T", text)
        status = msgspec.json.decode(re.sub(r"(train-\d+-\d+)-\w{5}", r"\1", text))
        if status.get("lastFailure", {}).get("category") == "NodeLost":
            del status["lastFailure"]["message"]  # the pod's message, or its node's if that is read first
        status["operatorState"].pop("children", None)  # UIDs, which depend on the number of objects before
        for told_in_seconds in ("goodput", "lastRestart", "points"):
            status.pop(told_in_seconds, None)
        for seen_on_the_way in ("replaced", "all"):  # a pod that is missing in one observation and present in the next
            for counts in (status.get("restarts", {}), status["operatorState"].get("restarts", {})):
                counts.pop(seen_on_the_way, None)
    return {"status": status, "jobs": jobs, "pods": sorted(pods), "others": peers, "made": made}


CHILDREN = ("jobs", "services", "configmaps")
