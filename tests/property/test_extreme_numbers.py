"""Reports, termination messages and objects with numbers and times of any size: no pass over a job raises."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ddp_operator.api.cluster import Key
from ddp_operator.api.faults import FAULTS
from ddp_operator.api.status import Status
from ddp_operator.decide.decide import decide
from ddp_operator.decide.diagnosis import list_restart_failures
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.job_events import list_transition_events
from ddp_operator.decide.report import Page
from ddp_operator.decide.transitions import find_transitions
from ddp_pod.contract.series import SERIES
from tests.support.builders import NOW, child_job, child_pod, decode, job, last_words, observe, template, trainer
from tests.support.fuzzing import examples, tally

numbers = st.sampled_from(
    [0, -1, 1, 7.5, 1e-320, 1e-9, 100, 2**31, 9e8, 4e9, 1e12, 1e15, 2**53, 2**63, 1e18, 10**30, 1e300, 1.7e308, -1e308]
) | st.floats(allow_nan=False, allow_infinity=False)
times = st.sampled_from(
    [
        *("2026-11-20T12:00:00Z", "0001-01-01T00:00:00Z", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59Z"),
        *("9999-12-31T23:59:59-23:59", "1969-12-31T23:59:59Z", "2300-01-01T00:00:00Z", "", "soon"),
    ]
)
names = st.sampled_from(sorted(SERIES))


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


@st.composite
def reports(draw: st.DrawFn) -> str:
    """Return a report in which every number is extreme."""
    rank = {camel(name): draw(numbers) for name in draw(st.sets(names, min_size=3))}
    report: dict[str, Any] = {
        "version": 2,
        "phase": draw(st.sampled_from(["Running", "Rendezvous", "Done"])),
        "restarts": draw(st.sampled_from([0, 1, 2**31 - 1, 10**30])),
        "restartStep": draw(numbers),
        "ranks": [{"rank": 0, **rank}, {"rank": draw(st.sampled_from([1, 2**31, 10**30])), **rank}],
        "stall": {"heartbeatAge": draw(numbers), "seconds": draw(numbers), "hangs": 1},
        "uploads": {name: draw(numbers) for name in ("step", "time", "bytes", "failures")},
        "preflight": {
            "done": ["dns"],
            **{name: draw(numbers) for name in ("dnsSeconds", "tcpSeconds", "allReduceSeconds", "allReduceRate")},
            **{"pair": [0, draw(st.sampled_from([1, 2**31, 10**30]))], "pairRate": draw(numbers)},
        },
        "lastFailure": last_words("CUDAError", time=draw(numbers), step=draw(numbers), restarts=1),
    }
    return json.dumps(report)


@st.composite
def pods(draw: st.DrawFn, index: int) -> Any:
    """Return a pod whose times and numbers are extreme."""
    ended = draw(st.booleans())
    message = last_words("CUDAError", time=draw(numbers), step=draw(numbers), progress={"step": draw(numbers)})
    pod = child_pod(index, "Failed" if ended else "Running", code=1 if ended else None, message=message)
    pod["metadata"] |= {"creationTimestamp": draw(times)}
    if draw(st.booleans()):
        grace = draw(st.sampled_from([0, -1, 30, 2**31, 2**63, 10**30]))
        pod["metadata"] |= {"deletionTimestamp": draw(times), "deletionGracePeriodSeconds": grace}
    pod["status"]["startTime"] = draw(times)
    for condition in pod["status"]["conditions"]:
        condition["lastTransitionTime"] = draw(times)
    for container in pod["status"].get("containerStatuses", ()):
        container["state"]["terminated"]["finishedAt"] = draw(times)
        container["restartCount"] = draw(st.sampled_from([0, 2**63, 10**30]))
    return pod


@st.composite
def passes(draw: st.DrawFn) -> tuple[Any, list[Any], list[str], list[float]]:
    """Return a spec, pods, and reports with the seconds between them."""
    seconds = draw(st.sampled_from([1, 60, 2**31 - 1]))
    limits = {"limits": {"nvidia.com/gpu": draw(st.sampled_from(["8", "9e18", "9e63", 10**18]))}}
    spec = {
        "nodes": 2,
        "template": template(trainer(resources=limits)),
        "activeDeadlineSeconds": seconds,
        "pendingDeadlineSeconds": seconds,
        "ttlSecondsAfterFinished": seconds,
    }
    items = [draw(pods(index)) for index in (0, 1)]
    texts = draw(st.lists(reports(), min_size=1, max_size=4))
    gaps = draw(st.lists(st.sampled_from([0.0, 1.0, 600.0, 3e7, -3e7]), min_size=4, max_size=4))
    return spec, items, texts, gaps


@examples(300)
@given(passes())
def test_extreme_numbers_end_no_pass(case: tuple[Any, list[Any], list[str], list[float]]) -> None:
    run_passes(case)
    tally("pass with extreme numbers")


def run_passes(
    case: tuple[Any, list[Any], list[str], list[float]],
    hooks: Hooks | None = None,
    read: Callable[[Page, datetime], Mapping[str, object]] = lambda page, now: {},
) -> Status:
    """Return the status of a job after passes over it. ``hooks``: of features; ``read``: what they observe."""
    spec, items, texts, gaps = case
    status = Status()
    now = NOW
    faults = FAULTS.counts.copy()
    for text, gap in zip([*texts, texts[0]], [*gaps, 10.0], strict=False):
        now += timedelta(seconds=gap)
        page = decode(text)
        typed = job(status=status, **spec)
        seen = observe(typed, [child_job()], items, page)
        failures = list_restart_failures([(pod, page) for pod in seen.pods_of(1)])
        hooks = hooks or Hooks()
        seen = dataclasses.replace(seen, failures_in_place=failures, observed=read(page, now))
        decision = decide(typed, seen, now, hooks=hooks.observe(typed, {}))
        after = hooks.extend(Key("default", "train"), decision.status, now)
        find_transitions(status, after, now)
        list_transition_events(status, after)
        written = msgspec.json.decode(msgspec.json.encode(after))
        assert max(map(abs, list_integers(written)), default=0) < 2**53, "JSON has no larger integers"
        status = msgspec.json.decode(msgspec.json.encode(after), type=Status)
    assert FAULTS.counts == faults, "a range is missing where a number is derived"
    return status


def list_integers(value: Any) -> Iterator[int]:
    """Yield the integers in a JSON value."""
    if isinstance(value, int):
        yield value
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for member in members:
        yield from list_integers(member)
