"""The coroutines for which an event loop waits, read from another thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ddp_pod.features.watchdog.collectives import parse_report
from ddp_pod.features.watchdog.stacks import Stack, StackFrame, add_awaited
from ddp_pod.rank.coroutines import find_awaited_frames

WAITS = ["consume", "wait"]


async def consume(event: asyncio.Event) -> None:
    await event.wait()


async def await_directly(event: asyncio.Event) -> None:
    await consume(event)


async def await_task(event: asyncio.Event) -> None:
    await asyncio.create_task(consume(event))


async def gather(event: asyncio.Event) -> None:
    await asyncio.gather(asyncio.sleep(0), consume(event))


async def wait_for_any(event: asyncio.Event) -> None:
    await asyncio.wait([asyncio.create_task(consume(event))])


@pytest.mark.parametrize("work", [await_directly, await_task, gather, wait_for_any])
def test_frames_lead_to_what_is_awaited(work: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    seen: list[list[str]] = []

    def watch(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (seen and seen[-1][-2:] == WAITS):
            time.sleep(0.01)
            seen.append([frame.f_code.co_name for frame in find_awaited_frames()])
        loop.call_soon_threadsafe(event.set)

    async def run() -> None:
        event = asyncio.Event()
        threading.Thread(target=watch, args=(asyncio.get_running_loop(), event)).start()
        await work(event)

    asyncio.run(run())
    functions = seen[-1]
    assert functions[:2] == ["run", work.__name__]
    assert functions[-2:] == WAITS
    assert find_awaited_frames() == [], "no loop runs"


def test_awaited_frames_complete_a_stack_that_ends_in_the_loop() -> None:
    awaited = parse_report({"groups": [], "awaited": [["/job/train.py", 7, "consume"]]}).awaited
    assert awaited == [StackFrame("/job/train.py", 7, "consume")]
    library = "/usr/lib/python3.11"
    script = StackFrame("/job/train.py", 30, "<module>")
    loop = [
        StackFrame(f"{library}/asyncio/base_events.py", 640, "run_until_complete"),
        StackFrame(f"{library}/selectors.py", 468, "select"),
    ]
    assert add_awaited(Stack([script, *loop], "Stack"), awaited).place == "consume (train.py:7)"
    assert add_awaited(Stack([script, loop[1]], "Stack"), awaited).frames[-1] == loop[1], "another selector"
    assert add_awaited(Stack([script], "Stack"), awaited).frames == [script], "the loop does not wait"
