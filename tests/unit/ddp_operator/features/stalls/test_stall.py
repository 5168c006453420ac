"""Stalls: when steps count as stopped, and what the status then names."""

import dataclasses
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import Progress, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide.decide import decide
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.state import Decision
from ddp_operator.features import stalls
from ddp_operator.features.stalls.reading import StallReading
from ddp_operator.features.stalls.stall import ObservedStall, is_stalled, stalled_since
from ddp_pod.contract.progress import RankProgress
from ddp_pod.contract.run_report import StalledRank
from tests.support.builders import NOW, child_job, decode, job, join, observe, page
from tests.support.decisions import RUNNING, STARTED, present
from tests.support.fake_cluster import ReconcilerHarness

HOOKS = Hooks((stalls.FEATURE,))
BEHIND = (StalledRank(1, "Behind", "rank 1 is in train_step (train.py:50)"),)


def run(
    text: str,
    *,
    status: Status = STARTED,
    ranks: Any = None,
    seconds: float = 1,
    pods: Any = RUNNING,
    stalled: tuple[StalledRank, ...] = (),
    began: ObservedStall | None = None,
    **spec: Any,
) -> Decision:
    typed = job(status=status, nodes=2, **spec)
    jobs = [child_job(), child_job(2)] if status.attempt == 2 else [child_job()]
    now = NOW + timedelta(seconds=seconds)
    result = decode(text) if text else None
    reading = StallReading()
    if result is not None and is_stalled(typed, result):
        began = began or ObservedStall(stalled_since(result, now), ranks or {})
        reading = StallReading(stall=dataclasses.replace(began, places=stalled))
    seen = observe(typed, jobs, pods, result, observed={"stalls": reading})
    return decide(typed, seen, now, hooks=HOOKS.observe(typed, {}))


def progressing(decision: Decision) -> tuple[str, str, str]:
    result = present(decision.status.condition(c.PROGRESSING))
    return result.status, result.reason, result.message


def stall(age: float, **values: Any) -> str:
    return page(phase="Running", step=57, heartbeat_age=age, **values)


def hung(seconds: float) -> str:
    """Return a launcher's page after it has detected a stall itself."""
    return page(stalled=seconds)


