"""The simulation of effective training time: where its seconds go, its limits, and what makes it better or worse."""

from __future__ import annotations

import random
import re
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench import ettr
from tests.bench.ettr_model import RecoveryPolicy, compute_share, simulate
from tests.support import ROOT

DAY = 86400.0
MONTH = 30 * DAY
SECONDS = st.floats(0, 7200)


def run(rate: float, policy: RecoveryPolicy, *, seconds: float = MONTH, seed: int = 0) -> float:
    return simulate({"a": rate}, policy, seconds, random.Random(seed)).effective_share


@given(
    rates=st.dictionaries(st.sampled_from("abc"), st.floats(0, 1e-3), min_size=1),
    recovery=SECONDS,
    spare=SECONDS,
    spares=st.integers(0, 3),
    kept=st.floats(1, 7200),
    overhead=st.floats(0, 0.5),
    seed=st.integers(0, 2**32),
)
def test_seconds_of_all_kinds_add_up_to_the_whole_time(
    rates: dict[str, float], recovery: float, spare: float, spares: int, kept: float, overhead: float, seed: int
) -> None:
    policy = RecoveryPolicy(dict.fromkeys("abc", recovery), {"a": spare}, spares, 3600.0, kept, overhead)
    spent = simulate(rates, policy, DAY, random.Random(seed))
    assert spent.total == pytest.approx(DAY)
    assert min(spent.effective, spent.overhead, *spent.down.values(), *spent.repeated.values()) >= 0
    assert {name for name in rates if spent.lost(name)} <= {name for name, rate in rates.items() if rate}


def test_without_failures_all_time_is_effective() -> None:
    assert run(0.0, RecoveryPolicy({"a": 600.0})) == 1.0
    assert compute_share(0.0, 600.0, 1800.0) == 1.0


@pytest.mark.parametrize(("mtbf", "recovery", "kept"), [(3600, 60, 1e-3), (3600, 600, 1800), (36000, 1800, 3600)])
def test_one_class_converges_to_the_closed_form(mtbf: float, recovery: float, kept: float) -> None:
    policy = RecoveryPolicy({"a": recovery}, kept_every=kept)
    shares = [run(1 / mtbf, policy, seed=seed) for seed in range(60)]
    spread = statistics.stdev(shares) / len(shares) ** 0.5
    assert statistics.mean(shares) == pytest.approx(compute_share(1 / mtbf, recovery, kept), abs=5 * spread)


def test_closed_form_without_repeated_steps_is_mtbf_over_mtbf_and_recovery_while_recoveries_are_short() -> None:
    for recovery in (1.0, 60.0, 300.0):
        simple = 36000 / (36000 + recovery)
        assert compute_share(1 / 36000, recovery, 1e-6) == pytest.approx(simple, abs=(recovery / 36000) ** 2)


@given(rate=st.floats(1e-6, 1e-3), recovery=SECONDS, kept=st.floats(1, 7200), more=st.floats(1.01, 3))
def test_closed_form_falls_with_each_of_its_parameters(rate: float, recovery: float, kept: float, more: float) -> None:
    share = compute_share(rate, recovery, kept)
    assert compute_share(rate * more, recovery, kept) < share
    assert compute_share(rate, recovery * more, kept) <= share
    assert compute_share(rate, recovery, kept * more) < share


@pytest.mark.parametrize(
    "worse",
    [
        [(1e-5, RecoveryPolicy({"a": recovery})) for recovery in (0.0, 300.0, 1800.0, 7200.0)],
        [(rate, RecoveryPolicy({"a": 300.0})) for rate in (0.0, 1e-6, 1e-5, 1e-4)],
        [(1e-5, RecoveryPolicy({"a": 300.0}, kept_every=kept)) for kept in (10.0, 600.0, 3600.0, 14400.0)],
        [(1e-5, RecoveryPolicy({"a": 300.0}, overhead=overhead)) for overhead in (0.0, 0.01, 0.1)],
        [(1e-4, RecoveryPolicy({"a": 900.0}, {"a": 9.0}, spares, refill=9000.0)) for spares in (3, 2, 1, 0)],
    ],
    ids=["recovery", "rate", "interval", "overhead", "fewer spares"],
)
def test_mean_share_falls_with_each_parameter(worse: list[tuple[float, RecoveryPolicy]]) -> None:
    shares = [statistics.mean(run(rate, policy, seed=seed) for seed in range(40)) for rate, policy in worse]
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) == len(shares)


@pytest.mark.parametrize("spares", [1, 2])
def test_spares_shorten_recoveries_only_while_one_is_free(spares: int) -> None:
    policy = RecoveryPolicy({"a": 600.0}, {"a": 1.0}, spares, refill=MONTH * 2)
    spent = simulate({"a": 1e-5}, policy, MONTH, random.Random(1))
    assert spent.failures > 2
    assert spent.down["a"] == pytest.approx(spares * 1.0 + (spent.failures - spares) * 600.0)


def test_rates_of_llama_3_are_those_of_its_paper() -> None:
    data = ettr.read_times()
    assert sum(cause.count for cause in data.causes) == data.unexpected == 419
    rates = ettr.compute_rates(data, 16384)
    assert sum(rates.values()) * 54 * DAY == pytest.approx(419)


def test_table_of_the_page_is_that_of_the_benchmark() -> None:
    page = Path(ROOT / "docs" / "effective-time.md").read_text(encoding="utf-8")
    data = ettr.read_times()
    assert ettr.render(ettr.simulate_policies(data), data) in page


def test_times_of_a_lost_node_are_the_slowest_that_were_measured() -> None:
    page = Path(ROOT / "docs" / "lost-nodes.md").read_text(encoding="utf-8")
    slowest = [
        float(re.split("-", row.split("|")[4])[-1])
        for row in page.splitlines()
        if row.startswith(("| no power (", "| the same with a spare ("))
    ]
    measured = ettr.read_times().measured
    assert slowest == [measured["node"], measured["node with a spare"]]


def test_what_is_assumed_is_added_to_what_was_measured() -> None:
    data = ettr.read_times()
    recovery, with_spare = ettr.compute_recovery(data, 60.0, 300.0)
    assert recovery == {
        "rank": data.measured["rank"] + 60,
        "pod": data.measured["pod"] + 360,
        "node": data.measured["node"] + 360,
    }
    assert with_spare == {name: data.measured[f"{name} with a spare"] + 60 for name in ("pod", "node")}


def test_page_without_markers_is_not_changed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Without\n")
    with pytest.raises(ValueError, match="substring not found"):
        ettr.write_page(page, "table\n")
    assert page.read_text() == "# Without\n"
