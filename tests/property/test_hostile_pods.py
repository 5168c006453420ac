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
from ddp_operator.decide.failures import parse_termination
from ddp_operator.decide.metrics_page import parse_page
from tests.support.builders import last_words, resource
from tests.support.fuzzing import examples, tally
from tests.support.scenarios import TRAINING
from tests.support.standin.simulation import OperatorSimulation

from .test_words_of_pods import lines, metrics, numbers, words

PAGE_LIMIT = 1 << 20  # the rest of a page is never read
CPU_SECONDS = 2.0
"""The maximum seconds for one page. It needs some hundredths; quadratic code would take minutes."""

LABELS = ('a="\\\\', "=", ",", 'a="",', "{", '"', '\\"', 'a="' + "x" * 4000)
NUMBERS = ("9" * 400, "1e999", "-1e999", "nan", "0x1p3", "1_0", "\u0663")
# Texts that are repeated until the page is full.
refrains = st.one_of(
    lines,
    st.builds("{}{{rank=\"{}\"}} {}".format, metrics, st.integers(0, 10**6), numbers),
    st.builds("{}{{{}".format, metrics, st.sampled_from(LABELS)),
    st.builds("{} {}".format, metrics, st.sampled_from(NUMBERS)),
    st.sampled_from(["# HELP ddp_step x", "# TYPE ddp_step histogram", "ddp_step", "\x00", "\ud800", "\r", "\t", " "]),
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


# Joining repetitions without a line's end creates one endless line.
hostile_pages = st.builds(
    lambda text, joint, size: fill(text + joint, size),
    refrains,
    st.sampled_from(["\n", "\n", "", " ", "{"]),
    st.sampled_from([0, 1000, 100_000, PAGE_LIMIT]),
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
def test_any_page_is_read_in_no_time(page_text: Long) -> None:
    text = str(page_text)[:PAGE_LIMIT]
    began = time.process_time()
    page = parse_page(text)
    assert time.process_time() - began < CPU_SECONDS
    assert len(page.values) < 64
    assert len(page.ranks) <= 256
    tally("page of a hostile pod")


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
def test_hostile_neighbour_has_no_effect(text: Long, message: Long, code: int) -> None:
    sim = asyncio.run(beside_each_other(str(text)[:PAGE_LIMIT], str(message), code))
    good = sim.status("good")
    bad = sim.status("bad")
    assert (good.phase, good.attempt, good.restarts.total) == ("Succeeded", 1, 0)
    assert good.progress is not None
    assert good.progress.step == 7
    assert not sim.refused
    assert len(msgspec.json.encode(bad)) < 64_000
    assert sim.calls.count(f"update {constants.PLURAL}/status") < 40, "it makes the operator write and write"
    tally("hostile pod beside a good one")


def test_hostile_neighbour_without_limits_has_effect() -> None:
    result: Any = asyncio.run(beside_each_other(TRAINING, "", 1))
    assert result.status("bad").attempt == 2
