"""The state machine on any history: any observations, in any order, at any time."""

import dataclasses
import random
from datetime import timedelta
from typing import Any

import jsonschema
import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ddp_operator.api.crd import build_crd
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import Status
from ddp_operator.decide.conditions import is_finished
from ddp_operator.decide.decide import decide
from ddp_operator.decide.diagnosis import list_restart_failures
from ddp_operator.decide.report import Page
from ddp_operator.decide.state import Decision, DeleteJob, EnsureChildren, EvictPod, Observation, Refusal, Trouble
from ddp_operator.decide.views import NodeView
from ddp_operator.features import SCHEMA
from tests.support import strategies
from tests.support.builders import NOW, decode, job, observe, page

STATUS = jsonschema.Draft202012Validator(
    build_crd(SCHEMA)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
)
HELD = [{"dev": {}}] * 3 if SCHEMA.holding is not None else []
"""Jobs whose pods stay between runs, if there is the feature."""
pages = st.none() | st.builds(
    lambda step, phase, restarts: decode(page(step=step, phase=phase, restarts=restarts)),
    st.integers(0, 9),
    st.sampled_from(["Starting", "Rendezvous", "Running", "Done"]),
    st.integers(0, 3),
)
held_pages = st.builds(
    lambda step, restarts, run, result: decode(
        page(
            step=step,
            phase="Held" if result else "Running",
            restarts=restarts,
            dev={"run": run, "result": result, "ended": NOW.timestamp(), "failure": {"category": "OOM"}},
        )
    ),
    st.integers(0, 9),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from(["", "Failed", "Stopped"]),
)
refusals = st.none() | st.builds(
    Refusal, st.sampled_from(["InvalidSpec", "NameConflict", "Forbidden"]), st.just("words")
)


@dataclasses.dataclass(frozen=True)
class PassInput:
    """The input of a pass: the current spec, the observation and the time."""

    spec: Any
    jobs: tuple[Any, ...]
    pods: tuple[Any, ...]
    page: Page | None
    asked: bool
    refusal: Refusal | None
    seconds: int
    nodes: dict[str, NodeView] = dataclasses.field(default_factory=dict)
    answered: dict[str, Any] | None = None
    drained: frozenset[str] = frozenset()

    def job(self, status: Status) -> DDPTrainingJob:
        return job(status=status, **self.spec)

    def observe(self, typed: DDPTrainingJob, shuffle: random.Random | None = None) -> Observation:
        jobs = list(self.jobs)
        pods = list(self.pods)
        if shuffle:
            shuffle.shuffle(jobs)
            shuffle.shuffle(pods)
        seen = observe(typed, jobs, pods, self.page, page_requested=self.asked, nodes=self.nodes)
        report = page(answered=self.answered)
        return dataclasses.replace(
            seen,
            departures=dict.fromkeys(sorted(self.drained), "maintenance"),
            troubles={"node-a": Trouble("drains", planned=True, leaves=True)} if "node-a" in self.drained else {},
            failures_in_place=list_restart_failures(
                (pod, decode(report)) for pod in seen.pods_of(typed.status.attempt)
            ),
        )

    def decide(self, status: Status, shuffle: random.Random | None = None) -> Decision:
        typed = self.job(status)
        now = NOW + timedelta(seconds=self.seconds)
        return decide(typed, self.observe(typed, shuffle), now, refusal=self.refusal)


@st.composite
def steps(draw: st.DrawFn) -> PassInput:
    spec = {
        "nodes": draw(st.integers(1, 3)),
        "suspend": draw(st.booleans()),
        "recovery": {
            "maxRestarts": draw(st.integers(0, 2)),
            "countDisruptions": draw(st.booleans()),
            "forceDeleteAfterSeconds": draw(st.sampled_from([0, 20, 120])),
        },
        "labels": draw(st.sampled_from([None, None, {"kueue.x-k8s.io/queue-name": "q"}])),
        **draw(
            st.sampled_from(
                [
                    {},
                    {},
                    {"activeDeadlineSeconds": 40},
                    {"ttlSecondsAfterFinished": 30},
                    *HELD,
                ]
            )
        ),
    }
    attempts = draw(st.sets(st.integers(1, 3), max_size=2))
    names = set()
    seen = []
    for pod in draw(st.lists(strategies.pods(), max_size=4)):
        if pod["metadata"]["name"] not in names:
            names.add(pod["metadata"]["name"])
            seen.append(pod)
    return PassInput(
        spec,
        tuple(draw(strategies.jobs(attempt)) for attempt in sorted(attempts)),
        tuple(seen),
        draw(held_pages if "dev" in spec else pages),
        draw(st.booleans()),
        draw(refusals),
        draw(st.integers(-100, 100)),
        {} if (ready := draw(st.sampled_from([True, False, None, ""]))) == "" else {"node-a": NodeView(ready, "words")},
        draw(st.none() | strategies.categories.flatmap(strategies.words)),
        frozenset(draw(st.sets(st.sampled_from(["node-a", *sorted(names)]), max_size=3))),
    )


