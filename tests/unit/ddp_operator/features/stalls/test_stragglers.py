"""Stragglers: which ranks are slow between two readings, and why."""

from datetime import timedelta

import pytest

from ddp_operator.api.status import Straggler
from ddp_operator.features.stalls.stragglers import Comparison, find_stragglers
from ddp_pod.contract.progress import MachineTime, RankProgress
from tests.support.builders import NOW


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
