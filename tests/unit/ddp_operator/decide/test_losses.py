"""Lost pods and nodes: what is declared failed, replaced in its Job, or leads to a new attempt."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import LastRestart, Nodes, Progress, RestartCounts, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.decide import decide
from ddp_operator.decide.diagnosis import list_restart_failures
from ddp_operator.decide.losses import (
    MAX_NODES,
    compute_next_check,
    find_lost_pods,
    list_nodes_to_inspect,
)
from ddp_operator.decide.state import CreatePod, Decision, FailPod, State, SuspendJob, Suspicion
from ddp_operator.decide.views import NodeView
from tests.support.builders import NOW, child_job, child_pod, decode, job, last_words, observe, page
from tests.support.decisions import STARTED, present, run_pass

LATER = NOW + timedelta(seconds=9)
JOB = child_job(awaits_peers=True, status={"startTime": "2026-11-20T11:00:00Z"})
LOST = child_pod(1, "Failed", code=85, deleting=True, disrupted="EvictionByEvictionAPI")


def known(kind: str, reason: str, **changes: Any) -> Status:
    return replace(STARTED, conditions=c.merge_conditions((), [c.Fact(kind, "True", reason)], NOW, 1), **changes)


MET = known(c.RENDEZVOUSED, c.ALL_RANKS_JOINED)
REPLACING = known(c.RESTARTING, c.POD_REPLACEMENT).remember(restarts=RestartCounts(replaced=1))


def run(*pods: Any, raw_job: Any = JOB, now: datetime = NOW, **more: Any) -> Decision:
    return run_pass(*pods, jobs=[raw_job], seconds=(now - NOW).total_seconds(), **({"status": MET} | more))


def created(decision: Decision) -> list[CreatePod]:
    return [action for action in decision.actions if isinstance(action, CreatePod)]


@pytest.mark.parametrize(
    ("lost", "category"),
    [(LOST, "Preempted"), (child_pod(1, deleting=True, grace=30), "PodDeleted")],
    ids=["ended", "still saves"],
)
def test_disrupted_pod_is_reported_and_not_counted(lost: Any, category: str) -> None:
    decision = run(child_pod(0), lost)
    assert (decision.status.attempt, decision.status.phase, created(decision)) == (1, "Restarting", [])
    assert decision.status.counts == RestartCounts(replaced=1)
    failure = decision.status.last_failure
    last = decision.status.last_restart
    assert failure is not None
    assert (failure.category, failure.pod) == (category, "train-1-1-abcde")
    assert last is not None
    assert last.level == "ReplacedPod"
    expected = next(condition.message for condition in decision.status.conditions if condition.type == c.RESTARTING)
    assert expected.startswith(
        f"lost pod replaced, not counted: {category} (pod train-1-1-abcde, node node-a): the pod was"
    )


def test_ended_pod_and_second_lost_pod_are_replaced() -> None:
    assert created(run(child_pod(0), child_pod(1, deleting=True, grace=30), status=REPLACING)) == []
    assert created(run(child_pod(0), LOST, status=REPLACING)) == [CreatePod("train-1", 1, 1)]
    assert created(run(LOST, status=REPLACING)) == [CreatePod("train-1", index, 1) for index in (0, 1)]


def test_lost_pod_of_operators_gang_is_replaced() -> None:
    gang = {"spec": {"schedulingGroup": {"podGroupName": "train-1"}}}
    grouped = child_job(awaits_peers=True, gang="train-1", status=JOB["status"])
    decision = run(child_pod(0, **gang), LOST, raw_job=grouped)
    assert (decision.status.attempt, decision.status.counts.replaced) == (1, 1)
    following = run(child_pod(0, **gang), LOST, status=decision.status, raw_job=grouped)
    assert created(following) == [CreatePod("train-1", 1, 1)]


@pytest.mark.parametrize(
    ("pods", "replaced"),
    [
        ((child_pod(0), LOST), [1]),
        ((child_pod(0), child_pod(1, deleting=True, grace=30), child_pod(1, "Pending", suffix="next")), []),
        ((child_pod(0, deleting=True, grace=30), LOST), None),
        ((child_pod(0), child_pod(1, "Failed", code=137)), None),
        ((child_pod(0), child_pod(1, deleting=True, at=NOW - timedelta(seconds=5))), None),
    ],
    ids=["ended", "has a successor", "no peer", "killed soon", "deleted before admission"],
)
def test_pod_of_queued_job_lost_before_training_is_replaced_beside_peer(pods: Any, replaced: list[int] | None) -> None:
    queued = child_job(queue="q", at=NOW, conditions={}, status={"startTime": format_time(NOW)})
    first = run(*pods, raw_job=queued, status=STARTED)
    assert (first.status.attempt, first.status.counts.replaced) == (1, 0 if replaced is None else 1)
    following = run(*pods, raw_job=queued, status=first.status)
    assert created(following) == [CreatePod("train-1", index, 1) for index in replaced or ()]
    assert following.status.condition(c.RESTARTING) == first.status.condition(c.RESTARTING)
    assert following.status.counts == first.status.counts


@pytest.mark.parametrize(
    ("pods", "changes"),
    [
        ((child_pod(0), LOST), {"raw_job": child_job()}),
        ((child_pod(0), LOST), {"status": STARTED}),
        ((child_pod(0), LOST), {"recovery": {"countDisruptions": True}}),
        ((child_pod(0), child_pod(1, disrupted="DeletionByTaintManager")), {}),
        ((child_pod(0), child_pod(1, "Failed", code=137)), {}),
        ((child_pod(0, "Succeeded"), LOST), {}),
        ((child_pod(0, spec={"schedulingGroup": {"podGroupName": "g"}}), LOST), {}),
        ((child_pod(0), child_pod(1, deleting=True, suffix="r1")), {"status": REPLACING}),
        ((child_pod(0, "Failed", code=82, message=last_words("CUDAError")), LOST), {}),
    ],
    ids=["launchers cannot wait", "never met", "disruptions count", "node lost", "killed", "a peer has ended", "gang",
         "lost again", "a peer fails"],
)  # fmt: skip
def test_attempt_restarts_if_peers_cannot_wait(pods: Any, changes: Any) -> None:
    decision = run(*pods, **changes)
    before = changes.get("status", MET).counts.replaced
    assert (decision.status.attempt, decision.status.counts.replaced) == (2, before)


@pytest.mark.parametrize(("code", "reason"), [(255, "Unknown"), (137, "ContainerStatusUnknown")])
def test_pod_whose_end_nobody_has_seen_is_replaced_and_lost_with_its_node(code: int, reason: str) -> None:
    pods = (child_pod(0), child_pod(1, "Failed", code=code, reason=reason))
    decision = run(*pods)
    assert (decision.status.attempt, decision.status.counts.replaced) == (1, 1)
    assert created(run(*pods, status=decision.status)) == [CreatePod("train-1", 1, 1)]
    failure = present(decision.status.last_failure)
    assert (failure.category, failure.exit_code) == ("NodeLost", code)
    assert "has not seen how it ended, as after a restart of the node" in failure.message


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"reason": "Error"}, id="script"),
        pytest.param({"reason": "Unknown", "message": last_words("CUDAError")}, id="launcher-has-reported"),
        pytest.param({"reason": "Unknown", "status": {"reason": "Evicted", "message": "disk"}}, id="evicted"),
    ],
)
def test_pod_whose_end_is_known_is_not_lost_with_its_node(changes: Any) -> None:
    decision = run(child_pod(0), child_pod(1, "Failed", code=255, **changes))
    failure = present(decision.status.last_failure)
    assert failure.category != "NodeLost"
    assert "signal 127" not in failure.message


def test_peers_timeout_without_replacement_is_not_counted() -> None:
    waited = child_pod(0, "Failed", code=86, message=last_words("Network", secondary=True))
    failed = child_job(awaits_peers=True, conditions={"FailureTarget": "exit code 86"})
    for status, free in ((REPLACING, 1), (MET, 0)):
        decision = run(waited, child_pod(1, "Pending"), status=status, raw_job=failed, now=NOW + timedelta(minutes=1))
        assert (decision.status.attempt, decision.status.counts.free) == (2, free)


def test_restart_finishes_with_first_step_of_new_workers() -> None:
    training = page(step=7, steps=7, phase="Running")
    expected = run(child_pod(0), child_pod(1, deleting=True, grace=30), text=training).status
    again = run(child_pod(0), child_pod(1, deleting=True, grace=30), status=expected, text=training).status
    assert again.last_restart is not None
    assert (again.last_restart.level, again.last_restart.recovery_seconds) == ("ReplacedPod", None)
    gone = run(child_pod(0), status=again, text=training).status
    assert gone.last_restart == again.last_restart
    restarted = page(step=7, phase="Rendezvous", restarts=1)
    pods = (child_pod(0), child_pod(1, suffix="r1"))
    joining = run(*pods, status=again, text=restarted).status
    assert (joining.last_restart, joining.counts.in_place) == (again.last_restart, 0)
    over = run(*pods, status=joining, text=page(step=8, steps=1, phase="Running", restarts=1), now=LATER)
    restarts = over.status.counts
    assert (restarts.replaced, restarts.in_place, restarts.in_place_after_loss, restarts.all) == (1, 1, 1, 1)
    assert over.status.last_restart is not None
    assert (over.status.last_restart.level, over.status.last_restart.recovery_seconds) == ("ReplacedPod", 9)


@pytest.mark.parametrize(("minutes", "counted"), [(9, 0), (11, 1)])
def test_in_place_restarts_after_loss_are_not_counted(minutes: int, counted: int) -> None:
    lately = LastRestart(attempt=1, level="ReplacedPod", time=NOW - timedelta(minutes=minutes))
    typed = job(status=replace(MET, last_restart=lately), nodes=2)
    expected = decode(page(answered=last_words("Preempted", exitCode=85, restarts=1), restarts=1, phase="Running"))
    pods = [child_pod(0), child_pod(1)]
    seen = observe(typed, [JOB], pods, expected)
    seen = dataclasses.replace(seen, failures_in_place=list_restart_failures([(seen.pods[0], expected)]))
    assert decide(typed, seen, NOW).status.counts.counted == counted


def test_restart_after_announced_stop_is_not_counted_before_loss_is_observed() -> None:
    typed = job(status=MET, nodes=2)
    text = "pod 1 was asked to stop: worker killed by SIGTERM"
    stopped = last_words("Preempted", exitCode=143, restarts=1, secondary=True, message=text)
    peer = decode(page(answered=stopped, restarts=1, phase="Rendezvous"))
    seen = observe(typed, [JOB], [child_pod(0), child_pod(1)], peer)
    seen = dataclasses.replace(seen, failures_in_place=list_restart_failures([(seen.pods[0], peer)]))
    status = decide(typed, seen, NOW).status
    assert (status.counts.counted, status.counts.used, status.phase) == (0, 0, "Running")
    known = present(status.last_failure)
    assert (known.category, known.message) == ("Preempted", text)
    lost = run(child_pod(0), LOST, status=status)
    assert (lost.status.counts.counted, lost.status.counts.used) == (0, 0)
    assert (lost.status.counts.counted, lost.status.counts.used) == (0, 0)
    assert present(lost.status.last_failure).message.startswith("the pod was lost: EvictionByEvictionAPI")


@pytest.mark.parametrize(
    ("loses_pod", "reports"),
    [(True, "a failure"), (False, "a failure"), (False, "its workers were stopped")],
)
def test_steps_lost_begin_at_step_that_any_launcher_reports(loses_pod: bool, reports: str) -> None:
    """The status reads the steps rarely, and the pod of the root cause may not know them."""
    lost = LastRestart(attempt=1, level="ReplacedPod", cause="Preempted", time=NOW - timedelta(seconds=9), step=6)
    progress = Progress(step=6)
    typed = job(status=replace(MET, last_restart=lost if loses_pod else None, progress=progress), nodes=2)
    ended_at_91 = last_words("NCCLError", exitCode=1, secondary=True, restarts=1, step=91)
    known = {"answered": ended_at_91} if reports == "a failure" else {"restartStep": 91}
    training = decode(page(step=53, steps=3, phase="Running", restarts=1, **known))
    killed = decode(page(phase="Running", restarts=1, answered=last_words("Killed", exitCode=137, restarts=1)))
    seen = observe(typed, [JOB], [child_pod(0), child_pod(1)], training)
    pages = [(seen.pods[0], training)] if loses_pod else [(seen.pods[0], training), (seen.pods[1], killed)]
    seen = dataclasses.replace(seen, failures_in_place=list_restart_failures(pages))
    restart = present(decide(typed, seen, NOW).status.last_restart)
    assert (restart.level, restart.step, restart.steps_lost) == ("ReplacedPod" if loses_pod else "SamePods", 91, 41)


class TestSparePods:
    JOB = child_job(nodes=3, awaits_peers=True, status={"startTime": "2026-11-20T11:00:00Z"})

    def run(self, *pods: Any, status: Status = MET, **spec: Any) -> Decision:
        return run(*pods, status=status, raw_job=spec.pop("raw_job", self.JOB), spares=1, **spec)

    def test_spares_are_not_part_of_nodes(self) -> None:
        decision = self.run(child_pod(0), child_pod(1), child_pod(2))
        assert (decision.status.phase, decision.status.attempt, decision.actions) == ("Running", 1, ())
        assert decision.status.nodes == Nodes(desired=2, ready=2, spares=1)

    @pytest.mark.parametrize("reason", ["EvictionByEvictionAPI", "DeletionByTaintManager"])
    def test_spare_takes_over_and_lost_pod_is_replaced(self, reason: str) -> None:
        lost = child_pod(1, "Failed", code=85, deleting=True, disrupted=reason)
        decision = self.run(child_pod(0), lost, child_pod(2))
        assert (decision.status.phase, decision.status.attempt) == ("Running", 1)
        assert created(decision) == [CreatePod("train-1", 1, 0)]
        assert (decision.status.counts.replaced, decision.status.counts.counted) == (1, 0)
        again = self.run(child_pod(0), lost, child_pod(2), status=decision.status)
        assert again.status.counts.replaced == 1, "it is told once"
        assert present(again.status.last_failure).pod == "train-1-1-abcde"

    def test_spare_takes_over_in_gang(self) -> None:
        gang = {"spec": {"schedulingGroup": {"podGroupName": "g"}}}
        decision = self.run(child_pod(0, **gang), LOST, child_pod(2, **gang))
        assert (decision.status.phase, decision.status.attempt, created(decision)) == ("Running", 1, [])

    def test_rejoining_workers_keep_attempt(self) -> None:
        last = LastRestart(attempt=1, level="SamePods", time=NOW)
        assert (
            self.run(child_pod(0), LOST, child_pod(2), status=replace(STARTED, last_restart=last)).status.attempt == 1
        )

    def test_lost_pod_0_waits_for_its_replacement(self) -> None:
        lost = child_pod(0, "Failed", code=85, deleting=True, disrupted="EvictionByEvictionAPI")
        decision = self.run(lost, child_pod(1), child_pod(2))
        assert (decision.status.phase, decision.status.attempt) == ("Restarting", 1)

    def test_lost_pod_without_ready_spare_waits(self) -> None:
        decision = self.run(child_pod(0), LOST, child_pod(2, "Pending"))
        assert (decision.status.phase, decision.status.attempt) == ("Restarting", 1)

    def test_spares_end_with_their_peers(self) -> None:
        done = self.run(child_pod(0, "Succeeded"), child_pod(1), child_pod(2, "Succeeded"))
        assert done.status.phase == "Succeeded"
        assert [type(action) for action in self.run(status=done.status).actions] == [SuspendJob]

    @pytest.mark.parametrize("pods", [(child_pod(0), child_pod(1, "Succeeded"), child_pod(2, "Succeeded")),
                                      (child_pod(0, "Succeeded"), child_pod(1, "Failed", code=137), child_pod(2)),
                                      (child_pod(1, "Succeeded"), child_pod(2, "Succeeded")),  # pod 0 was deleted
                                      (child_pod(0, "Succeeded"), child_pod(1), child_pod(2))])  # fmt: skip
    def test_spares_alone_do_not_succeed(self, pods: Any) -> None:
        assert self.run(*pods).status.phase != "Succeeded"


STATUS = Status(attempt=1, job_name="train-1", start_time=NOW - timedelta(hours=1)).remember(nodes=3)
SILENT = NodeView(False, "the node is not ready: silent")


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def see(*pods: Any, **spec: Any) -> Any:
    typed = job(status=STATUS, nodes=3, **spec)
    nodes = {pod["spec"].get("nodeName", ""): SILENT for pod in pods}
    return typed, observe(typed, [child_job(nodes=3)], pods, nodes=nodes)


def test_lost_pods_are_declared_failed_in_order_of_their_index() -> None:
    gone = [child_pod(index, deleting=True, grace=0, node=f"n{index}") for index in (2, 0, 1)]
    typed, seen = see(*gone)
    assert [pod.index for pod, _ in find_lost_pods(State(typed, seen, at(3600)))] == [0, 1, 2]


def test_cut_off_nodes_are_inspected_first() -> None:
    gone = [child_pod(i, deleting=True, grace=0, node=f"a{i:02d}") for i in range(MAX_NODES)]
    typed, seen = see(*gone, child_pod(50, unready=NOW, node="z"))
    nodes = ("z", *(f"a{i:02d}" for i in range(MAX_NODES - 1)))
    assert list_nodes_to_inspect(typed, seen, at(3600)) == nodes


def test_next_check_is_at_first_due_pod() -> None:
    def look(*seconds: float) -> float | None:
        gone = [child_pod(i, deleting=True, grace=0, at=at(s), node=f"n{i}") for i, s in enumerate(seconds)]
        return compute_next_check(State(*see(*gone), NOW))

    first = look(0)
    second = look(30)
    assert first is not None
    assert second is not None
    assert second - first == 30
    assert look(30, 0) == first
    assert compute_next_check(State(*see(child_pod(0)), NOW)) is None


class TestSuspicion:
    """A pod that several witnesses get no answer from."""

    SILENT = child_pod(1, node="node-b")
    UID = "uid-train-1-1-abcde"
    LOST_POD = child_pod(1, "Failed", disrupted="NodeLost", deleting=True, node="node-b")

    def suspect(self, *, is_lost: bool) -> dict[str, Suspicion]:
        return {self.UID: Suspicion(NOW, "1/1 of its peers get no answer from it", is_lost)}

    def test_lost_pod_is_failed_at_once_after_its_node_is_recorded(self) -> None:
        first = run(child_pod(0), self.SILENT, observed={"suspicions": self.suspect(is_lost=True)})
        assert (first.actions, first.status.failed_nodes) == ((), ("node-b",))
        second = run(
            child_pod(0), self.SILENT, status=first.status, observed={"suspicions": self.suspect(is_lost=True)}
        )
        (action,) = (action for action in second.actions if isinstance(action, FailPod))
        assert (action.uid, action.message) == (self.UID, "1/1 of its peers get no answer from it")

    @pytest.mark.parametrize("index", [0, 1])
    def test_pod_of_lost_node_is_replaced_in_its_job(self, index: int) -> None:
        status = replace(MET, failed_nodes=("node-b",))
        lost = child_pod(index, "Failed", disrupted="NodeLost", deleting=True, node="node-b")
        decision = run(child_pod(1 - index), lost, status=status)
        assert (decision.status.attempt, decision.status.phase) == (1, "Restarting")
        following = run(child_pod(1 - index), lost, status=decision.status)
        assert created(following) == [CreatePod("train-1", index, 1)]

    @pytest.mark.parametrize(
        ("lost", "failed_nodes", "options"),
        [
            (
                child_pod(0, "Failed", disrupted="NodeLost", deleting=True, node="node-b"),
                ("node-b",),
                {"checkpoint": {"path": "/checkpoints", "url": "s3://team/train"}},
            ),
            (LOST_POD, (), {}),
            (LOST_POD, ("node-b",), {"recovery": {"avoidFailedNodes": False}}),
        ],
        ids=["pod 0 may upload", "node is not avoided yet", "nodes are not avoided"],
    )
    def test_other_pod_of_lost_node_starts_a_new_attempt(
        self, lost: Any, failed_nodes: tuple[str, ...], options: dict[str, Any]
    ) -> None:
        peer = child_pod(1) if lost is not self.LOST_POD else child_pod(0)
        decision = run(peer, lost, status=replace(MET, failed_nodes=failed_nodes), **options)
        assert (decision.status.attempt, present(decision.status.last_failure).category) == (2, "NodeLost")

    def test_peers_are_not_reported_as_joined_while_their_ranks_still_wait_for_the_lost_pod(self) -> None:
        status = replace(MET, failed_nodes=("node-b",))
        hung = page(step=5, phase="Running")
        replacing = run(child_pod(0), self.LOST_POD, status=status, text=hung).status
        new = child_pod(1, suffix="r1", age=0)
        decision = run(child_pod(0), new, status=replacing, text=hung)
        assert present(decision.status.condition(c.RENDEZVOUSED)).status == "False"
        assert present(decision.status.condition(c.PROGRESSING)).status == "False"
        assert decision.status.phase == "Restarting"
        rejoined = page(step=5, phase="Running", restarts=1)
        decision = run(child_pod(0), new, status=decision.status, text=rejoined)
        assert present(decision.status.condition(c.RENDEZVOUSED)).status == "True"
        assert decision.status.phase == "Running"
        late = run(child_pod(0), new, status=replacing, text=hung, now=NOW + timedelta(minutes=10))
        assert present(late.status.condition(c.RENDEZVOUSED)).status == "True", "it is not believed for ever"
