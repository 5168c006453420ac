"""Hooks of features that fail: the kernel goes on, and says which feature had which fault."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ddp_operator.api import constants
from ddp_operator.api.cluster import Key, Snapshot
from ddp_operator.api.cluster_errors import AlreadyExists, ClusterError, Refused, ServerError
from ddp_operator.api.faults import FAULTS
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.status import LastFailure, QueueStatus, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import hooks as decide_hooks
from ddp_operator.decide.attempt import ObservedAttempt
from ddp_operator.decide.conditions import Fact
from ddp_operator.decide.converge import LONGEST_HOLD
from ddp_operator.decide.hooks import Feature, Hooks, NodeHook, PodHook
from ddp_operator.decide.losses import LOOK_SECONDS
from ddp_operator.decide.queue_places import QueuePlace, locate
from ddp_operator.decide.state import (
    Decision,
    DeleteResource,
    FeatureAction,
    Observation,
    Problem,
    Remark,
    State,
    SuspendResource,
    Trouble,
    Verdict,
)
from ddp_operator.kube import services
from ddp_operator.kube.services import ServiceContext, prepare_services, run_service, start_services
from ddp_operator.reading.objects import view_children
from ddp_operator.reconcile.acting import PodPages
from tests.support.builders import NOW, child_job, child_pod, job, resource
from tests.support.decisions import RUNNING, run_pass
from tests.support.fake_cluster import ReconcilerHarness
from tests.support.fake_features import FakeService
from tests.support.queued_job import QueuedJob

GARBAGE: Any = [None, 7, "text", {7: "text"}, {"pod": None}, object()]


def fail(*_: Any) -> Any:
    raise ZeroDivisionError("a bug")


def answering(answer: Any) -> Callable[..., Any]:
    """Return a hook that returns an answer, or raises it."""

    def hook(*_: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return hook


def judging(judge: Callable[..., Any], wants: Callable[..., Any] = lambda _: True, name: str = "odd") -> Feature:
    return Feature(name, maturity="experimental", page="x.md", nodes=NodeHook(wants, judge))


def serving(**answers: Any) -> Hooks:
    return Hooks(services={"odd": FakeService(**answers), "good": FakeService(departures={"pod": "who"})})


@pytest.mark.parametrize("answer", [*GARBAGE[1:], ("text", True, True), ZeroDivisionError()])
def test_judge_that_fails_does_not_hide_others(answer: Any) -> None:
    good = judging(lambda *_: Trouble("ill", planned=False, leaves=True), name="good")
    odd = judging(fail if isinstance(answer, Exception) else lambda *_: answer)
    faults: dict[tuple[str, str], str] = {}
    hooks = Hooks((odd, good)).observe(job(), faults)
    assert hooks.judge_node({}) == Trouble("ill", planned=False, leaves=True)
    assert list(hooks.guard.describe()) == ["odd"]


@pytest.mark.parametrize("wants", [fail, lambda _: "yes", lambda _: None])
def test_feature_that_cannot_say_whether_it_reads_nodes_reads_none(wants: Any) -> None:
    hooks = Hooks((judging(fail, wants),)).observe(job(), {})
    assert not hooks.reads_nodes()
    assert list(hooks.guard.describe()) == ["odd"]


@pytest.mark.parametrize("answer", [*GARBAGE[1:], ZeroDivisionError()])
def test_departures_that_are_no_texts_are_left_out(answer: Any) -> None:
    hooks = serving(departures=answer).observe(job(), {})
    assert hooks.list_departures(Key("default", "train")) == {"pod": "who"}
    assert list(hooks.guard.describe()) == ["odd"]


@pytest.mark.parametrize("answer", [*GARBAGE[1:], {"uid": "text"}, ZeroDivisionError()])
def test_suspicions_that_are_none_are_left_out(answer: Any) -> None:
    hooks = serving(suspicions=answer).observe(job(), {})
    assert hooks.list_suspicions(Key("default", "train")) == {}
    assert list(hooks.guard.describe()) == ["odd"]


@pytest.mark.parametrize("answer", [*GARBAGE, {"node-a"}, frozenset({1}), ZeroDivisionError()])
def test_returned_nodes_that_are_no_names_are_left_out(answer: Any) -> None:
    hooks = serving(returned=answer).observe(job(), {})
    assert hooks.list_returned_nodes() == frozenset()
    assert list(hooks.guard.describe()) == ["odd"]


def test_returned_nodes_of_all_features_count() -> None:
    services = {name: FakeService(returned=frozenset({name})) for name in ("a", "b")}
    assert Hooks((), services).observe(job(), {}).list_returned_nodes() == {"a", "b"}


@pytest.mark.parametrize(
    "answer", [*GARBAGE[1:], {}, {"kind": "Pod", "metadata": {"name": "a"}}, {"kind": "Job", "metadata": {"name": "b"}}]
)
def test_child_is_created_as_it_was_if_addition_fails(answer: Any) -> None:
    manifest = {"kind": "Job", "metadata": {"name": "a"}}
    before = FAULTS.counts["feature odd"]
    assert serving(amended=answer).amend(manifest) is manifest
    assert FAULTS.counts["feature odd"] == before + 1


@pytest.mark.parametrize(
    "answer",
    [
        *GARBAGE[1:],
        Remark("fact"),  # type: ignore[arg-type]
        Remark(wait=math.nan),
        Remark(wait=-1),
        Remark(holds="yes"),  # type: ignore[arg-type]
        Remark(actions=(DeleteResource(),)),  # type: ignore[arg-type]
        Remark(actions=(FeatureAction("good", "of another"),)),
        ZeroDivisionError(),
    ],
)
def test_remark_of_another_kind_is_left_out(answer: Any) -> None:
    good = Remark(Fact("Fine", "False", "AllIsWell"), (SuspendResource(), FeatureAction("good", "x")), 5, holds=True)
    features = [
        Feature(name, maturity="experimental", page="x.md", review=hook)
        for name, hook in (("odd", answering(answer)), ("silent", lambda _: None), ("good", lambda _: good))
    ]
    hooks = Hooks(features).observe(job(), {})
    assert State(job(), Observation(), NOW, hooks=hooks).remarks == (good,)
    assert list(hooks.guard.describe()) == ["odd"]


@pytest.mark.parametrize("answer", [None, {}, Status(attempt="one"), ZeroDivisionError()])  # type: ignore[arg-type]
def test_record_of_another_kind_is_left_out(answer: Any) -> None:
    odd = Feature("odd", maturity="experimental", page="x.md", record=answering(answer))
    good = Feature("good", "beta", "x.md", record=lambda _, status: replace(status, job_name="from good"))
    hooks = Hooks((odd, good)).observe(job(), {})
    state = State(job(), Observation(), NOW)
    assert hooks.record(state, Status(attempt=3)) == Status(attempt=3, job_name="from good")
    assert list(hooks.guard.describe()) == ["odd"]


@pytest.mark.parametrize(
    "answer",
    [
        *GARBAGE[1:],
        Decision(Status(attempt="one")),  # type: ignore[arg-type]
        Decision(Status(), ("act",)),  # type: ignore[arg-type]
        Decision(Status(), requeue_after=math.nan),
        ZeroDivisionError("a bug"),
    ],
)
async def test_job_waits_for_feature_that_fails_to_prepare_it(answer: Any) -> None:
    def build(hook: Callable[..., Any]) -> Hooks:
        return Hooks((Feature("odd", maturity="experimental", page="x.md", prepare=hook),))

    harness = await ReconcilerHarness(hooks=build(answering(answer))).settle()
    assert harness.jobs() == []
    assert harness.state(c.ACCEPTED) == ("False", c.FEATURE_FAULT)
    harness.hooks = build(lambda *_: None)
    harness.restart_operator()
    await harness.settle()
    assert harness.jobs() == ["train-1"]


def test_fault_is_kept_until_hook_works() -> None:
    answers: list[Any] = [ZeroDivisionError("a bug"), None]

    def judge(*_: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    faults: dict[tuple[str, str], str] = {}
    hooks = Hooks((judging(judge),))
    hooks.observe(job(), faults).judge_node({})
    assert "a bug" in hooks.observe(job(), faults).guard.describe()["odd"], "a later pass reads no node"
    hooks.observe(job(), faults).judge_node({})
    assert faults == {}


def test_fault_of_judge_is_forgotten_when_job_needs_it_no_more() -> None:
    faults: dict[tuple[str, str], str] = {}
    Hooks((judging(fail),)).observe(job(), faults).judge_node({})
    assert faults
    Hooks((judging(fail, lambda _: False),)).observe(job(), faults).reads_nodes()
    assert faults == {}


async def test_job_trains_beside_feature_that_always_fails_and_reports_it() -> None:
    service = FakeService(ZeroDivisionError("a bug"), ZeroDivisionError("a bug"))
    service.note_status = fail  # type: ignore[method-assign]
    harness = ReconcilerHarness(hooks=Hooks((judging(fail),), {"moves": service}))

    async def node(name: str) -> Any:
        return {}

    harness.cluster.node = node  # type: ignore[method-assign]
    await harness.train()
    harness.clock.advance(LOOK_SECONDS)
    await harness.settle()
    assert (harness.status.phase, harness.status.attempt) == ("Running", 1)
    assert harness.state(c.FEATURES_WORK) == ("False", c.FEATURE_FAULT)
    message = harness.condition(c.FEATURES_WORK).message
    assert "odd: ZeroDivisionError: a bug (test_hooks.py:" in message
    assert "moves: ZeroDivisionError" in message
    assert harness.events.count(c.FEATURE_FAULT) == 1

    harness.hooks = Hooks((judging(lambda *_: None),))
    harness.restart_operator()
    harness.clock.advance(LOOK_SECONDS)
    await harness.settle()
    assert harness.state(c.FEATURES_WORK) == ("True", c.NO_FAULT)


def holding(remark: Callable[[], Remark | None], **answers: Any) -> Hooks:
    """Return a feature that has this remark about ended jobs only."""
    feature = Feature(
        "odd",
        maturity="experimental",
        page="x.md",
        conditions={"Done": "True"},
        review=lambda state: remark() if state.status.completion_time is not None else None,
    )
    return Hooks((feature,), {"odd": FakeService(**answers)})


async def end(harness: ReconcilerHarness) -> ReconcilerHarness:
    """End the job successfully; it may be deleted at once."""
    await harness.train()
    for index in (0, 1):
        harness.end_pod(index)
    return await harness.settle()


async def test_ended_job_stays_while_feature_holds_it_for_limited_time() -> None:
    fact = Fact("Done", "False", "NotDone", "soon")
    harness = ReconcilerHarness(hooks=holding(lambda: Remark(fact, holds=True)), ttlSecondsAfterFinished=0)
    await end(harness)
    assert harness.condition("Done").message == "soon"
    harness.clock.advance(LONGEST_HOLD.total_seconds() - 1)
    await harness.settle()
    assert harness.raw is not None
    harness.clock.advance(1)
    await harness.settle()
    assert harness.raw is None


async def test_condition_of_ended_job_is_written_before_its_deletion() -> None:
    fact = Fact("Done", "False", "NotDone")
    harness = ReconcilerHarness(hooks=holding(lambda: Remark(fact)), ttlSecondsAfterFinished=0)
    await end(harness)
    assert harness.raw is None
    assert "NotDone" in harness.events


@pytest.mark.parametrize("answer", [*GARBAGE[2:], math.nan, ZeroDivisionError(), TimeoutError(), AlreadyExists({})])
async def test_action_that_fails_ends_nothing_else(answer: Any) -> None:
    remark = Remark(actions=(FeatureAction("odd", "work"),))
    hooks = holding(lambda: remark, acted=answer)
    before = FAULTS.counts["feature odd"]
    harness = await end(ReconcilerHarness(hooks=hooks, cleanPodPolicy="All"))
    assert (harness.status.phase, harness.jobs()) == ("Succeeded", [])
    assert FAULTS.counts["feature odd"] > before


@pytest.mark.parametrize("answer", [*GARBAGE[1:], ZeroDivisionError()])
async def test_job_waits_while_check_of_its_start_has_fault(answer: Any) -> None:
    async def check_start(*_: Any) -> Any:
        return answering(answer)()

    feature = Feature("odd", maturity="experimental", page="x.md", check_start=check_start)
    harness = await ReconcilerHarness(hooks=Hooks((feature,))).settle()
    assert (harness.state("Accepted"), harness.jobs()) == (("False", "FeatureFault"), [])
    assert harness.status.phase == "Pending", "it starts without an edit"


async def test_check_of_start_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide_hooks, "SECONDS_TO_OBSERVE", 0.01)

    async def check_start(*_: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    feature = Feature("odd", maturity="experimental", page="x.md", check_start=check_start)
    harness = await ReconcilerHarness(hooks=Hooks((feature,))).settle()
    assert harness.state("Accepted") == ("False", "FeatureFault")


async def test_action_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide_hooks, "SECONDS_TO_ACT", 0.01)
    faults: dict[tuple[str, str], str] = {}
    hooks = Hooks(services={"odd": FakeService(acted=asyncio.get_running_loop().create_future())})
    assert await hooks.observe(job(), faults).act(FeatureAction("odd", "work"), Any) is None  # type: ignore[arg-type]
    assert "TimeoutError" in faults["odd", "act"]


async def test_refused_action_is_told_to_feature() -> None:
    refusals: list[str] = []

    def review(state: State) -> Remark | None:
        if state.status.completion_time is None:
            return None
        if state.refusal is not None:
            refusals.append(state.refusal.message)
        return Remark(actions=(FeatureAction("odd", "work"),))

    feature = Feature("odd", maturity="experimental", page="x.md", review=review)
    service = FakeService(acted=Refused("quota", reason="Forbidden"))
    before = FAULTS.counts["feature odd"]
    await end(ReconcilerHarness(hooks=Hooks((feature,), {"odd": service})))
    assert "quota" in refusals[0]
    assert FAULTS.counts["feature odd"] == before, "a refusal is no fault"


async def test_action_is_retried_after_error_of_api_server() -> None:
    service = FakeService(acted=ServerError("busy"))
    hooks = Hooks(services={"odd": service}).observe(job(), {})
    with pytest.raises(ServerError):
        await hooks.act(FeatureAction("odd", "work"), Any)  # type: ignore[arg-type]
    assert hooks.guard.describe() == {}


async def test_action_of_feature_without_service_is_left_out() -> None:
    assert await Hooks().observe(job(), {}).act(FeatureAction("odd", "work"), Any) is None  # type: ignore[arg-type]


def test_job_of_feature_and_its_pods_belong_to_no_attempt() -> None:
    made = child_job()
    made["metadata"] |= {"name": "train-history", "uid": "own"}
    pods = [child_pod(), child_pod(owner="own"), child_pod(owner="deleted"), child_pod(owner="former")]
    for pod in pods[1:3]:
        pod["metadata"]["ownerReferences"][0]["name"] = "train-history"
    seen = view_children(job(), Snapshot({}, jobs=(child_job(), made), pods=tuple(pods)))
    assert [view.name for view in seen.jobs] == ["train-1"]
    assert [view.name for view in seen.feature_jobs] == ["train-history"]
    assert (len(seen.pods), len(seen.feature_pods)) == (1, 1)
    assert [pod.raw for pod in seen.orphans] == pods[3:]


async def test_job_without_fault_has_no_condition_about_features() -> None:
    harness = ReconcilerHarness(hooks=serving())
    await harness.train()
    assert harness.status.condition(c.FEATURES_WORK) is None


PLACE = QueuePlace(QueueStatus(cluster_queue="gpu", position=2, of=3))


def placing(place: Any) -> QueuedJob:
    """Return a job that waits in a queue, of which a feature with this answer and one that works know the place."""
    return QueuedJob({"odd": FakeService(place=place), "good": FakeService(place=PLACE)})


async def wait_for_ever() -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        *((garbage, "TypeError: locate returned ") for garbage in GARBAGE[1:]),
        (QueuePlace("first"), "TypeError: locate returned QueuePlace"),  # type: ignore[arg-type]
        (QueuePlace(QueueStatus(cluster_queue="gpu", position="first", of=1)), "ValidationError: "),  # type: ignore[arg-type]
        (QueuePlace(problem=("a", "b")), "TypeError: locate returned QueuePlace"),  # type: ignore[arg-type]
        (QueuePlace(problem=Problem(c.INADMISSIBLE, 7)), "TypeError: locate returned QueuePlace"),  # type: ignore[arg-type]
        (ZeroDivisionError("a bug"), "ZeroDivisionError: a bug (fake_features.py:"),
        (TimeoutError("of its own"), "TimeoutError: of its own (fake_features.py:"),
        (asyncio.CancelledError(), "RuntimeError: locate was cancelled"),
        (wait_for_ever, "TimeoutError: locate takes more than 0.05 s"),
    ],
)
async def test_job_waits_in_queue_beside_feature_that_cannot_tell_its_place(
    answer: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_operator.decide.queue_places.SECONDS_TO_LOCATE", 0.05)
    queued = placing(answer)
    harness = await queued.start()
    assert harness.state(c.SCHEDULED) == ("False", c.QUOTA_PENDING)
    assert harness.state(c.FEATURES_WORK) == ("False", c.FEATURE_FAULT)
    assert f"odd: {fault}" in harness.condition(c.FEATURES_WORK).message
    assert "good" not in harness.condition(c.FEATURES_WORK).message
    assert harness.status.queue == PLACE.queue
    await queued.admit()
    await queued.wait(60)
    assert harness.state(c.FEATURES_WORK) == ("True", c.NO_FAULT), "the hook is no longer called"
    assert harness.status.queue is None


def observing(answer: Any, explain: Any = None) -> Hooks:
    """Return a feature that observes this of the pods, and one that works."""

    async def observe(pages: PodPages, former: Any) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return await answer() if callable(answer) else answer

    async def count(pages: PodPages, former: int | None) -> int:
        return (former or 0) + 1

    odd = Feature("odd", maturity="experimental", page="x.md", pods=PodHook(str, observe), explain=explain)
    return Hooks((odd, Feature("good", maturity="stable", page="x.md", pods=PodHook(int, count))))


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        *((garbage, "TypeError: observe returned ") for garbage in (7, {}, object())),
        (ZeroDivisionError("a bug"), "ZeroDivisionError: a bug (test_hooks.py:"),
        (asyncio.CancelledError(), "RuntimeError: observe was cancelled"),
        (wait_for_ever, "TimeoutError: observe takes more than 0.05 s"),
    ],
)
async def test_job_trains_beside_feature_that_fails_to_observe_its_pods(
    answer: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_operator.decide.hooks.SECONDS_TO_OBSERVE", 0.05)
    harness = ReconcilerHarness(hooks=observing(answer))
    await harness.train()
    for _ in range(3):
        harness.clock.advance(4)
        await harness.settle()
    assert (harness.status.phase, harness.state(c.PROGRESSING)) == ("Running", ("True", c.TRAINING))
    assert f"odd: {fault}" in harness.condition(c.FEATURES_WORK).message
    assert harness.events.count(c.FEATURE_FAULT) == 1, "it is not called while the page of pod 0 is not due"


async def test_feature_gets_what_it_has_observed_before() -> None:
    hooks = observing("text").observe(job(), {})
    pages: Any = object()
    first = await hooks.observe_pods(pages, {})
    assert first == {"odd": "text", "good": 1}
    assert await hooks.observe_pods(pages, first) == {"odd": "text", "good": 2}


@pytest.mark.parametrize("answer", [None, 7, Fact("Other", "True", "R"), Fact(c.PROGRESSING, "Perhaps", "R")])  # type: ignore[arg-type]
async def test_condition_is_the_kernels_if_explanation_fails(answer: Any) -> None:
    good = Feature("good", "beta", "x.md", explain=lambda _, fact: dataclasses.replace(fact, message="why"))
    for explain in (lambda *_: answer, fail):
        odd = Feature("odd", maturity="experimental", page="x.md", explain=explain)
        hooks = Hooks((odd, good)).observe(job(), {})
        fact = Fact(c.PROGRESSING, "True", c.TRAINING)
        assert hooks.explain(cast(ObservedAttempt, None), fact) == dataclasses.replace(fact, message="why")
        assert list(hooks.guard.describe()) == ["odd"]


@pytest.mark.parametrize("error", [ClusterError("no response"), Refused("forbidden", reason="Forbidden")])
async def test_place_that_cluster_does_not_tell_is_no_fault(error: Exception) -> None:
    harness = await placing(error).start()
    assert harness.status.queue == PLACE.queue
    assert harness.status.condition(c.FEATURES_WORK) is None


async def test_job_waits_without_features() -> None:
    driver = QueuedJob()
    driver.harness.hooks = Hooks()
    driver.harness.restart_operator()
    harness = await driver.start()
    assert harness.state(c.SCHEDULED) == ("False", c.QUOTA_PENDING)
    assert harness.status.queue is None


PLACED = "example.com/elsewhere"
COPIED = {constants.KUEUE_ORIGIN_LABEL: "multikueue", constants.KUEUE_PREBUILT_WORKLOAD: "theirs"}


def admit_copy(job: DDPTrainingJob) -> DDPTrainingJob:
    return dataclasses.replace(job, labels={})


def copied(**placed: Any) -> ReconcilerHarness:
    """Return a job that was copied from another cluster, and a feature that answers so about it."""
    item = resource()
    item["metadata"]["labels"] = COPIED
    return ReconcilerHarness(item, Hooks(services={"odd": FakeService(placed=placed)}))


@pytest.mark.parametrize("answer", [*GARBAGE, Status(), ZeroDivisionError(), TimeoutError()])
async def test_copied_job_waits_for_feature_that_fails_to_admit_it(answer: Any) -> None:
    harness = copied(admit=lambda _: answer) if not isinstance(answer, Exception) else copied(admit=answer)
    await harness.settle()
    assert harness.jobs() == []
    assert harness.state(c.ACCEPTED) == ("False", c.FEATURE_FAULT)
    assert "the feature odd does not work" in harness.condition(c.ACCEPTED).message
    harness.hooks.services["odd"].placed = {"admit": admit_copy}  # type: ignore[attr-defined]
    await harness.settle()
    assert len(harness.jobs()) == 1


async def test_copied_job_waits_without_feature_that_admits_it() -> None:
    harness = copied()
    await harness.settle()
    assert harness.jobs() == []
    assert "no feature of this operator admits jobs" in harness.condition(c.ACCEPTED).message


async def test_copied_job_waits_if_quota_is_forbidden_and_that_is_no_fault() -> None:
    harness = copied(admit=Refused("no", reason="Forbidden"))
    with pytest.raises(ClusterError):
        await harness.reconcile()
    assert harness.jobs() == []


@pytest.mark.parametrize("answer", [*GARBAGE[1:], math.nan, -1.0, ZeroDivisionError()])
async def test_copied_job_trains_beside_feature_that_fails_to_report_it(answer: Any) -> None:
    harness = copied(admit=admit_copy, report_pass=answer)
    await harness.train()
    assert harness.status.phase == "Running"
    assert harness.requeue is not None


@pytest.mark.parametrize("hook", ["follow", "enqueue"])
@pytest.mark.parametrize("answer", [*GARBAGE[2:], math.nan, ZeroDivisionError()])
async def test_job_elsewhere_waits_for_feature_that_fails(hook: str, answer: Any) -> None:
    service = FakeService(placed={hook: answer}, manages=PLACED)
    harness = ReconcilerHarness(hooks=Hooks(services={"odd": service}), managedBy=PLACED)
    await harness.settle()
    assert harness.jobs() == []
    assert harness.state(c.ACCEPTED) == ("False", c.FEATURE_FAULT)


async def test_job_of_other_controller_is_left_alone() -> None:
    service = FakeService(placed={"follow": ZeroDivisionError()}, manages=PLACED)
    harness = ReconcilerHarness(hooks=Hooks(services={"odd": service}), managedBy="example.com/another")
    await harness.settle()
    assert harness.jobs() == []
    assert harness.status == Status()


async def test_pass_that_is_cancelled_in_a_hook_ends() -> None:
    called = asyncio.Event()

    async def place() -> Any:
        called.set()
        await asyncio.Event().wait()

    faults: dict[tuple[str, str], str] = {}
    hooks = Hooks(services={"slow": FakeService(place=place)}).observe(job(), faults)
    task = asyncio.create_task(locate(hooks, {}, None))
    await called.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert faults == {}


def build_context(**more: Any) -> ServiceContext:
    return ServiceContext(None, None, (), lambda key: None, **more)  # type: ignore[arg-type]


def test_service_that_cannot_start_is_left_out() -> None:
    features = [
        Feature("odd", maturity="experimental", page="x.md", start=fail),
        Feature("good", maturity="stable", page="x.md", start=lambda context: FakeService()),
        judging(fail),
    ]
    assert list(start_services(features, {}, build_context)) == ["good"]


class Slow(FakeService):
    """A service that never gets ready, and whose work ends at once."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.third_run = asyncio.Event()

    async def prepare(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()

    async def run(self) -> None:
        """Fail, then end."""
        self.runs += 1
        if self.runs == 1:
            raise ZeroDivisionError
        if self.runs == 3:
            self.third_run.set()


class Unready(FakeService):
    """A service that fails to get ready."""

    async def prepare(self) -> None:
        """Fail."""
        raise ZeroDivisionError


async def test_jobs_wait_for_services_for_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "SECONDS_TO_PREPARE", 0.01)
    before = FAULTS.counts["feature unready"], FAULTS.counts["features"]
    await prepare_services({"slow": Slow(), "unready": Unready()})
    assert (FAULTS.counts["feature unready"], FAULTS.counts["features"]) == (before[0] + 1, before[1] + 1)