class TestStall:
    def test_stall_message_has_time_and_lagging_ranks(self) -> None:
        ranks = {0: RankProgress(step=57), 1: RankProgress(step=57), 3: RankProgress(step=56)}
        decision = run(stall(120), ranks=ranks, seconds=300)
        since = format_time(NOW + timedelta(seconds=180))
        assert progressing(decision) == ("False", "Stalled", f"no step since {since}; ranks 3 are behind step 57")
        assert decision.status.phase == "Running"

    def test_rank_for_which_its_peers_wait_is_named_before_and_while_that_is_a_stall(self) -> None:
        awaited = "rank 1 is in fill (train.py:20); rank 0 waits in all_reduce 3 of the default group"
        early = progressing(run(stall(10, awaited=awaited)))
        assert early == ("True", "Training", f"ranks wait for a peer: {awaited}")
        first = progressing(run(page(phase="Running", awaited=awaited)))
        assert first == ("Unknown", "NoStepYet", f"no step yet: {awaited}")
        ranks = {0: RankProgress(step=57), 1: RankProgress(step=57)}
        assert progressing(run(stall(120, awaited=awaited), ranks=ranks))[2].endswith(f"; {awaited}")

    @pytest.mark.parametrize(("age", "stalled"), [(99, False), (100, True), (-1, False), (1e300, False)])
    def test_stall_starts_at_third_of_stall_seconds(self, age: float, stalled: bool) -> None:
        assert (progressing(run(stall(age)))[1] == "Stalled") is stalled

    def test_no_stall_while_saving_or_before_first_step(self) -> None:
        assert progressing(run(stall(999, saving=1)))[1] == "Training"
        assert progressing(run(page(phase="Running", heartbeat_age=999)))[1] == "NoStepYet"

    def test_explanation_of_one_launcher_suffices(self) -> None:
        assert progressing(run(join(page(phase="Running", step=57), hung(30))))[1] == "Stalled"

    def test_waiting_ranks_are_all_quoted(self) -> None:
        places = (StalledRank(0, "Waiting", "rank 0 waits in a"), StalledRank(1, "Waiting", "rank 1 waits in b"))
        assert progressing(run(join(stall(300), hung(300)), stalled=places))[2].endswith(
            "; rank 0 waits in a; rank 1 waits in b"
        )

    @pytest.mark.parametrize("state", ["IO", "Busy"])
    def test_slow_rank_is_quoted_with_a_peer_and_the_remedy(self, state: str) -> None:
        states = {0: state, 1: "Waiting", 2: "Waiting"}
        places = tuple(StalledRank(rank, states[rank], f"in {rank}") for rank in states)
        message = progressing(run(join(stall(300), hung(300)), stalled=places))[2]
        assert "; in 0; in 1; if this is slow by design, raise spec.watchdog.stallSeconds or call" in message

    def test_script_that_reports_no_step_and_uses_no_cpu_is_stalled(self) -> None:
        text = join(page(phase="Running"), hung(300))
        decision = run(text, stalled=BEHIND, seconds=400)
        since = format_time(NOW + timedelta(seconds=100))
        words = "no step reported, and the workers have used no CPU"
        assert progressing(decision)[1:] == (
            "Stalled",
            f"{words} since {since}; rank 1 is in train_step (train.py:50)",
        )
        assert progressing(run(page(phase="Running"), status=decision.status, seconds=500))[1] == "NoStepYet"

    def test_log_patterns_delay_stall_until_start_seconds(self) -> None:
        metrics = {"logPatterns": ["step (?P<step>[0-9]+)"]}
        early, late = (run(join(page(phase="Running"), hung(age)), metrics=metrics) for age in (899, 900))
        assert progressing(early)[1] == "NoStepYet"
        assert progressing(late)[1] == "Stalled"

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "Stalled"),
            (page(phase="Running", step=57), "Stalled"),
            (page(phase="Running", step=58), "Training"),
            (page(phase="Running", step=3), "Training"),
            (page(phase="Running"), "NoStepYet"),
            (page(phase="Rendezvous", step=57), "NoStepYet"),
        ],
        ids=["no page", "the hung workers were ended", "a step", "a step of a new epoch", "new workers", "they meet"],
    )
    def test_stall_ends_with_step_not_with_ended_workers(self, text: str, reason: str) -> None:
        stalled = run(stall(120)).status
        assert progressing(run(text, status=stalled, seconds=20))[1] == reason

    async def test_all_pods_are_read_once_and_one_event_is_emitted(self) -> None:
        harness = await ReconcilerHarness(hooks=HOOKS, nodes=3).train(stall(0))
        harness.cluster.page = stall(150)
        for _ in range(12):
            harness.clock.advance(10)
            await harness.settle()
        assert harness.state("Progressing") == ("False", "Stalled")
        assert harness.events.count("Stalled") == 1
        scrapes = harness.cluster.calls.count("report")
        assert scrapes <= 14 + 4 * 2, "the other two pods are read once a minute, and when the stall begins"
        harness.cluster.page = stall(0)
        harness.clock.advance(10)
        await harness.settle()
        assert harness.events[-1] == "Training"

    async def test_stall_message_is_equal_after_restart_of_operator(self) -> None:
        place = {"rank": 1, "state": "Busy", "what": "rank 1 is in train_step (train.py:50)"}
        harness = await ReconcilerHarness(hooks=HOOKS, nodes=2).train(stall(0))
        harness.cluster.page = join(stall(150), hung(150))
        harness.clock.advance(10)
        await harness.settle()
        harness.cluster.page = stall(150, stalled=150, stalled_ranks=[place])
        for _ in range(12):
            harness.clock.advance(10)
            await harness.settle()
        assert harness.events.count("Stalled") == 2, "once that it stalls, once where"
        assert harness.condition(c.PROGRESSING).message.count("rank 1 is in train_step (train.py:50)") == 1

    def test_events_of_hostile_pods_are_bounded(self) -> None:
        long = replace(STARTED, progress=Progress(step=10**9))
        ranks = {n: RankProgress(steps=n) for n in range(9999)}
        assert len(progressing(run(stall(120), status=long, ranks=ranks))[2]) < 300
