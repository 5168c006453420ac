"""Stalls, stragglers, goodput and the cost of restarts: values with formulas, bounded for every page."""

import dataclasses
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api import constants
from ddp_operator.api.kubeobjects import format_time
from ddp_operator.api.status import CheckpointStatus, Progress, Status, Straggler
from ddp_operator.decide import conditions as c
from ddp_operator.decide.decide import decide
from ddp_operator.decide.report import compute_goodput, drop_eta
from ddp_operator.decide.stalls import MAX_PODS, Comparison, find_stragglers, is_stalled, sample_pods, stalled_since
from ddp_operator.decide.state import Decision, Stall
from ddp_operator.reading.objects import view_pod
from ddp_pod.contract.progress import MachineTime, RankProgress
from ddp_pod.contract.report import StalledRank
from tests.support.builders import NOW, child_job, child_pod, decode, job, join, last_words, observe, page
from tests.support.decisions import RUNNING, STARTED, present
from tests.support.fake_cluster import ReconcilerHarness

BEHIND = (StalledRank(1, "Behind", "rank 1 is in train_step (train.py:50)"),)


def run(
    text: str,
    *,
    status: Status = STARTED,
    ranks: Any = None,
    seconds: float = 1,
    pods: Any = RUNNING,
    stalled: tuple[StalledRank, ...] = (),
    began: Stall | None = None,
    **spec: Any,
) -> Decision:
    typed = job(status=status, nodes=2, **spec)
    jobs = [child_job(), child_job(2)] if status.attempt == 2 else [child_job()]
    now = NOW + timedelta(seconds=seconds)
    result = decode(text) if text else None
    seen = observe(typed, jobs, pods, result)
    if result is not None and is_stalled(typed, result):
        began = began or Stall(stalled_since(result, now), ranks or {})
        seen = dataclasses.replace(seen, stall=dataclasses.replace(began, places=stalled))
    return decide(typed, seen, now)


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
        harness = await ReconcilerHarness(nodes=3).train(stall(0))
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
        harness = await ReconcilerHarness(nodes=2).train(stall(0))
        harness.cluster.page = join(stall(150), hung(150))
        harness.clock.advance(10)
        await harness.settle()
        harness.cluster.page = stall(150, stalled=150, stalled_ranks=[place])
        for _ in range(12):
            harness.clock.advance(10)
            await harness.settle()
        assert harness.events.count("Stalled") == 2, "once that it stalls, once where"
        assert harness.condition(c.PROGRESSING).message.count("rank 1 is in train_step (train.py:50)") == 1


