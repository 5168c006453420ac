"""A pod with any message, length and clock harms only its own job, and at little cost."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ddp_operator.api import constants
from ddp_operator.reading.terminations import parse_termination
from ddp_pod.contract.run_report import REPORT_LIMIT
from tests.support.builders import decode, last_words, resource
from tests.support.fuzzing import examples, tally
from tests.support.scenarios import TRAINING
from tests.support.standin.simulation import OperatorSimulation

from .test_words_of_pods import words

CPU_SECONDS = 2.0
"""The maximum seconds for one report. It needs some hundredths; quadratic code would take minutes."""

BEGINNINGS = (
    "",
    '{"version": 2, "phase": "Running", "ranks": [',
    '{"version": 2, "stall": {"ranks": [',
    '{"stepHint": "',
)
# Texts that are repeated until the report is full.
REFRAINS = (
    '{"rank": 1, "step": 1e999},', '{"rank": 1, "step": -1e308, "steps": 5},', '{"rank": 999999999999999999999},', "[",
    '{"a":', '"\\ud800",', "\x00", "\r", "9", '"', '\\"',
    '{"rank": 1, "state": "Busy", "what": "\\u001b[2J"},', "\u0663", "{}",
)  # fmt: skip


@dataclass(frozen=True)
class Long:
    """A text with a number of repetitions, which is short in a report."""

    text: str
    times: int

    def __str__(self) -> str:
        return self.text * self.times


def fill(text: str, size: int) -> Long:
    return Long(text, max(1, size // max(1, len(text))))


hostile_pages = st.builds(
    lambda beginning, text, size: f"{beginning}{fill(text, size)}",
    st.sampled_from(BEGINNINGS),
    st.sampled_from(REFRAINS) | st.text(min_size=1, max_size=30),
    st.sampled_from([0, 1000, REPORT_LIMIT - 100, REPORT_LIMIT]),
)
moments = st.one_of(st.floats(), st.floats(-1e10, 1e10), st.integers(-(10**18), 10**18))
hostile_words = st.one_of(
    words.map(lambda text: Long(text, 1)),
    st.builds(Long, st.text(min_size=1, max_size=9), st.sampled_from([1, 4096, 10**6])),
    st.builds(lambda when: Long(msgspec.json.encode(last_words("NCCL", time=when)).decode(), 1), moments),
    st.builds(Long, st.just("["), st.integers(0, 10**5)),
    st.just(Long("x", 10_000_000)),
)


@examples(60)
@given(hostile_pages)
def test_any_report_is_read_in_no_time(text: str) -> None:
    began = time.process_time()
    page = decode(text)
    assert time.process_time() - began < CPU_SECONDS
    assert len(page.ranks) <= 256
    tally("report of a hostile pod")


@examples(60)
@given(hostile_words, st.integers(0, 255))
def test_any_termination_message_is_parsed_quickly(message: Long, code: int) -> None:
    text = str(message)
    began = time.process_time()
    end = parse_termination(code, "Error", text)
    assert time.process_time() - began < CPU_SECONDS
    assert sum(map(len, (end.message, end.traceback, end.remedy))) <= 3 * 2048
    tally("last words of a hostile pod")


async def beside_each_other(text: str, message: str, code: int) -> OperatorSimulation:
    """Run a hostile and a normal job side by side; the hostile one ends while the other runs."""
    sim = OperatorSimulation()
    for name in ("bad", "good"):
        sim.create(resource(name, nodes=2, recovery={"maxRestarts": 1}))
    await sim.settle()
    sim.pages = {"bad": text, "good": TRAINING}
    for name in ("bad", "good"):
        for pod in sim.pods(name=name):
            sim.run_pod(pod)
    await sim.settle(30)
    sim.end_pod(sim.pods(name="bad")[1], code, message)
    await sim.settle(30)
    for pod in sim.pods(name="good"):
        sim.end_pod(pod)
    await sim.settle(5)
    return sim


@examples(8)
@given(hostile_pages, hostile_words, st.sampled_from([1, 81, 82, 84, 137]))
def test_hostile_neighbour_has_no_effect(text: str, message: Long, code: int) -> None:
    sim = asyncio.run(beside_each_other(text, str(message), code))
    good = sim.status("good")
    bad = sim.status("bad")
    assert (good.phase, good.attempt, good.counts.total) == ("Succeeded", 1, 0)
    assert good.progress is not None
    assert good.progress.step == 7
    assert not sim.refused
    assert len(msgspec.json.encode(bad)) < 64_000
    assert sim.calls.count(f"update {constants.PLURAL}/status") < 40, "it makes the operator write and write"
    tally("hostile pod beside a good one")


def test_hostile_neighbour_without_limits_has_effect() -> None:
    result: Any = asyncio.run(beside_each_other(TRAINING, "", 1))
    assert result.status("bad").attempt == 2