async def test_service_that_ends_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "PAUSE", 0.001)
    slow = Slow()
    task = asyncio.create_task(run_service("slow", slow))
    await slow.third_run.wait()
    assert not task.done()
    task.cancel()


@pytest.mark.parametrize("answer", [7, Verdict("R", None), Verdict("R", "m", "cause"), ZeroDivisionError()])  # type: ignore[arg-type]
async def test_job_trains_although_feature_judges_it_badly(answer: Any) -> None:
    feature = Feature("odd", maturity="experimental", page="x.md", judge=answering(answer))
    harness = await end(ReconcilerHarness(hooks=Hooks((feature,))))
    assert (harness.status.phase, harness.status.attempt) == ("Succeeded", 1)
    assert harness.events.count(c.FEATURE_FAULT) == 1


@pytest.mark.parametrize("cause", [None, LastFailure(attempt=1, category="OOM")])
def test_verdict_ends_attempt(cause: LastFailure | None) -> None:
    verdict = Verdict("Objection", "why", cause)
    feature = Feature("judging", "stable", "x.md", judge=lambda _, has_succeeded: None if has_succeeded else verdict)
    status = run_pass(*RUNNING, hooks=Hooks((feature,))).status
    assert (status.phase, status.attempt, status.counts.counted) == (
        ("Failed", 1, 0) if cause is None else ("Restarting", 2, 1)
    )
    final = dataclasses.replace(feature, judge=lambda *_: dataclasses.replace(verdict, is_final=True))
    assert run_pass(*RUNNING, hooks=Hooks((final,))).status.phase == "Failed"