class TestStragglers:
    def ranks(self, **work: tuple[float, float]) -> tuple[dict[int, RankProgress], dict[int, RankProgress]]:
        before = {int(rank[1:]): RankProgress(steps=10, compute_seconds=100, data_seconds=50) for rank in work}
        now = {
            int(rank[1:]): RankProgress(steps=20, compute_seconds=100 + 10 * compute, data_seconds=50 + 10 * wait)
            for rank, (compute, wait) in work.items()
        }
        return before, now

    def test_stragglers_exceed_median(self) -> None:
        result = find_stragglers(*self.ranks(r0=(1.0, 0.0), r1=(1.0, 0.1), r2=(1.9, 0.1), r3=(0.5, 1.0), r4=(1.0, 0.0)))
        assert result == (
            Straggler(rank=2, ratio="1.8", cause="compute"),
            Straggler(rank=3, ratio="1.4", cause="data"),
        )

    def test_even_load_or_single_rank_has_no_straggler(self) -> None:
        assert find_stragglers(*self.ranks(r0=(1.0, 0.2), r1=(1.2, 0.1))) == ()
        assert find_stragglers(*self.ranks(r0=(9.0, 0.0))) == ()
        assert find_stragglers({}, {}) == ()

    def test_two_ranks_compare_slower_with_faster(self) -> None:
        result = find_stragglers(*self.ranks(r0=(1.0, 0.0), r1=(11.0, 0.0)))
        assert result == (Straggler(rank=1, ratio="11.0", cause="compute"),)

    @pytest.mark.parametrize(
        ("slow", "fast", "cause"),
        [
            ({"throttled_seconds": 5.0, "cpu_wait_seconds": 6.0}, {}, "throttled"),
            ({"throttled_seconds": 4.0}, {}, "compute"),
            ({"throttled_seconds": 5.0}, {"throttled_seconds": 5.0}, "compute"),
            ({"memory_seconds": 9.0, "storage_seconds": 9.0}, {"storage_seconds": 0.5}, "memory"),
            ({"storage_seconds": 9.0}, {}, "storage"),
            ({"cpu_wait_seconds": 10.0, "cpu_seconds": 1.0}, {}, "cpu"),
            ({"child_cpu_wait_seconds": 10.0, "cpu_seconds": 0.1}, {}, "cpu"),
            ({"cpu_wait_seconds": 6.0, "cpu_seconds": 4.0}, {}, "compute"),
            ({"cpu_wait_seconds": 10.0, "cpu_seconds": 1.0}, {"cpu_wait_seconds": 0.5}, "compute"),
            ({"cpu_seconds": 10.0}, {}, "compute"),
            ({"cpu_seconds": 1.0}, {}, "sleep"),
            ({"cpu_seconds": 1.0, "child_cpu_seconds": 9.0}, {"child_cpu_seconds": 1.0}, "data"),
            ({"cpu_seconds": -1.0}, {}, "compute"),
        ],
    )
    def test_cause_is_what_explains_most_of_the_excess(
        self, slow: dict[str, float], fast: dict[str, float], cause: str
    ) -> None:
        before, now = self.ranks(r0=(1.0, 0.0), r1=(11.0, 0.0))
        for rank, machine in enumerate((fast, slow)):
            before[rank].machine = MachineTime(*[100.0] * 7)
            per_step = {"cpu_seconds": 9.0, **machine}
            now[rank].machine = MachineTime(
                **{name: seconds + 10 * per_step.get(name, 0.0) for name, seconds in vars(before[rank].machine).items()}
            )
        (straggler,) = find_stragglers(before, now)
        assert straggler.cause == cause

    def test_first_comparison_of_an_attempt_is_early_and_needs_more_steps(self) -> None:
        before, now = self.ranks(r0=(1.0, 0.0), r1=(11.0, 0.0))
        first = Comparison(NOW, 1, before, is_first=True)
        later = Comparison(NOW, 1, before, is_first=False)
        soon = NOW + timedelta(seconds=15)
        assert (first.is_due(soon), later.is_due(soon)) == (True, False)
        assert later.is_due(NOW + timedelta(seconds=60))
        assert [straggler.rank for straggler in first.find_stragglers(1, now) or ()] == [1]
        assert first.find_stragglers(2, now) is None
        for progress in now.values():
            progress.steps = 19.0
        assert first.find_stragglers(1, now) == ()
        assert [straggler.rank for straggler in later.find_stragglers(1, now) or ()] == [1]

    def test_unknown_machine_leaves_the_part_of_the_step(self) -> None:
        before, now = self.ranks(r0=(1.0, 0.0), r1=(11.0, 0.0))
        now[1].machine = MachineTime(throttled_seconds=1e9)
        assert find_stragglers(before, now)[0].cause == "compute"

    def test_restarted_rank_is_omitted(self) -> None:
        before, now = self.ranks(r0=(1, 0), r1=(1, 0), r2=(9, 0))
        now[2] = RankProgress(steps=5, compute_seconds=1, data_seconds=1)
        assert find_stragglers(before, now) == ()

    def test_list_is_bounded(self) -> None:
        before = {n: RankProgress() for n in range(100)}
        now = {n: RankProgress(steps=1, compute_seconds=1e300 if n < 40 else 1.0) for n in range(100)}
        result = find_stragglers(before, now)
        assert len(result) == 8
        assert result[0].ratio == "1000000.0"

    def test_few_pods_are_all_sampled(self) -> None:
        running = [view_pod(child_pod(index)) for index in range(5)]
        peers = [view_pod(child_pod(5, "Pending")), view_pod(child_pod(6, deleting=True))]
        assert [pod.index for pod in sample_pods([*running, *peers], 5)] == [1, 2, 3, 4]
        assert [pod.index for pod in sample_pods(running, 3)] == [1, 3]

    def test_pods_are_even_spread_of_many(self) -> None:
        typed = job(status=STARTED)
        pods = observe(typed, [child_job()], [child_pod(n) for n in range(100)]).pods_of(1)
        chosen = sample_pods(pods)
        assert len(chosen) == MAX_PODS - 1
        assert len({pod.index for pod in chosen}) == MAX_PODS - 1
        assert max(pod.index for pod in chosen) > 80
        assert [pod.index for pod in sample_pods(pods[:4])] == [1, 2, 3]


class TestGoodput:
    VALUES = RankProgress(step=100.0, steps=50.0, step_seconds=100.0)

    def test_is_kept_steps_at_their_mean_time_over_wall_time(self) -> None:
        assert compute_goodput(self.VALUES, 400.0) == "0.50"

    def test_goodput_is_at_most_one(self) -> None:
        assert compute_goodput(self.VALUES, 10.0) == "1.00"

    @pytest.mark.parametrize(
        "values",
        [
            RankProgress(),
            dataclasses.replace(VALUES, steps=0.0),
            dataclasses.replace(VALUES, step_seconds=None),
            dataclasses.replace(VALUES, step=-1.0),
        ],
    )
    def test_unknown_goodput_is_omitted(self, values: Any) -> None:
        assert compute_goodput(values, 100.0) is None
        assert compute_goodput(self.VALUES, 0.0) is None