def without_times(status: Status) -> Any:
    return msgspec.json.decode(msgspec.json.encode(status))


@given(st.lists(steps(), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_decisions_keep_their_promises_over_any_history_of_job(
    history: list[PassInput], shuffle: random.Random
) -> None:
    status = Status()
    for step in history:
        before = status
        decision = step.decide(status)
        status = decision.status
        check_storable(status)
        check_ledger(before, decision, step)
        # The order of lists has no effect.
        again = step.decide(before, shuffle)
        assert again.status == status
        assert set(again.actions) == set(decision.actions)
        assert again.requeue_after == decision.requeue_after
        check_rest(step, decision)


def check_storable(status: Status) -> None:
    raw = msgspec.to_builtins(status)
    assert STATUS.is_valid(msgspec.json.decode(msgspec.json.encode(raw)))
    kinds = [condition.type for condition in status.conditions]
    assert len(kinds) == len(set(kinds))
    true = {condition.type for condition in status.conditions if condition.status == "True"}
    assert not {"Succeeded", "Failed"} <= true
    assert (status.phase == "Failed") == ("Failed" in true)
    assert (status.phase == "Succeeded") == ("Succeeded" in true)


def check_ledger(before: Status, decision: Decision, step: PassInput) -> None:
    after = decision.status
    if is_finished(before):
        assert after == before, "terminal states absorb"
    assert after.attempt >= before.attempt
    assert after.attempt <= max(before.attempt + 1, 3)
    counted = after.counts.counted
    explained = before.last_failure is not None and after.last_failure != before.last_failure
    is_new_run = before.dev is not None and before.dev != after.dev
    assert (
        is_new_run
        or counted >= before.counts.counted
        or (explained and set(before.failed_nodes) < set(after.failed_nodes))
    )
    assert 0 <= after.counts.used <= counted
    assert len(after.failed_nodes) <= 10
    recovered = (
        any(raw["metadata"]["name"] == f"train-{after.attempt}" for raw in step.jobs) and after.attempt > before.attempt
    )
    if counted > before.counts.counted and not recovered:
        assert after.counts.used <= step.spec["recovery"]["maxRestarts"]
    changed = (before.attempt, before.attempt_nodes, before.counts.counted, before.failed_nodes, is_finished(before)
    ) != (
        after.attempt, after.attempt_nodes, after.counts.counted, after.failed_nodes, is_finished(after)
    )  # fmt: skip
    if changed and before.attempt:  # attempt 1 starts with its Job
        assert decision.actions == (), "the ledger is written before anything is done"
        assert decision.requeue_after == 0
    for action in decision.actions:
        if isinstance(action, EnsureChildren):
            ledger = before if before.attempt else after
            assert (action.attempt, action.nodes) == (ledger.attempt, ledger.attempt_nodes)
            assert not [
                pod for pod in step.pods if is_alive(pod) and pod["metadata"]["labels"][ATTEMPT] != str(action.attempt)
            ]
        if isinstance(action, EvictPod):
            assert action.name in step.drained
            assert not step.spec["suspend"]
        stopped_in_queue = step.spec["suspend"] and step.spec["labels"]
        if isinstance(action, DeleteJob) and not is_finished(before) and not stopped_in_queue:
            assert action.name != f"train-{before.attempt}", "the current attempt's Job is never deleted"


ATTEMPT = "ddp-operator.dev/attempt"


def is_alive(pod: Any) -> bool:
    return pod["status"]["phase"] in ("Pending", "Running")


def check_rest(step: PassInput, decision: Decision) -> None:
    """Repeat the decision with equal input until the status stays equal; it must need no other pass then."""
    status = decision.status
    passes = 0
    while True:
        following = step.decide(status)
        if following.status == status:
            break
        status = following.status
        passes = passes + 1
        assert passes <= 8, "never comes to rest"
    if decision.requeue_after != 0:
        assert passes == 0, "a second look at the same things changes the status"
    assert following.requeue_after != 0, "a storm: it asks for another pass at once, for ever"


@given(steps(), st.integers(1, 10_000))
def test_time_alone_never_undoes_end(step: PassInput, seconds: int) -> None:
    status = Status()
    for _ in range(4):
        status = step.decide(status).status
    later = dataclasses.replace(step, seconds=step.seconds + seconds)
    if is_finished(status):
        assert later.decide(status).status == status
