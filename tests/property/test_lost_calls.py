"""The operator is killed at any call, or a call fails: the job ends as without faults.

Each scenario runs once undisturbed, then once for every call of the operator: the process ends right after that call
and a new one starts without memory; or the call fails, or its response is lost, and the same process continues.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from ddp_operator.api.constants import KIND
from tests.support.fuzzing import THOROUGH, tally
from tests.support.scenarios import (
    ENDS,
    SCENARIOS,
    Scenario,
    end_of,
    fail_once,
    lose_a_node,
    succeed,
)
from tests.support.standin.simulation import Fence, OperatorSimulation

FAULTS: tuple[Any, ...] = (409, 410, 429, 500, 503, 504, 401, "drop", "timeout", "lost answer")
WHOLE = (fail_once,)
"""Scenarios in which a quick run also tries every call. In all others it tries a sample."""
WAKES = (0, 1, 2, 5, 9, 14, 20, 40, None)
"""A deposed operator resumes after as many calls of its successor (None: at the end). The first six calls are lists."""
each_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)


def play(scenario: Scenario, *, fault: Any = None, nth: int = 0, **about: Any) -> OperatorSimulation:
    """Play a scenario to its end in a simulation with these attributes, and with a fault in its nth call."""
    sim = OperatorSimulation()
    for name, value in about.items():
        setattr(sim, name, value)
    if nth:
        sim.faults.add(fault, nth=nth)
    asyncio.run(to_the_end(scenario, sim))
    return sim


async def to_the_end(scenario: Scenario, sim: OperatorSimulation) -> None:
    await scenario(sim)
    while sim.deposed:
        await sim.wake(sim.deposed[0])
        await sim.settle(20)


@cache
def undisturbed(scenario: Scenario) -> tuple[Any, list[str]]:
    """Return how a scenario ends, and the calls that it takes."""
    sim = play(scenario)
    assert len(sim.calls) > 10
    status = sim.status() if sim.get(KIND, "train") else None
    assert (status and (status.phase, status.attempt, status.counts.counted)) == ENDS[scenario]
    assert sim.kueue is None or not sim.kueue.bypassed()
    return end_of(sim), sim.calls


def check(
    scenario: Scenario, expected: Any, sim: OperatorSimulation, fault: str, *, besides: Sequence[Any] = ()
) -> None:
    """Compare the ends of a scenario. ``besides``: late writes, some of which may replace others."""
    result = end_of(sim)
    more = list((Counter(result["made"]) - Counter(expected["made"])).elements())
    if besides and not Counter(more) - Counter(besides):
        result["made"] = sorted((Counter(result["made"]) - Counter(more)).elements())
    for part, value in expected.items():
        assert result[part] == value, f"{scenario.__name__}: {part} differs after {fault}"
    assert sim.kueue is None or not sim.kueue.bypassed(), f"{scenario.__name__}: let run past Kueue after {fault}"
    twice = [reason for reason in set(sim.events) - {"lost"} if sim.events.count(reason) > 4]
    assert not twice, f"{scenario.__name__}: Events again and again after {fault}: {twice}"


@each_scenario
def test_operator_killed_between_any_calls_loses_nothing(scenario: Scenario) -> None:
    expected, calls = undisturbed(scenario)
    for number in range(1, len(calls) + 1, 1 if THOROUGH or scenario in WHOLE else 14):
        sim = play(scenario, kill_after=number)
        assert sim.lives >= 3
        check(scenario, expected, sim, f"the end of the process behind call {number}, {calls[number - 1]}")
        tally("operator killed at a call")


@each_scenario
def test_any_failed_call_is_recovered(scenario: Scenario) -> None:
    expected, calls = undisturbed(scenario)
    # Pods' pages are no calls of the API server.
    count = len([call for call in calls if call != "scrape"])
    tries = [(fault, number) for number in range(1, count + 1) for fault in FAULTS]
    for fault, number in tries[SCENARIOS.index(scenario) :: 1 if THOROUGH else 211]:
        sim = play(scenario, fault=fault, nth=number)
        check(scenario, expected, sim, f"call {number} was answered with: {fault}")
        tally("API call broken")


@each_scenario
@pytest.mark.parametrize("fence", ["closed", "late", "open"])
def test_deposed_operator_changes_nothing_when_it_resumes(scenario: Scenario, fence: Fence) -> None:
    expected, calls = undisturbed(scenario)
    tries = [(number, after) for number in range(1, len(calls) + 1) for after in WAKES]
    for number, after in tries[SCENARIOS.index(scenario) :: 1 if THOROUGH else 211]:
        sim = play(scenario, stop_at=number, fence=fence, wake_after=after, stale_passes=2)
        fault = f"standing still at call {number}, {calls[number - 1]}, and going on after {after} more"
        assert sim.lives >= 3
        check(scenario, expected, sim, fault, besides=list(sim.late_writes.values()))
        writes = [call for call in sim.late if not call.startswith(("get", "list"))]
        assert fence == "open" or len(writes) <= (fence == "late"), f"{scenario.__name__}: {writes} after {fault}"
        tally("operator deposed at a call")


@each_scenario
@pytest.mark.parametrize("watches", [{"frozen": True}, {"echo": 7}], ids=["silent", "repeating"])
def test_silent_or_repeated_watches_change_nothing(scenario: Scenario, watches: dict[str, Any]) -> None:
    expected, _ = undisturbed(scenario)
    check(scenario, expected, play(scenario, **watches), f"watches that were {watches}")
    tally("watches broken")


def test_comparison_can_fail() -> None:
    ends = [end_of(play(scenario)) for scenario in (succeed, fail_once, lose_a_node)]
    assert ends[0]["status"] != ends[1]["status"] != ends[2]["status"]
    assert ends[0]["made"] != ends[1]["made"]