class TestCostOfARestart:
    @pytest.mark.parametrize(
        ("checkpoint", "first", "made", "estimate", "lost"),
        [
            (None, 1, 1, None, 57),  # from the start
            (None, 58, 1, None, 0),  # it has saved at SIGTERM, or each step, without reporting it
            (None, 60, 20, None, 17),  # 20 steps when its page is first read
            (50, 58, 1, 7, 0),  # saved after the last page was read
            (50, 51, 1, 7, 7),
            (None, 60, None, None, None),  # its page does not contain its first step
            (50, 60, None, 7, 7),
        ],
    )
    def test_lost_steps_are_corrected_by_first_step(
        self, checkpoint: int | None, first: int, made: int | None, estimate: int | None, lost: int | None
    ) -> None:
        saved = {} if checkpoint is None else {"checkpoint_step": checkpoint}
        failed = child_pod(1, "Failed", code=82, message=last_words("CUDAError"))
        trained = run(page(phase="Running", step=57, **saved)).status
        begun = run("", status=trained, pods=(child_pod(0), failed), seconds=3).status
        assert (present(begun.last_restart).step, present(begun.last_restart).steps_lost) == (57, estimate)
        pods = [child_pod(n, attempt=2) for n in (0, 1)]
        status = begun
        for more in (0, 30):
            counted = {} if made is None else {"steps": made + more}
            seen = page(phase="Running", step=first + more, **counted)
            status = run(seen, status=status, pods=pods, seconds=20 + more).status
            assert present(status.last_restart).steps_lost == lost

    @pytest.mark.parametrize("time", [NOW.timestamp() + 3000, NOW.timestamp() - 3000])
    def test_wrong_pod_clock_does_not_change_restart_time(self, time: float) -> None:
        failed = child_pod(1, "Failed", code=82, message=last_words("CUDAError", time=time))
        begun = run(page(step=5), pods=(child_pod(0), failed), seconds=3).status
        assert present(begun.last_restart).time == NOW + timedelta(seconds=3)


class TestProgressAcrossARestart:
    """Displayed values are never older than those that the run has reported."""

    BEFORE = replace(STARTED, progress=Progress(step=30, loss="1"), checkpoint=CheckpointStatus(step=30))
    SAVED = last_words("Preempted", progress={"step": 37.0, "checkpointStep": 36.0, "loss": 0.5})

    def test_late_termination_message_counts(self) -> None:
        going = child_pod(0, deleting=True, disrupted=True, grace=60)
        begun = run("", status=self.BEFORE, pods=(going, child_pod(1))).status
        assert (begun.attempt, self.shown(begun)) == (2, (30, "1", 30, 0))
        gone = child_pod(0, "Failed", code=constants.EXIT_PREEMPTED, message=self.SAVED, deleting=True)
        later = run("", status=begun, pods=(gone,)).status
        assert self.shown(later) == (37, "0.5", 36, 1)
        assert later.counts == begun.counts
        assert run("", status=later, pods=(gone,), seconds=9).status == later
        # From the first pod of the new attempt on, its own values are shown.
        own = run(page(phase="Running", step=36), status=later, pods=(gone, child_pod(0, attempt=2))).status
        assert own.progress is not None
        assert own.progress.step == 36
        assert run("", status=own, pods=(gone, child_pod(0, attempt=2))).status.progress == drop_eta(own.progress)

    def shown(self, status: Status) -> tuple[int | None, str | None, int, int | None]:
        lost = status.last_restart.steps_lost if status.last_restart else None
        return present(status.progress).step, present(status.progress).loss, present(status.checkpoint).step, lost


def hostile_pages() -> Iterator[tuple[str, str]]:
    numbers = {item.name: 1e308 for item in dataclasses.fields(RankProgress) if item.default is None}
    yield "huge numbers", page(phase="Running", **numbers)
    yield "negative numbers", page(phase="Running", heartbeat_age=-1e9, **dict.fromkeys(numbers, -1e308))
    yield "a million ranks", page(phase="Running", ranks=[{"rank": n, "step": 1} for n in range(10_000)])
    yield "one endless text", page(phase="Running", step=3, stepHint="9" * 200_000)
    yield "nested lists", '{"version": 2, "phase": "Running", "ranks": ' + "[" * 9000
    yield "no report", 'ddp_step{rank="0"} 3'


class TestHostilePods:
    @pytest.mark.parametrize(("name", "text"), list(hostile_pages()), ids=[name for name, _ in hostile_pages()])
    async def test_hostile_page_gives_storable_status(self, name: str, text: str) -> None:
        harness = await ReconcilerHarness().train(text)
        for _ in range(8):
            harness.clock.advance(20)
            await harness.settle()
        assert len(decode(text).ranks) <= 256
        assert harness.raw is not None
        assert len(str(harness.raw["status"])) < 10_000
        assert harness.status.phase == "Running"
        assert "nan" not in str(harness.status.goodput)

    async def test_termination_message_of_ten_megabytes_is_cut(self) -> None:
        harness = await ReconcilerHarness().train(page(phase="Running", step=3))
        harness.end_pod(1, constants.EXIT_RETRYABLE, "x" * 10_000_000)
        await harness.settle()
        failure = present(harness.status.last_failure)
        assert len(failure.message) <= 2048
        assert harness.status.attempt == 2

    def test_events_of_hostile_pods_are_bounded(self) -> None:
        long = replace(STARTED, progress=Progress(step=10**9))
        ranks = {n: RankProgress(steps=n) for n in range(9999)}
        assert len(progressing(run(stall(120), status=long, ranks=ranks))[2]) < 300
