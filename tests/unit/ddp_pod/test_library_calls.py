"""What the libraries in which a rank waits are documented to do."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from ddp_pod.base.pod import WorkerRecord
from ddp_pod.features.watchdog import helpers
from ddp_pod.features.watchdog.collectives import LibraryCall, RankCollectives, parse_report
from ddp_pod.features.watchdog.stacks import Stack, StackFrame
from ddp_pod.rank.coroutines import find_awaited_frames
from ddp_pod.rank.library_calls import describe_library_call, read_documentation

LIBRARY = "/usr/lib/python3.11/site-packages/store.py"


def compiled(source: str, path: str = LIBRARY) -> CodeType:
    """Return the code of the function in a file."""
    names: dict[str, Any] = {}
    exec(compile(source, path, "exec"), names)
    code: CodeType = names["f"].__code__
    return code


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def f():\n  'Wait.'", "Wait."),
        (
            "def f():\n  '''Wait for\n    it.\n\n    Another\n    sets it.\n\n    :param x: no\n'''",
            "Wait for it. Another sets it.",
        ),
        ("def f():\n  '''Wait.\n\n  Args:\n    x: no'''", "Wait."),
        ("def f():\n  '''Wait.\n\n  Returns\n  -------\n  x'''", "Wait."),
        ("def f():\n  '''Wait.\n\n  >>> f()'''", "Wait."),
        ("def f():\n  return 'text'", ""),
        ("f = lambda: 'text'", ""),
        (f"def f():\n  'A {'long ' * 200}sentence.'", ""),
        (f"def f():\n  'Short. A {'long ' * 200}sentence.'", "Short."),
    ],
)
def test_whole_sentences_are_read(source: str, text: str) -> None:
    assert read_documentation(compiled(source)) == text


def test_texts_of_the_script_are_not_read() -> None:
    assert read_documentation(compiled("def f(): 'Secret.'", "/job/train.py")) == ""


async def wait_for_queue(_: object) -> None:
    tasks: asyncio.Queue[int] = asyncio.Queue()
    tasks.put_nowait(1)
    await asyncio.wait_for(tasks.join(), 60)


def join_queue(stop: threading.Event) -> None:
    tasks: queue.Queue[int] = queue.Queue()
    tasks.put(1)
    threading.Thread(target=lambda: (stop.wait(), tasks.task_done())).start()
    tasks.join()


def wait_for_result(stop: threading.Event) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(stop.wait).result()


@pytest.mark.parametrize(
    ("wait", "name"),
    [
        (join_queue, "Queue.join"),
        (wait_for_result, "Future.result"),
        (threading.Event.wait, "Event.wait"),
        (lambda _: time.sleep(1), ""),
    ],
)
def test_call_of_the_script_is_described(wait: Callable[[threading.Event], object], name: str) -> None:
    expected = name if sys.version_info >= (3, 11) else name.rpartition(".")[2]
    stop = threading.Event()
    seen: list[list[str]] = []

    def watch() -> None:
        deadline = time.monotonic() + (10 if name else 0.5)
        while time.monotonic() < deadline and not (name and seen and seen[-1][2:3] == [expected]):
            seen.append(describe_library_call(()))
            time.sleep(0.01)
        stop.set()

    threading.Thread(target=watch).start()
    wait(stop)
    assert seen[-1][2:3] == ([expected] if name else [])


def test_call_of_an_awaited_coroutine_is_described() -> None:
    seen: list[list[str]] = []

    async def run() -> None:
        tasks: asyncio.Queue[int] = asyncio.Queue()
        tasks.put_nowait(1)
        loop = asyncio.get_running_loop()

        def watch() -> None:
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and not (seen and "task_done()" in "".join(seen[-1])):
                seen.append(describe_library_call(find_awaited_frames()))
            loop.call_soon_threadsafe(tasks.task_done)

        threading.Thread(target=watch).start()
        await tasks.join()

    asyncio.run(run())
    call = parse_report(json.loads(json.dumps({"groups": [], "call": seen[-1]}))).call
    assert call.function == "join"
    assert call.summary.endswith("join: Block until all items in the queue have been gotten and processed")


@pytest.mark.parametrize("call", [None, 7, ["a"], ["a", "b", "a b", "c"], ["a", "b", "c", "\x1b[2J"]])
def test_invalid_call_counts_as_none(call: Any) -> None:
    assert parse_report({"groups": [], "call": call}).call == LibraryCall()


def test_documentation_becomes_the_remedy_while_the_rank_is_in_the_call(tmp_path: Path) -> None:
    worker = WorkerRecord(2**22 + 1, 0, 0, 0)
    call = LibraryCall("/usr/lib/python3.11/queue.py", "join", "Queue.join", "Wait for all. Call task_done().")
    collectives = RankCollectives(call=call)
    frames = [StackFrame("/job/train.py", 7, "main"), StackFrame("/usr/lib/python3.11/queue.py", 90, "join")]
    helper = helpers.explain_wait(worker, Stack(frames, "Stack"), collectives)
    assert helper.note == "Queue.join: Wait for all"
    assert (
        helper.remedy == "find out why the rank does not leave its line, Queue.join(): Wait for all. Call task_done()."
    )
    assert not helper.is_final
    assert helpers.explain_wait(worker, Stack(frames[:1], "Stack"), collectives).note == "", "it has left the call"