async def test_success_to_which_feature_objects_is_failure() -> None:
    objection = Verdict("Objection", "why")
    feature = Feature("judging", "stable", "x.md", judge=lambda _, has_succeeded: objection if has_succeeded else None)
    harness = await end(ReconcilerHarness(hooks=Hooks((feature,))))
    assert harness.state("Failed") == ("True", "Objection")


@pytest.mark.parametrize("answer", [7, Fact("Odd", "Perhaps", "R"), ZeroDivisionError()])  # type: ignore[arg-type]
async def test_job_succeeds_although_feature_concludes_badly(answer: Any) -> None:
    odd = Feature("odd", maturity="experimental", page="x.md", conclude=answering(answer))
    good = Feature("good", "stable", "x.md", conclude=lambda *_: Fact("Good", "True", "AllIsWell"))
    harness = await end(ReconcilerHarness(hooks=Hooks((odd, good))))
    assert harness.status.phase == "Succeeded"
    assert harness.state("Good") == ("True", "AllIsWell")
    assert harness.status.condition("Odd") is None


@pytest.mark.parametrize("answer", [None, Status(attempt="one"), ZeroDivisionError()])  # type: ignore[arg-type]
def test_account_of_another_kind_is_left_out(answer: Any) -> None:
    odd = Feature("odd", maturity="experimental", page="x.md", account=answering(answer))
    good = Feature("good", "beta", "x.md", account=lambda _, status: replace(status, job_name="from good"))
    decision = run_pass(*RUNNING, hooks=Hooks((odd, good)))
    assert (decision.status.phase, decision.status.job_name) == ("Running", "from good")


@pytest.mark.parametrize("answer", [None, Status(attempt="one"), ZeroDivisionError()])  # type: ignore[arg-type]
def test_extension_of_another_kind_is_left_out(answer: Any) -> None:
    odd = Feature("odd", maturity="experimental", page="x.md", extend=answering(answer))
    good = Feature("good", "beta", "x.md", extend=lambda status, _: replace(status, job_name="from good"))
    before = FAULTS.counts["feature odd"]
    assert Hooks((odd, good)).extend(Key("a", "b"), Status(attempt=3), NOW) == Status(attempt=3, job_name="from good")
    assert FAULTS.counts["feature odd"] == before + 1
