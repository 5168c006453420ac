"""Generated histories of a job: users, nodes, pods, watches and crashes of the operator, and invariants.

The operator's parts are the real ones (``tests/support/standin/simulation.py``). Watches deliver late or
twice; clocks jump; calls fail; an operator freezes, is deposed and resumes later. After each step the invariants of the
whole history are checked, and in the end the job must make progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ddp_operator.api import constants
from ddp_operator.api.cluster import Key
from ddp_operator.api.status import Status
from ddp_operator.decide import conditions as c
from ddp_operator.kube.children import WHOLE_KINDS
from tests.support import strategies
from tests.support.builders import page, resource
from tests.support.fuzzing import examples, tally
from tests.support.scenarios import TRAINING
from tests.support.standin.kueue import Manages
from tests.support.standin.selectors import labels_of
from tests.support.standin.simulation import FINISHED, Fence, OperatorSimulation
from tests.support.standin.storage import Object, StoredChange

NAME = "train"
KEY = Key("default", NAME)
QUEUES: tuple[Manages | None, ...] = (None, "labelled", "default queue", "all")
T = TypeVar("T")

specs = st.fixed_dictionaries(
    {
        "nodes": st.integers(1, 3),
        "recovery": st.fixed_dictionaries(
            {
                "maxRestarts": st.integers(0, 2),
                "countDisruptions": st.booleans(),
                "forceDeleteAfterSeconds": st.sampled_from([0, 10, 120]),
                "avoidFailedNodes": st.booleans(),
            }
        ),
    },
    optional={
        "elastic": st.just({"minNodes": 1, "maxNodes": 4}),
        "suspend": st.booleans(),
        "successPolicy": st.sampled_from(["AllNodes", "RankZero"]),
        "cleanPodPolicy": st.sampled_from(["All", "Running", "None"]),
        "activeDeadlineSeconds": st.sampled_from([20, 200]),
        "pendingDeadlineSeconds": st.sampled_from([20, 200]),
        "ttlSecondsAfterFinished": st.sampled_from([0, 30]),
        "labels": st.sampled_from([None, {constants.KUEUE_QUEUE_LABEL: "q"}]),
    },
)
pages = st.one_of(
    st.none(),
    st.just("no page at all \x00"),
    st.builds(
        lambda step, saved, restarts, answered: page(
            step=step,
            total_steps=50,
            checkpoint_step=saved,
            phase="Running",
            restarts=restarts,
            answered=answered,
        ),
        st.integers(0, 50),
        st.integers(0, 50),
        st.integers(0, 4),
        st.none() | strategies.categories.flatmap(strategies.words),
    ),
)
faults = st.sampled_from([None, None, "kill", "kill", 409, 410, 429, 500, 503, 401, 403, 422, "drop", "lost answer"])
ends = st.one_of(
    st.just((0, "", "")),
    st.tuples(
        st.sampled_from(strategies.CODES), st.just("") | strategies.categories.flatmap(strategies.words), st.just("")
    ),
    st.just((137, "", "OOMKilled")),
)
fences: st.SearchStrategy[Fence] = st.sampled_from(["closed", "late", "open"])
picks = st.integers(0, 5)


class JobHistoryMachine(RuleBasedStateMachine):
    """One job's name, used by one job after another."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.sim = OperatorSimulation()
        self.looked_at = 0
        self.failures = 0
        self.alive: dict[str, str] = {}
        """Pods that are not finished, by UID, with their attempts."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    # Users

    @initialize(spec=specs, trains=st.sampled_from([True, True, False]), manages=st.sampled_from(QUEUES))
    def begin(self, spec: Any, trains: bool, manages: Manages | None) -> None:
        if manages is not None:
            self.sim.install_kueue(manages)
        self.sim.create(resource(NAME, **spec))
        self.run(self.sim.restart())
        if trains:
            self.go_on(TRAINING)

    @rule(text=st.sampled_from([TRAINING, None]))
    def go_on(self, text: str | None) -> None:
        """Run users, controllers and the operator for a while."""
        self.sim.page = text
        for _ in range(2):
            self.run(self.sim.settle(6))
            self.run_pods()
        self.run(self.sim.settle(2))

    @rule(pick=picks, end=ends, text=st.sampled_from([TRAINING, None]))
    def fail_and_go_on(self, pick: int, end: Any, text: str | None) -> None:
        self.end_a_pod(pick, end)
        self.go_on(text)

    @rule(pick=picks)
    def lose_a_node_and_go_on(self, pick: int) -> None:
        self.lose_a_node(pick)
        self.evict_from_dead_nodes()
        self.run(self.sim.settle(130))
        self.go_on(None)

    @precondition(lambda self: self.exists)
    @rule(nodes=st.integers(1, 4))
    def resize(self, nodes: int) -> None:
        self.sim.edit(nodes=nodes)

    @precondition(lambda self: self.exists)
    @rule(suspend=st.booleans())
    def suspend_or_resume(self, suspend: bool) -> None:
        self.sim.edit(suspend=suspend)

    @precondition(lambda self: self.exists)
    @rule(spec=specs, rest=st.booleans())
    def make_again(self, spec: Any, rest: bool) -> None:
        """Delete the job and create another one of its name, at once or after the garbage collector."""
        self.sim.delete(constants.KIND, NAME)
        if rest:
            self.sim.controllers.round()
        self.sim.create(resource(NAME, **spec))

    @rule(pick=picks, kind=st.sampled_from(["Job", "Pod", "Service"]))
    def delete_a_child(self, pick: int, kind: str) -> None:
        results = self.sim.list(kind)
        if results:
            self.sim.delete(kind, results[pick % len(results)]["metadata"]["name"])

    # The cluster

    @rule(times=st.integers(1, 3))
    def let_controllers_work(self, times: int) -> None:
        for _ in range(times):
            self.sim.controllers.round()

    @precondition(lambda self: self.sim.kueue)
    @rule(quota=st.sampled_from([0, 2, 100]))
    def change_quota(self, quota: int) -> None:
        self.sim.kueue.quota = quota

    @precondition(lambda self: self.sim.kueue)
    @rule()
    def admit(self) -> None:
        self.sim.kueue.round()

    @precondition(lambda self: self.sim.kueue)
    @rule()
    def preempt(self) -> None:
        self.sim.kueue.preempt()

    @rule()
    def run_pods(self) -> None:
        for pod in self.living():
            if pod["status"]["phase"] == "Pending" and "deletionTimestamp" not in pod["metadata"]:
                self.sim.run_pod(pod)

    @rule(pick=picks, end=ends)
    def end_a_pod(self, pick: int, end: Any) -> None:
        running = [pod for pod in self.living() if pod["status"]["phase"] == "Running"]
        if running:
            code, message, reason = end
            self.failures += code != 0
            self.sim.end_pod(running[pick % len(running)], code, message, reason=reason)

    @rule(pick=picks, reason=st.sampled_from(["EvictionByEvictionAPI", "DeletionByTaintManager"]))
    def evict(self, pick: int, reason: str) -> None:
        pods = self.living()
        if pods:
            self.failures += 1
            self.sim.evict(pods[pick % len(pods)], reason)

    @rule(pick=picks)
    def lose_a_node(self, pick: int) -> None:
        nodes = sorted({pod["spec"].get("nodeName") or "" for pod in self.living()} - {""})
        if nodes:
            self.failures += 1
            self.sim.lose_node(nodes[pick % len(nodes)])

    @rule(text=pages)
    def say(self, text: str | None) -> None:
        self.sim.page = text

    @rule(seconds=st.sampled_from([1, 1, 5, 11, 31, 61, 130, 400, -5, -100]))
    def let_time_pass(self, seconds: int) -> None:
        self.sim.move_clock(seconds)

    # The operator

    @rule(kind=st.sampled_from(WHOLE_KINDS), count=st.integers(1, 4))
    def deliver(self, kind: str, count: int) -> None:
        self.sim.deliver(kind, count)

    @rule(kind=st.sampled_from(WHOLE_KINDS), count=st.integers(1, 6))
    def deliver_again(self, kind: str, count: int) -> None:
        self.sim.repeat(kind, count)

    @rule(times=st.integers(1, 3), fault=faults, nth=st.integers(1, 6), fresh=st.booleans())
    def work(self, times: int, fault: Any, nth: int, fresh: bool) -> None:
        """Make some passes, one of whose calls may fail."""
        sim = self.sim
        sim.faults.clear()
        if fault == "kill":
            sim.kill_after = len(sim.calls) + nth
        elif fault is not None:
            sim.faults.add(fault, nth=nth)
        for _ in range(times):
            if fresh:
                for kind in WHOLE_KINDS:
                    sim.deliver(kind)
            self.run(sim.reconcile(KEY))
        sim.faults.clear()
        sim.kill_after = 0

    @rule(times=st.integers(1, 3), nth=st.integers(1, 8), fence=fences, passes=st.integers(0, 2))
    def depose(self, times: int, nth: int, fence: Fence, passes: int) -> None:
        """Freeze the operator at one of its calls, so that another one starts."""
        sim = self.sim
        sim.stop_at = len(sim.calls) + nth
        sim.fence = fence
        sim.stale_passes = passes
        for _ in range(times):
            self.run(sim.reconcile(KEY))
        sim.stop_at = 0

    @precondition(lambda self: self.sim.deposed)
    @rule(pick=picks)
    def wake(self, pick: int) -> None:
        self.run(self.sim.wake(self.sim.deposed[pick % len(self.sim.deposed)]))

    @rule()
    def compare_with_lists(self) -> None:
        self.run(self.sim.sync.resync())

    @rule()
    def restart(self) -> None:
        self.run(self.sim.restart())

    # Invariants

    @property
    def exists(self) -> bool:
        return self.sim.get(constants.KIND, NAME) is not None

    def living(self) -> list[Object]:
        return [pod for pod in self.sim.list("Pod") if pod["status"]["phase"] not in FINISHED]

    @invariant()
    def history_is_good(self) -> None:
        history = self.sim.storage.history
        for change in history[self.looked_at :]:
            if change.kind.kind == constants.KIND and change.before and change.after:
                check_status(change)
            if change.kind.kind == "Pod" and (pod := change.after or change.before):
                self.alive.pop(pod["metadata"]["uid"], None)
                if change.after and pod["status"].get("phase") not in FINISHED:
                    self.alive[pod["metadata"]["uid"]] = labels_of(pod)[constants.LABEL_ATTEMPT]
            if change.kind.kind == "Job" and change.before is None and change.after:
                self.check_new_job(change.after, late=change.version in self.sim.late_writes)
        self.looked_at = len(history)
        assert not self.sim.refused, "the operator wrote what the API server refuses"
        assert self.sim.kueue is None or not self.sim.kueue.bypassed(), "a Job was let run past Kueue"

    def check_new_job(self, job: Object, *, late: bool) -> None:
        """Every Job is that of the recorded attempt or of attempt 1, and never runs beside the pods of another one.

        ``late``: the writes of a deposed operator, which can only be repaired by deleting that Job.
        """
        attempt = int(labels_of(job)[constants.LABEL_ATTEMPT])
        owner = self.sim.get(constants.KIND, NAME)
        if owner is None or owner["metadata"]["uid"] != job["metadata"]["ownerReferences"][0]["uid"]:
            return  # its owner was deleted meanwhile: the garbage collector follows
        assert attempt <= max(1, self.sim.status(NAME).attempt), "a Job that the ledger does not know"
        if late:
            return
        former = {uid: of for uid, of in self.alive.items() if of != str(attempt)}
        assert not former, f"a Job of attempt {attempt} beside pods of another: {former}"

    def teardown(self) -> None:
        try:
            if self.sim.lives > 1:
                self.run(self.come_to_an_end())
        finally:
            self.run(self.sim.forget_deposed())
            self.loop.close()
        tally("life of a job")

    async def come_to_an_end(self) -> None:
        """Without further faults the job reaches its end, and is then left unchanged."""
        sim = self.sim
        while sim.deposed:
            await sim.wake(sim.deposed[0])
        sim.page = page(step=50, total_steps=50, checkpoint_step=50, phase="Running")
        if sim.kueue:
            sim.kueue.quota = 100
        if self.exists:
            sim.edit(suspend=False)
        for _ in range(12):
            await sim.sync.resync()
            await sim.settle(70)
            self.evict_from_dead_nodes()
            self.run_pods()
            await sim.settle(12)
            self.history_is_good()
            if not self.exists or ended(sim.status(NAME)):
                break
            for pod in self.living():
                if pod["status"]["phase"] == "Running":
                    sim.end_pod(pod)
        else:
            raise AssertionError(f"never ends: {sim.status(NAME)}\n{sim.calls[-30:]}")
        await sim.settle(500)
        await sim.settle(500)
        before = len(sim.calls)
        sim.want(KEY)
        await sim.settle()
        await sim.restart()
        await sim.settle()
        writes = [call for call in sim.calls[before:] if not call.startswith(("list", "get", "scrape"))]
        assert not writes, f"writes although nothing has changed: {writes}"
        if self.exists:
            former = [
                pod for pod in self.living() if int(labels_of(pod)[constants.LABEL_ATTEMPT]) < sim.status(NAME).attempt
            ]
            assert not former, "pods of a former attempt live on"

    def evict_from_dead_nodes(self) -> None:
        """Delete pods on nodes that stay silent, as Kubernetes does."""
        for pod in self.living():
            if pod["spec"].get("nodeName") in self.sim.controllers.dead_nodes:
                self.sim.evict(pod, "DeletionByTaintManager")


def check_status(change: StoredChange) -> None:
    """Finished jobs stay finished, attempts only increase, and the budget is kept."""
    assert change.before is not None
    assert change.after is not None
    before, after = (msgspec.convert(raw.get("status") or {}, Status) for raw in (change.before, change.after))
    if ended(before):
        assert after == before, "a job that has ended was changed"
    assert before.attempt <= after.attempt <= before.attempt + 1, (before.attempt, after.attempt)
    assert after.counts.total >= before.counts.total
    limit = change.after["spec"]["recovery"]["maxRestarts"]
    assert 0 <= after.counts.used <= limit, "more restarts than the budget allows"
    assert after.counts.used <= after.counts.counted
    report = after.counts
    assert report.total == max(0, after.attempt - 1)
    assert report.total <= report.counted + report.free <= report.total + report.in_place


def ended(status: Status) -> bool:
    return status.is_true(c.SUCCEEDED) or status.is_true(c.FAILED)


def test_job_finishes_for_any_history_of_pods_and_operator() -> None:
    run_state_machine_as_test(JobHistoryMachine, settings=examples(40, stateful_step_count=25))
