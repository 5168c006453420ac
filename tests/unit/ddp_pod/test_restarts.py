"""Restarts in the same pods: counting against the budget, the report of the last restart, and the pod's exit code."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest

from ddp_pod.base.files import write_json
from ddp_pod.contract.failure_record import EVIDENCE_STOPPED, EVIDENCE_TIMEOUT, Failure
from ddp_pod.contract.failure_table import CUDA, NODE_FAULT, OOM
from ddp_pod.contract.plan import DevConfig
from ddp_pod.failures.restarts import LONGEST_DELAY, PROMPT_RESTARTS, UNCOUNTED_RESTARTS, InPlaceRestarts, Recurrence
from ddp_pod.failures.worker_failure import HELPER_ENDED, find_root_cause
from ddp_pod.progress.rank_progress import RankReader
from tests.support.launcher_config import launcher_pod


class AtStep:
    """Metrics of ranks that have reached a step."""

    reads_log = False

    def count_steps(self, rank: int) -> int | None:
        """Return no count: the ranks report their steps themselves."""
        return None

    def step(self, rank: int) -> float | None:
        """Return the step of each rank."""
        return 100.0 + rank


def failure(message: str = "boom", exit_code: int = 1, container_exit_code: int = 82, **fields: Any) -> Failure:
    base = Failure(
        category="UserError",
        container_exit_code=container_exit_code,
        rank=5,
        local_rank=1,
        exit_code=exit_code,
        exception_type="ValueError",
        message=f"ValueError: {message}",
        time=1.0,
        signature="ValueError",
    )
    return dataclasses.replace(base, **fields)


def restarts(folder: Path, budget: int = 2, **pod: Any) -> InPlaceRestarts:
    return InPlaceRestarts(launcher_pod(folder, in_place_restarts=budget, **pod), cast(RankReader, AtStep()))


LOST_PEER = failure("connection closed", container_exit_code=86, secondary=True, category="Network", signature="")
PREEMPTED = failure("preempted", exit_code=85, container_exit_code=85)
STOPPED = failure("stopped", exit_code=143, category="Killed", signature="", evidence=EVIDENCE_STOPPED)
AWAITS: dict[str, Any] = {"nodes": 2, "restarts_without_progress": 1}


class WithoutSteps(AtStep):
    """Metrics of ranks that report no step."""

    def step(self, rank: int) -> float | None:
        return None


def count(pod: InPlaceRestarts, **options: Any) -> None:
    """Count a restart whose cause is known."""
    pod.count_in_place(has_cause=True, **options)


@pytest.mark.parametrize(
    ("failures", "config", "left"),
    [
        ([LOST_PEER], {"elastic": True}, 2),
        ([LOST_PEER, PREEMPTED], {"elastic": True}, 2),
        ([LOST_PEER, STOPPED], AWAITS, 2),
        ([], AWAITS, 2),
        ([STOPPED], AWAITS, 1),
        ([failure()], {"elastic": True}, 1),
        ([LOST_PEER, failure()], {"elastic": True}, 1),
        ([LOST_PEER], {"nodes": 1}, 1),
    ],
)
def test_restart_after_failures_of_peers_is_not_counted(
    tmp_path: Path, failures: list[Failure], config: dict[str, Any], left: int
) -> None:
    pod = restarts(tmp_path, **config)
    assert not failures or pod.observe(failures)
    count(pod)
    assert (pod.count, pod.left) == (1, left)
    expected = find_root_cause(failures).message if failures else "other pods join or leave"
    assert expected in pod.reason


def test_number_of_uncounted_restarts_is_limited(tmp_path: Path) -> None:
    pod = restarts(tmp_path, elastic=True)
    for _ in range(UNCOUNTED_RESTARTS + 1):
        assert pod.observe([LOST_PEER])
        count(pod)
    assert pod.left == 1


def test_failures_while_stopping_are_counted(tmp_path: Path) -> None:
    pod = restarts(tmp_path, elastic=True)
    pod.observe([LOST_PEER], stopping=True)
    count(pod)
    assert pod.left == 1


INTERRUPTED = failure("pod 1 was asked to stop", exit_code=143, container_exit_code=85, secondary=True, signature="")


def test_restarts_after_announced_stops_are_neither_counted_nor_limited(tmp_path: Path) -> None:
    pod = restarts(tmp_path, budget=1, **AWAITS)
    for _ in range(UNCOUNTED_RESTARTS + 1):
        assert pod.observe([INTERRUPTED], interrupted=True)
        assert pod.knows_cause
        count(pod)
        pod.forget()
    assert pod.left == 1
    assert pod.observe([LOST_PEER]), "they do not use up the limit of other peers' failures"
    assert not pod.knows_cause


@pytest.mark.parametrize(("config", "stopping"), [({"nodes": 2}, False), (AWAITS, True)])
def test_ranks_end_after_stop_of_peer_if_their_pod_does_not_wait(
    tmp_path: Path, config: dict[str, Any], stopping: bool
) -> None:
    pod = restarts(tmp_path, **config)
    assert not pod.observe([INTERRUPTED], interrupted=True, stopping=stopping)


def test_stop_of_peer_between_two_equal_failures_does_not_hide_the_repetition(tmp_path: Path) -> None:
    pod = restarts(tmp_path, budget=9, **AWAITS)
    assert pod.observe([failure()])
    count(pod)
    pod.forget()
    assert pod.observe([INTERRUPTED], interrupted=True)
    count(pod)
    pod.forget()
    assert not pod.observe([failure()])
    assert pod.repeated


TIMED_OUT = dataclasses.replace(LOST_PEER, evidence=EVIDENCE_TIMEOUT)
AWAITED = failure("rank 4 is in q.get", exit_code=137, container_exit_code=83, category="Hang", rank=4, signature="")
COMPUTES = dataclasses.replace(AWAITED, secondary=True)


@pytest.mark.parametrize(
    ("failures", "awaited", "rank"),
    [
        ([TIMED_OUT], AWAITED, 4),
        ([TIMED_OUT, LOST_PEER, STOPPED], AWAITED, 4),
        ([TIMED_OUT], COMPUTES, 5),
        ([TIMED_OUT], None, 5),
        ([LOST_PEER], AWAITED, 5),  # of a pod that was deleted, perhaps
        ([TIMED_OUT, failure()], AWAITED, 5),
        ([STOPPED], AWAITED, 5),
    ],
)
def test_rank_outside_of_collectives_is_root_cause_of_timeouts_and_counted(
    tmp_path: Path, failures: list[Failure], awaited: Failure | None, rank: int
) -> None:
    pod = restarts(tmp_path, **AWAITS)
    assert pod.observe(failures, awaited)
    count(pod)
    assert find_root_cause(pod.failures).rank == rank
    if rank == 4:
        assert (pod.left, pod.knows_cause) == (1, True)
        assert find_root_cause(pod.failures).message == f"{AWAITED.message}; rank 5 gave up: {TIMED_OUT.message}"


@pytest.mark.parametrize(
    ("failures", "knows"), [([], False), ([LOST_PEER, STOPPED], False), ([PREEMPTED], False), ([failure()], True)]
)
def test_pod_knows_cause_if_its_own_rank_failed(tmp_path: Path, failures: list[Failure], knows: bool) -> None:
    pod = restarts(tmp_path, **AWAITS)
    if failures:
        pod.observe(failures)
    assert pod.knows_cause is knows


@pytest.mark.parametrize(
    ("explained", "steps", "config", "over"),
    [
        ([False], [100], AWAITS, [False]),
        ([False, False], [100, 100], AWAITS, [False, True]),
        ([False, True, False], [100, 100, 100], AWAITS, [False, False, False]),
        ([False, False], [100, 200], AWAITS, [False, False]),
        ([False, False], [100, 100], {"restarts_without_progress": None, "nodes": 2}, [False, False]),
    ],
    ids=["once", "twice", "explained in between", "progress in between", "budget of its own"],
)
@pytest.mark.parametrize("failures", [[LOST_PEER], []], ids=["lost peer", "no failure"])
def test_restarts_without_known_cause_and_progress_end_the_run(
    tmp_path: Path,
    failures: list[Failure],
    explained: list[bool],
    steps: list[int],
    config: dict[str, Any],
    over: list[bool],
) -> None:
    pod = InPlaceRestarts(launcher_pod(tmp_path, in_place_restarts=2, **config), cast(RankReader, WithoutSteps()))
    observed = []
    for known, step in zip(explained, steps, strict=True):
        if failures:
            assert pod.observe(failures, run_step=step)
        count(pod, run_step=step)
        pod.note_round(pod.count, explained=known)
        observed.append(pod.is_over)
        pod.forget()
    assert observed == over


@pytest.mark.parametrize("failures", [[LOST_PEER], [failure(category="Network", signature="")], []])
def test_restarts_in_a_row_are_delayed_until_progress(tmp_path: Path, failures: list[Failure]) -> None:
    pod = InPlaceRestarts(launcher_pod(tmp_path, in_place_restarts=99, nodes=2), cast(RankReader, WithoutSteps()))

    def restart(step: float) -> float:
        if failures:
            assert pod.observe(failures, run_step=step)
        count(pod, run_step=step)
        pod.forget()
        return pod.delay

    assert [restart(100) for _ in range(PROMPT_RESTARTS + 4)] == [0.0] * PROMPT_RESTARTS + [1.0, 2.0, 4.0, 8.0]
    for _ in range(10):
        restart(100)
    assert pod.delay == LONGEST_DELAY
    assert restart(200) == 0.0


def test_restarts_of_the_agent_are_delayed_and_limited(tmp_path: Path) -> None:
    pod = restarts(tmp_path, PROMPT_RESTARTS + 2)
    assert [pod.spend(failure()) for _ in range(PROMPT_RESTARTS + 3)] == [True] * (PROMPT_RESTARTS + 2) + [False]
    assert (pod.count, pod.left) == (PROMPT_RESTARTS + 2, 0)
    assert pod.delay > 0


@pytest.mark.parametrize(("config", "left"), [(AWAITS, 1), ({"nodes": 2}, 0)])
def test_agent_that_lost_pod_0_is_restarted_without_counting_if_it_waits(
    tmp_path: Path, config: dict[str, Any], left: int
) -> None:
    pod = restarts(tmp_path, budget=1, **config)
    assert pod.spend(LOST_PEER)
    assert (pod.count, pod.left) == (1, left)


def test_number_of_uncounted_restarts_of_the_agent_is_limited(tmp_path: Path) -> None:
    pod = restarts(tmp_path, budget=0, **{**AWAITS, "elastic": True})
    assert [pod.spend(LOST_PEER) for _ in range(UNCOUNTED_RESTARTS + 1)] == [True] * UNCOUNTED_RESTARTS + [False]


def test_failure_is_the_reason_of_the_restart_and_repeats_at_the_same_step(tmp_path: Path) -> None:
    pod = restarts(tmp_path)
    assert pod.observe([failure()])
    count(pod)
    assert (pod.count, pod.left, pod.failed_step) == (1, 1, 101.0)
    assert "ValueError: boom" in pod.reason
    assert not pod.observe([failure()])
    assert pod.repeated
    pod.forget()
    assert (pod.failures, pod.repeated, pod.failed_step) == ((), False, None)


def test_native_crash_that_repeats_is_found_by_its_exception(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "1.end").write_text(
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what(): op.preamble.length <= op.nbytes"
    )
    found = restarts(tmp_path)
    crash = failure(exit_code=134, exception_type="", category="Unknown", signature="")
    assert found.observe([crash])
    count(found)
    assert found.reason == "EnforceNotMet: op.preamble.length <= op.nbytes"
    assert not found.observe([crash])
    assert found.repeated


def test_pod_whose_ranks_report_no_step_uses_the_step_of_pod_0(tmp_path: Path) -> None:
    """Only rank 0 prints steps: the same failure with steps in between is no repetition."""
    config = launcher_pod(tmp_path, in_place_restarts=9, node=1, restarts_without_progress=1)
    found = InPlaceRestarts(config, cast(RankReader, WithoutSteps()))
    again = [found.observe([failure(signature="exit code 3")], run_step=step) for step in (100, 200, 300, 300)]
    assert (again, found.repeated) == ([True, True, True, False], True)
    assert found.failed_step is None


def test_same_failure_is_a_repetition_although_pod_0_has_shared_an_older_step(tmp_path: Path) -> None:
    class Counting(WithoutSteps):
        def count_steps(self, rank: int) -> int:
            return 5

    found = InPlaceRestarts(launcher_pod(tmp_path, in_place_restarts=9), cast(RankReader, Counting()))
    assert [found.observe([failure(signature="exit code 3")], run_step=step) for step in (2, 5)] == [True, False]
    assert found.repeated


@pytest.mark.parametrize(
    ("counts", "evidence", "repeated"),
    [((5, 5), "Error", True), ((5, 6), "Error", False), ((0, 0), "Error", False), ((5, 5), EVIDENCE_STOPPED, False)],
)
def test_kill_after_the_same_step_is_a_repetition(
    tmp_path: Path, counts: tuple[int, int], evidence: str, repeated: bool
) -> None:
    class Counting(WithoutSteps):
        counted = 0

        def count_steps(self, rank: int) -> int:
            return self.counted

    reader = Counting()
    found = InPlaceRestarts(launcher_pod(tmp_path, in_place_restarts=9), cast(RankReader, reader))
    for reader.counted in counts:
        found.observe([failure(category="Killed", exit_code=137, signature="", exception_type="", evidence=evidence)])
    assert found.repeated is repeated
    assert bool(found.failures[0].signature) is (counts[0] > 0 and evidence == "Error")


@pytest.mark.parametrize(
    ("found", "again"),
    [
        (failure(), True),
        (failure(container_exit_code=81), False),
        (failure(container_exit_code=85), False),
        (failure(category=CUDA.name), False),
        (failure(category=NODE_FAULT.name), False),
        (failure(category=OOM.name, container_exit_code=84), True),
        (failure(category=OOM.name, container_exit_code=84, exit_code=137), False),
        (failure(category="Unknown", exit_code=137), True),
    ],
)
def test_pod_that_may_be_the_cause_is_not_restarted(tmp_path: Path, found: Failure, again: bool) -> None:
    assert restarts(tmp_path, restarts_without_progress=1).observe([found]) is again
    assert restarts(tmp_path).observe([found]) is (found.container_exit_code not in (81, 85))


@pytest.mark.parametrize(
    ("node", "secondary", "most", "again"),
    [(0, False, 1, False), (1, False, 1, False), (0, True, 1, False), (1, True, 1, True), (1, False, None, True)],
)
def test_failures_without_progress_get_new_pods(
    tmp_path: Path, node: int, secondary: bool, most: int | None, again: bool
) -> None:
    pod = restarts(tmp_path, 9, node=node, restarts_without_progress=most)
    restarted = []
    for number in range(3):
        signature = "" if secondary else f"exit code {number + 3}"
        lost = failure(category="Network", container_exit_code=86, secondary=secondary, signature=signature)
        restarted.append(pod.observe([lost]))
        count(pod)
        pod.forget()
    assert restarted == [True, True, again]  # the first failed after steps, the second at the same step


@pytest.mark.parametrize(
    ("failures", "repeated"),
    [
        ([("A", 10, 9), ("A", 10, 9)], [False, True]),
        ([("A", 10, 9), ("A", 9, 9)], [False, True]),
        ([("A", 10, 9), ("A", 11, 9), ("A", 11, 9)], [False, False, True]),
        ([("A", 10, 9), ("B", 10, 9), ("A", 10, 9)], [False, False, True]),
        ([("A", 10, 9), ("", 20, 9), ("A", 15, 9)], [False, False, False]),
        ([("", 10, 9), ("", 10, 9)], [False, False]),
        ([("A", None, 9), ("A", None, 9)], [False, True]),
        ([("A", None, 9), ("A", None, 301)], [False, False]),
        ([("A", None, 400), ("A", None, 700), ("A", None, 730)], [False, False, True]),  # as late as before
        ([("A", None, 400), ("B", None, 700), ("A", None, 410)], [False, False, False]),
        # Counted steps without a position in the run.
        ([("A", None, 400, 30), ("A", None, 400, 30)], [False, True]),
        ([("A", None, 400, 30), ("A", None, 400, 31)], [False, True]),
        ([("A", None, 400, 0), ("A", None, 400, 0)], [False, True]),
        ([("A", None, 400, 110), ("A", None, 400, 20), ("A", None, 400, 20)], [False, False, True]),  # resumed
        # A hang at another step of a run that begins anew, of one that resumes, and after a longer time.
        ([("Hang in a", 40, 9, 40), ("Hang in a", 90, 9, 90)], [False, True]),
        ([("Hang in a", 40, 9, 40), ("Hang in a", 90, 9, 50)], [False, False]),
        ([("Hang in a", 40, 400, 40), ("Hang in a", 90, 400, 90)], [False, False]),
        ([("Hang in a", 40, 9, 40), ("Hang in b", 90, 9, 90)], [False, False]),
    ],
)
def test_same_signature_without_a_step_in_between_is_a_repetition(failures: list[Any], repeated: list[bool]) -> None:
    recurrence = Recurrence()
    assert [recurrence.observe(*failure) for failure in failures] == repeated


@pytest.mark.parametrize(("signature", "repeated"), [(HELPER_ENDED, True), ("KeyError at train.py:7", False)])
def test_end_of_a_helper_repeats_although_its_rank_notices_it_some_steps_later(signature: str, repeated: bool) -> None:
    recurrence = Recurrence()
    assert not recurrence.observe(signature, 5.0, 10.0, 5)
    assert recurrence.observe(signature, 8.0, 10.0, 8) is repeated


@pytest.mark.parametrize(
    ("budget", "spent", "repeated", "fatal", "running", "final"),
    [
        (2, 0, False, False, True, False),  # a restart follows
        (2, 2, False, False, True, True),
        (2, 0, True, False, True, True),
        (2, 0, False, True, True, True),
        (0, 0, False, False, False, True),
        (2, 2, False, False, False, False),  # the page is of the workers before the restart
    ],
)
def test_pod_ends_with_the_failures_that_no_restart_follows(
    tmp_path: Path, budget: int, spent: int, repeated: bool, fatal: bool, running: bool, final: bool
) -> None:
    (tmp_path / "errors").mkdir()
    kind = "ModuleNotFoundError" if fatal else "OSError"
    error = {"rank": 1, "localRank": 1, "exitCode": 1, "type": kind, "message": "the cause"}
    write_json(str(tmp_path / "errors" / "1.json"), error)
    found = restarts(tmp_path, budget)
    for _ in range(spent):
        found.spend(failure())
    found.repeated = repeated
    assert bool(found.read_final_failures(running=running)) is final


@pytest.mark.parametrize(("failures", "restarts_again"), [([failure()], False), ([LOST_PEER], True)])
def test_user_of_held_pods_sees_each_failure_without_a_restart(
    tmp_path: Path, failures: list[Failure], restarts_again: bool
) -> None:
    pod = restarts(tmp_path, **AWAITS, dev=DevConfig(60.0))
    assert pod.observe(failures) is restarts_again
