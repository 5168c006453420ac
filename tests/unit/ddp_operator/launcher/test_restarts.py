"""Restarts in the same pods: counting against the budget, the report of the last restart, and the pod's exit code."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest

from ddp_operator.contract.failure_record import Failure
from ddp_operator.contract.failure_table import CUDA, OOM
from ddp_operator.launcher.failures.restarts import FREE_RESTARTS, InPlaceRestarts
from ddp_operator.launcher.files import write_json
from ddp_operator.launcher.progress.metrics import MetricsEndpoint
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
    return InPlaceRestarts(launcher_pod(folder, in_place_restarts=budget, **pod), cast(MetricsEndpoint, AtStep()))


LOST_PEER = failure("connection closed", container_exit_code=86, secondary=True)
PREEMPTED = failure("preempted", exit_code=85, container_exit_code=85)


class TestFreeRestarts:
    def test_restart_after_loss_of_peer_is_free_up_to_limit(self, tmp_path: Path) -> None:
        pod = restarts(tmp_path, elastic=True)
        taken = [pod.take_free([LOST_PEER, PREEMPTED]) for _ in range(FREE_RESTARTS + 1)]
        assert taken == [True] * FREE_RESTARTS + [False]

    @pytest.mark.parametrize("failures", [[], [failure()], [LOST_PEER, failure()]], ids=["none", "own", "both"])
    def test_restart_without_loss_of_peer_is_counted(self, tmp_path: Path, failures: list[Failure]) -> None:
        assert not restarts(tmp_path, elastic=True).take_free(failures)

    def test_pod_that_awaits_no_peers_has_no_free_restart(self, tmp_path: Path) -> None:
        assert not restarts(tmp_path, elastic=False, nodes=1).take_free([LOST_PEER])


def test_a_failure_costs_one_of_the_budget_and_is_the_reason_of_the_restart(tmp_path: Path) -> None:
    found = restarts(tmp_path)
    assert (found.count, found.left, found.reason) == (0, 2, "")
    assert found.observe([failure()], free=False)
    found.count_in_place(None)
    assert (found.count, found.left, found.failed_step) == (1, 1, 101.0)
    assert "ValueError: boom" in found.reason


@pytest.mark.parametrize(
    ("failures", "stalled", "reason"),
    [([failure()], None, "boom"), ([], "rank 3 hangs", "rank 3 hangs"), ([], None, "other pods join or leave")],
)
def test_what_others_do_costs_nothing(
    tmp_path: Path, failures: list[Failure], stalled: str | None, reason: str
) -> None:
    found = restarts(tmp_path, elastic=True)
    if failures:
        assert found.observe([*failures, failure(container_exit_code=85)], free=True)
    found.count_in_place(stalled)
    assert (found.count, found.left) == (1, 2)
    assert reason in found.reason


def test_only_the_pod_whose_rank_failed_spends_the_budget(tmp_path: Path) -> None:
    found = restarts(tmp_path, 1, restarts_without_progress=1)
    lost = failure(container_exit_code=86, category="Network", secondary=True, signature="")
    assert found.observe([lost], free=True)
    found.count_in_place(None)
    found.forget()
    assert (found.count, found.left) == (1, 1)
    assert found.observe([failure()], free=False)
    found.count_in_place(None)
    assert not found.observe([failure("other", signature="exit code 7")], free=False)


def test_native_crash_that_repeats_is_found_by_its_exception(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "1.end").write_text(
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what(): op.preamble.length <= op.nbytes"
    )
    found = restarts(tmp_path)
    crash = failure(exit_code=134, exception_type="", category="Unknown", signature="")
    assert found.observe([crash], free=False)
    found.count_in_place(None)
    assert found.reason == "EnforceNotMet: op.preamble.length <= op.nbytes"
    assert not found.observe([crash], free=False)
    assert found.repeated


class SaysNothing(AtStep):
    """Metrics of ranks that report no step."""

    def step(self, rank: int) -> float | None:
        return None


def test_a_pod_whose_ranks_report_no_step_goes_by_what_pod_0_has_told(tmp_path: Path) -> None:
    """Only rank 0 prints steps: the same failure with steps in between is no repetition."""
    config = launcher_pod(tmp_path, in_place_restarts=9, node=1, restarts_without_progress=1)
    found = InPlaceRestarts(config, cast(MetricsEndpoint, SaysNothing()))
    again = [
        found.observe([failure(signature="exit code 3")], free=False, run_step=step) for step in (100, 200, 300, 300)
    ]
    assert (again, found.repeated) == ([True, True, True, False], True)
    assert found.failed_step is None, "the rank has not said it"


@pytest.mark.parametrize(
    ("found", "again"),
    [
        (failure(), True),
        (failure(container_exit_code=81), False),
        (failure(container_exit_code=85), False),
        (failure(category=CUDA.name), False),
        (failure(category=OOM.name, container_exit_code=84), True),
        (failure(category=OOM.name, container_exit_code=84, exit_code=137), False),
        (failure(category="Unknown", exit_code=137), True),
    ],
)
def test_a_pod_that_may_be_the_cause_is_not_restarted(tmp_path: Path, found: Failure, again: bool) -> None:
    assert restarts(tmp_path, restarts_without_progress=1).observe([found], free=False) is again
    assert restarts(tmp_path).observe([found], free=False) is (found.container_exit_code not in (81, 85))


@pytest.mark.parametrize(
    ("node", "secondary", "most", "again"),
    [(0, False, 1, False), (1, False, 1, False), (0, True, 1, False), (1, True, 1, True), (1, False, None, True)],
)
def test_failures_without_a_step_in_between_get_new_pods(
    tmp_path: Path, node: int, secondary: bool, most: int | None, again: bool
) -> None:
    pod = restarts(tmp_path, 9, node=node, restarts_without_progress=most)
    answers = []
    for number in range(3):
        signature = "" if secondary else f"exit code {number + 3}"
        lost = failure(category="Network", container_exit_code=86, secondary=secondary, signature=signature)
        answers.append(pod.observe([lost], free=False))
        pod.count_in_place(None)
        pod.forget()
    assert answers == [True, True, again]  # the first failed after steps, the second at the same step


def test_a_restart_of_the_agent_is_refused_where_the_budget_is_used_up(tmp_path: Path) -> None:
    found = restarts(tmp_path, budget=1)
    assert [found.spend(), found.spend()] == [True, False]
    assert (found.count, found.left) == (1, 0)


def test_a_failure_that_comes_again_at_the_same_step_is_a_repetition_until_it_is_answered(tmp_path: Path) -> None:
    found = restarts(tmp_path)
    assert [found.observe([failure()], free=False) for _ in range(2)] == [True, False]
    assert found.repeated
    found.forget()
    assert (found.failures, found.repeated, found.failed_step) == ((), False, None)


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
def test_a_pod_ends_with_the_failures_that_no_restart_answers(
    tmp_path: Path, budget: int, spent: int, repeated: bool, fatal: bool, running: bool, final: bool
) -> None:
    (tmp_path / "errors").mkdir()
    kind = "ModuleNotFoundError" if fatal else "ValueError"
    error = {"rank": 1, "localRank": 1, "exitCode": 1, "type": kind, "message": "the cause"}
    write_json(str(tmp_path / "errors" / "1.json"), error)
    found = restarts(tmp_path, budget)
    for _ in range(spent):
        found.spend()
    found.repeated = repeated
    assert bool(found.read_final_failures(running=running)) is final
