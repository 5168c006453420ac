"""Jobs of `ddp dev`: their present run in the status, held pods, their release and their loss."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ddp_operator.api.parse import parse_status
from ddp_operator.api.status import DevStatus, Progress, RestartCounts, Status
from ddp_operator.decide.conditions import find_reason
from ddp_operator.decide.converge import compute_scrape_interval
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.job_events import list_transition_events
from ddp_operator.decide.state import Decision
from ddp_operator.features.dev import FEATURE
from ddp_pod.contract.failure_table import CATEGORIES
from tests.support.builders import NOW, Json, child_job, child_pod, last_words, page
from tests.support.decisions import RUNNING, STARTED, present, read_condition, read_state
from tests.support.decisions import run_pass as run_pass_of_kernel
from tests.support.observing import Answers, Look

BEGAN = NOW.timestamp()
OOM = {"category": "OOM", "podIndex": 1, "rank": 1, "message": "CUDA out of memory", "time": BEGAN + 1}
run_pass = partial(run_pass_of_kernel, hooks=Hooks((FEATURE,)))


def report(run: int = 1, result: str = "", *, held: bool | None = None, **values: Any) -> str:
    """Return the report of pod 0 during a run, or after its end with ``result``."""
    held = bool(result) if held is None else held
    dev: Json = {"run": run, "digest": f"{run}" * 64, "started": BEGAN, "result": result}
    if held:
        dev |= {"ended": BEGAN + 5, "releaseAt": BEGAN + 1805}
    if result == "Failed":
        dev["failure"] = values.pop("failure", OOM)
    return page(phase="Held" if held else "Running", dev=dev, **{"step": 3, "steps": 3} | values)


def follow(*reports: str, status: Status = STARTED, pods: Any = RUNNING, **spec: Any) -> Status:
    """Return the status after passes that read these reports, each one twice."""
    for text in (text for text in reports for _ in range(2)):
        status = run_pass(*pods, status=status, text=text, seconds=10, dev={}, **spec).status
    return status


def read_dev(status: Status) -> DevStatus:
    return present(status.dev)


class TestHeld:
    @pytest.mark.parametrize(
        ("result", "reason", "facts"),
        [
            ("Succeeded", "Succeeded", ["run 1 succeeded"]),
            ("Stopped", "Stopped", ["run 1 was stopped"]),
            ("Failed", "OOM", ["run 1 failed: OOM", "rank 1", "CUDA out of memory"]),
        ],
    )
    def test_job_states_end_of_run_and_release(self, result: str, reason: str, facts: list[str]) -> None:
        status = follow(report(1), report(1, result))
        progressing = present(status.condition("Progressing"))
        assert (status.phase, status.reason, progressing.status, progressing.reason) == (
            "Held",
            reason,
            "False",
            "Held",
        )
        for fact in (*facts, "until 2026-11-20T12:30:05Z", "`ddp rerun train`", "`ddp release train`"):
            assert fact in progressing.message
        assert read_dev(status).release_time is not None
        assert (status.is_true("Rendezvoused"), present(status.progress).step) == (True, 3)

    @pytest.mark.parametrize(
        ("text", "observed"),
        [
            ("", {}),
            ("", {"page_requested": True, "page_lost_since": NOW}),
            (report(1, "Succeeded", stalled=900.0, heartbeat_age=900.0), {}),
        ],
        ids=["no page is due", "page is lost", "stale stall"],
    )
    def test_held_job_neither_stalls_nor_ends(self, text: str, observed: Any) -> None:
        status = follow(report(1), report(1, "Succeeded"))
        decision = run_pass(*RUNNING, status=status, text=text, observed=observed, seconds=900, dev={})
        assert (decision.status.phase, decision.status.attempt) == ("Held", 1)
        assert read_dev(decision.status) == read_dev(status)

    def test_deadline_ends_held_job(self) -> None:
        status = follow(report(1), report(1, "Succeeded"))
        decision = run_pass(*RUNNING, status=status, seconds=100, dev={}, activeDeadlineSeconds=50)
        assert (decision.status.phase, read_dev(decision.status).release_time) == ("Failed", None)

    def test_hold_is_one_event(self) -> None:
        trained = follow(report(1))
        held = follow(report(1, "Succeeded"), status=trained)
        assert [event.reason for event in list_transition_events(trained, held)] == ["Held"]
        assert list_transition_events(held, follow(report(1, "Succeeded"), status=held)) == ()

    @pytest.mark.parametrize(("text", "interval"), [(report(1), 1.0), (report(1, "Failed"), 1.0)])
    def test_report_is_read_each_second_while_next_run_may_start(self, text: str, interval: float) -> None:
        assert compute_scrape_interval(follow(text), NOW, 10.0) == interval


class TestNextRun:
    def test_measurements_restart(self) -> None:
        before = follow(report(1, restarts=2, step=7), report(1, "Failed", restarts=2, step=7))
        before = replace(before, points=("time", "1", "2"))
        status = follow(report(2, step=1, steps=1), status=before)
        assert (status.phase, status.last_failure, status.points) == ("Running", None, ())
        assert (present(status.progress).step, status.counts.all, status.counts.in_place) == (1, 0, 0)
        assert read_dev(before).completion_time == NOW + timedelta(seconds=5)
        assert (read_dev(status).run, read_dev(status).last_run) == (2, 1)

    def test_restarts_of_next_run_are_counted_from_zero(self) -> None:
        before = STARTED.remember(restarts=RestartCounts(replaced=3))
        status = follow(report(1, restarts=2), report(2), report(2, restarts=1), status=before)
        assert (status.counts.in_place, status.counts.replaced, status.counts.all) == (1, 3, 1)

    @pytest.mark.parametrize(
        ("reports", "numbers"),
        [
            ((report(1),), (1, 0)),
            ((report(1), report(4)), (4, 1)),
            ((report(1), report(3), report(1)), (1, 3)),
            ((report(3), report(0, held=True)), (0, 3)),
            ((report(3, "Succeeded"), report(0, held=True), report(4)), (4, 3)),
        ],
    )
    def test_highest_number_of_former_runs_is_kept(self, reports: tuple[str, ...], numbers: tuple[int, int]) -> None:
        dev = read_dev(follow(*reports))
        assert (dev.run, dev.last_run) == numbers

    def test_runs_in_the_status_of_a_former_version_are_dropped(self) -> None:
        stored = msgspec.to_builtins(follow(report(2)))
        stored["dev"]["runs"] = [{"run": 1, "result": "Failed", "failure": {"attempt": 1, "category": "OOM"}}]
        status = parse_status({"status": stored})
        assert status == follow(report(2))

    @pytest.mark.parametrize(
        "dev",
        [
            {"run": -1, "result": "Won", "started": 1e300, "digest": 5},
            {"run": 2**40, "failure": {"category": "Nonsense"}},
            {"run": 3, "result": "Failed", "failure": {"podIndex": 10**9, "traceback": "x" * 10**5}},
            "dev",
            [],
        ],
    )
    def test_any_report_of_a_pod_gives_a_valid_status(self, dev: Any) -> None:
        status = follow(report(2), page(phase="Held", dev=dev))
        raw = json.loads(msgspec.json.encode(status))
        assert msgspec.convert(raw, Status) == status
        assert len(msgspec.json.encode(status)) < 16_384


class TestRelease:
    @pytest.mark.parametrize("category", sorted(CATEGORIES))
    @pytest.mark.parametrize("is_known", [True, False])
    def test_failed_run_fails_job_without_restart(self, category: str, is_known: bool) -> None:
        failure = {"category": category, "podIndex": 1, "rank": 1, "message": "why", "time": BEGAN}
        status = follow(report(1), report(1, "Failed", failure=failure)) if is_known else follow(report(1))
        words = [last_words(category, podIndex=index, secondary=index == 0, rank=index) for index in (0, 1)]
        ends = [child_pod(index, "Failed", code=81, message=words[index]) for index in (0, 1)]
        decision = run_pass(*ends, status=status, seconds=900, dev={})
        assert (decision.status.phase, decision.status.attempt, decision.status.reason) == ("Failed", 1, category)
        assert present(decision.status.last_failure).rank == 1

    def test_first_pod_that_ends_decides_if_run_is_known(self) -> None:
        status = follow(report(1), report(1, "Failed"))
        words = last_words("Network", secondary=True)
        ended = child_pod(0, "Failed", code=81, message=words)
        decision = run_pass(ended, child_pod(1), status=status, seconds=900, dev={})
        assert (decision.status.phase, decision.status.reason) == ("Failed", "OOM")

    def test_loss_of_pod_during_run_is_not_why_released_job_ends(self) -> None:
        former = child_pod(1, "Failed", code=85, disrupted=True, suffix="lost")
        words = last_words("Network", secondary=True)
        ends = [child_pod(index, "Failed", code=81, message=words, suffix="new") for index in (0, 1)]
        decision = run_pass(former, *ends, status=follow(report(1)), seconds=60, dev={})
        assert (decision.status.phase, decision.status.counts.total) == ("Failed", 0)

    @pytest.mark.parametrize("reports", [(report(1),), (report(1), report(1, "Stopped"))], ids=["running", "held"])
    def test_stopped_run_fails_job_without_blame(self, reports: tuple[str, ...]) -> None:
        words = last_words("Preempted", rank=None, localRank=None, exitCode=85)
        ends = [child_pod(index, "Failed", code=81, message=words) for index in (0, 1)]
        failure = present(run_pass(*ends, status=follow(*reports), seconds=60, dev={}).status.last_failure)
        assert (failure.category, failure.remedy) == ("UserError", "")
        assert "a user stopped the last run" in failure.message

    def test_success_of_last_run_succeeds(self) -> None:
        ends = [child_pod(index, "Succeeded", message=last_words()) for index in (0, 1)]
        jobs = [child_job(conditions={"Complete": ""})]
        status = run_pass(*ends, jobs=jobs, status=follow(report(1), report(1, "Succeeded")), dev={}).status
        dev = read_dev(status)
        assert (status.phase, dev.release_time, dev.completion_time) == ("Succeeded", None, NOW + timedelta(seconds=5))


class TestLostPods:
    @pytest.mark.parametrize("lost", [0, 1])
    @pytest.mark.parametrize("reason", [True, "DeletionByTaintManager"], ids=["evicted", "with its node"])
    @pytest.mark.parametrize("reports", [(report(2),), (report(2), report(2, "Failed"))], ids=["running", "held"])
    def test_one_is_replaced_in_its_job(self, lost: int, reason: Any, reports: tuple[str, ...]) -> None:
        pods = [child_pod(1 - lost), child_pod(lost, "Failed", code=85, disrupted=reason)]
        decision = run_pass(*pods, status=follow(*reports), seconds=20, dev={}, recovery={"maxRestarts": 0})
        assert (decision.status.phase, decision.status.attempt) == ("Restarting", 1)
        assert read_dev(decision.status).release_time is None
        again = [child_pod(1 - lost), child_pod(lost, suffix="new")]
        status = follow(*reports, status=decision.status, pods=again)
        phase = "Held" if len(reports) == 2 else "Running"
        assert (status.phase, read_dev(status).run, read_dev(status).last_run) == (phase, 2, 0)

    @pytest.mark.parametrize(
        ("reports", "run", "last_run", "failure"),
        [
            ((report(1),), 1, 0, "Preempted"),
            ((report(1, "Failed"),), 0, 1, "Preempted"),
            ((report(1), report(2, restarts=2)), 0, 2, "Preempted"),
        ],
        ids=["first run starts again", "ended first run", "later run"],
    )
    def test_code_of_runs_is_lost_with_all(
        self, reports: tuple[str, ...], run: int, last_run: int, failure: str
    ) -> None:
        lost = [child_pod(index, disrupted=True) for index in (0, 1)]
        status = run_pass(*lost, status=follow(*reports), seconds=20, dev={}).status
        assert (status.attempt, status.counts.total, read_dev(status).run) == (2, 1, run)
        assert (read_dev(status).last_run, present(status.last_failure).category) == (last_run, failure)
        assert status.counts.counted <= status.counts.total + status.counts.in_place

    @pytest.mark.parametrize(("reason", "category"), [("OOMKilled", "OOM"), ("Error", "Killed")])
    def test_killed_pod_is_replaced_and_explains_end_of_run(self, reason: str, category: str) -> None:
        killed = child_pod(1, "Failed", code=137, reason=reason)
        decision = run_pass(child_pod(0), killed, status=follow(report(2)), seconds=20, dev={})
        assert (decision.status.phase, decision.status.attempt) == ("Restarting", 1)
        symptom = {"category": "Network", "podIndex": 0, "message": "lost a peer", "time": BEGAN + 1}
        again = [child_pod(0), child_pod(1, suffix="new")]
        held = follow(report(2, "Failed", failure=symptom), status=decision.status, pods=again)
        assert (held.phase, held.reason, present(held.last_failure).category) == ("Held", category, category)
        twice = [child_pod(0), child_pod(1, "Failed", code=137, reason=reason, suffix="new")]
        status = run_pass(*twice, status=held, seconds=30, dev={}).status
        assert (status.attempt, read_dev(status).run) == (2, 0), "a run may kill its pods again and again"

    @pytest.mark.parametrize("reports", [(report(1),), (report(1), report(2))], ids=["first run", "second run"])
    def test_single_pod_that_is_killed_ends_its_run(self, reports: tuple[str, ...]) -> None:
        options: Any = {"nodes": 1, "jobs": [child_job(nodes=1)], "recovery": {"maxRestarts": 0}}
        before = follow(*reports, pods=[child_pod(0)], status=replace(STARTED).remember(nodes=1), **options)
        options["dev"] = {}
        killed = child_pod(0, "Failed", code=137, reason="OOMKilled")
        status = run_pass(killed, status=before, seconds=20, **options).status
        dev = read_dev(status)
        assert (status.attempt, status.counts.counted, dev.run, dev.lost_runs) == (2, 0, 0, len(reports))
        assert present(status.last_failure).category == "OOM"
        options["jobs"] = [child_job(2, nodes=1)]
        held = run_pass(child_pod(0, attempt=2), status=status, text=report(0, held=True), seconds=30, **options)
        message = read_condition(held, "Progressing").message
        assert f"the code of run {len(reports)} was lost" in message
        assert "the last failure: OOM" in message
        assert "`ddp rerun train`" in message

    def test_new_pods_without_code_are_held_and_job_explains_it(self) -> None:
        status = (
            Status(
                attempt=2,
                job_name="train-2",
                start_time=NOW,
                dev=DevStatus(last_run=3),
            )
            .remember(nodes=2)
            .remember(restarts=RestartCounts(total=1, free=1))
        )
        pods = [child_pod(index, attempt=2) for index in (0, 1)]
        decision = run_pass(*pods, jobs=[child_job(2)], status=status, text=report(0, held=True), dev={})
        assert (decision.status.phase, read_state(decision, "Restarting")) == ("Held", ("False", "NotRestarting"))
        message = read_condition(decision, "Progressing").message
        assert "the code of run 3 was lost" in message
        assert "have no code" in message

    @pytest.mark.parametrize("labels", [None, {"kueue.x-k8s.io/queue-name": "q"}], ids=["suspended", "in a queue"])
    def test_held_job_is_suspended_as_any_other(self, labels: Any) -> None:
        held = follow(report(1), report(2, "Succeeded"))
        options: Any = {"dev": {}, "labels": labels, "suspend": True}
        stopping = [child_pod(index, deleting=True, grace=30) for index in (0, 1)]
        status = run_pass(*stopping, status=held, seconds=20, **options).status
        status = run_pass(status=status, jobs=[child_job(suspend=True)], seconds=40, **options).status
        assert (status.phase, status.attempt, read_dev(status).release_time) == ("Suspended", 1, None)
        again = [child_pod(index, suffix="again", age=0) for index in (0, 1)]
        status = follow("", report(1), status=status, pods=again, labels=labels)
        assert (status.phase, status.attempt, read_dev(status).run) == ("Running", 1, 1)
        assert read_dev(status).last_run == 2

    def test_job_that_runs_its_own_code_again_states_it(self) -> None:
        status = follow(report(1), report(2), report(1))
        assert (status.phase, read_dev(status).run, read_dev(status).last_number) == ("Running", 1, 2)
        assert "the code of run 2 was lost" in present(status.condition("Progressing")).message


def test_reason_of_a_job_is_that_of_its_present_run() -> None:
    status = follow(report(1, "Failed"), report(2, "Succeeded"))
    assert find_reason(status) == "Succeeded"


def test_decision_about_held_job_is_idempotent() -> None:
    def decide_again(status: Status) -> Decision:
        return run_pass(*RUNNING, status=status, text=report(1, "Failed"), seconds=40, dev={})

    first = decide_again(follow(report(1), report(1, "Failed"))).status
    assert decide_again(first).status == first
    assert first.progress == replace(present(first.progress), eta=None) != Progress()


@pytest.mark.parametrize(("spec", "run"), [({}, None), ({"dev": {}}, 3)])
async def test_only_pods_of_job_with_spec_dev_report_runs(spec: dict[str, Any], run: int | None) -> None:
    look = Look(Answers(pod0=page(phase="Held", dev={"run": 3})))
    observed = present((await look.at(child_pod(0), child_pod(1), seconds=60, spec=spec)).page)
    assert (observed.dev.run if observed.dev else None) == run
    assert observed.is_held is (run is not None)
