"""The keyed work queue."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from ddp_operator.api.cluster_errors import ClusterError, VersionConflict
from ddp_operator.reconcile import workqueue
from ddp_operator.reconcile.lending import lend_worker
from ddp_operator.reconcile.workqueue import LAST_BACKOFF, MAX_WAITING, WorkQueue, backoff

Work = Callable[[str], Awaitable[float | None]]


@asynccontextmanager
async def running(work: Work, *, workers: int = 2, pause: float = 0.0) -> AsyncIterator[WorkQueue[str]]:
    queue: WorkQueue[str] = WorkQueue(work, workers=workers, pause=lambda _: pause)
    queue.start()
    try:
        yield queue
    finally:
        await queue.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_key_added_several_times_is_worked_on_once() -> None:
    calls: list[str] = []

    async def work(key: str) -> None:
        calls.append(key)

    queue: WorkQueue[str] = WorkQueue(work, workers=1)
    for key in ("a", "b", "a", "a"):
        queue.add(key)
    assert len(queue) == 2
    queue.start()
    await until(lambda: len(calls) >= 2)
    await asyncio.sleep(0.01)
    await queue.stop()
    assert calls == ["a", "b"]


async def test_key_is_never_worked_on_by_two_workers_at_once() -> None:
    busy: Counter[str] = Counter()
    overlaps: list[str] = []
    done = 0

    async def work(key: str) -> None:
        nonlocal done
        busy[key] += 1
        if busy[key] > 1:
            overlaps.append(key)
        await asyncio.sleep(0.001)
        busy[key] -= 1
        done += 1

    async with running(work, workers=8) as queue:
        for _ in range(20):
            queue.add("a")
            queue.add("b")
            await asyncio.sleep(0.0005)
        await until(lambda: not len(queue) and not queue.active)
    assert done >= 4
    assert overlaps == []


async def test_different_keys_are_worked_on_at_same_time() -> None:
    together = asyncio.Barrier(3)

    async def work(key: str) -> None:
        await together.wait()

    async with running(work, workers=3) as queue:
        for key in "abc":
            queue.add(key)
        await until(lambda: not len(queue) and not queue.active)


async def test_key_added_during_its_own_work_is_worked_on_again() -> None:
    calls = 0
    inside = asyncio.Event()
    go_on = asyncio.Event()

    async def work(key: str) -> None:
        nonlocal calls
        calls += 1
        inside.set()
        await go_on.wait()

    async with running(work) as queue:
        queue.add("a")
        await inside.wait()
        queue.add("a")
        queue.add("a")
        go_on.set()
        await until(lambda: calls == 2)
        await asyncio.sleep(0.01)
    assert calls == 2


async def test_requested_requeue_is_granted() -> None:
    calls = 0

    async def work(key: str) -> float | None:
        nonlocal calls
        calls += 1
        return [0.01, 0.0, None][min(calls, 3) - 1]

    async with running(work) as queue:
        queue.add("a")
        await until(lambda: calls == 3)
        await asyncio.sleep(0.03)
    assert calls == 3


async def test_later_requeue_time_replaces_earlier_one() -> None:
    answers: list[float | None] = [3600.0, None]
    calls = 0

    async def work(key: str) -> float | None:
        nonlocal calls
        calls += 1
        return answers[calls - 1]

    async with running(work) as queue:
        queue.add("a")
        await until(lambda: queue._timers)
        queue.add("a")
        await until(lambda: calls == 2 and not queue.active)
        assert not queue._timers


async def test_failing_key_is_retried_and_blocks_no_other() -> None:
    calls: list[str] = []

    async def work(key: str) -> None:
        calls.append(key)
        if key == "bad" and calls.count("bad") < 3:
            raise ClusterError("no connection")

    async with running(work, workers=1) as queue:
        queue.add("bad")
        queue.add("good")
        await until(lambda: calls.count("bad") == 3)
        assert queue.alive
    assert calls[:2] == ["bad", "good"]


@pytest.mark.parametrize("error", [ClusterError("500"), VersionConflict("changed")])
async def test_expected_error_logs_no_traceback(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[BaseException | None] = []

    async def work(key: str) -> None:
        if not seen:
            raise error

    queue: WorkQueue[str] = WorkQueue(work, workers=1, on_result=lambda _, exc: seen.append(exc))
    with caplog.at_level(logging.DEBUG, "ddp_operator.reconcile.workqueue"):
        queue.start()
        queue.add("a")
        await until(lambda: len(seen) == 2)
        await queue.stop()
    assert seen == [error, None]
    assert [record.exc_info for record in caplog.records] == [None]


async def test_bug_is_logged_with_its_traceback_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    async def work(key: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyError("surprise")

    async with running(work) as queue:
        queue.add("ns/name")
        await until(lambda: calls == 2)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "ns/name" in record.getMessage()


async def test_change_during_failing_run_does_not_skip_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workqueue, "FIRST_BACKOFF", 60.0)
    calls = 0
    queue: WorkQueue[str]

    async def work(key: str) -> None:
        nonlocal calls
        calls += 1
        queue.add(key)  # the event of its own write
        raise ClusterError("always")

    async with running(work) as queue:
        queue.add("a")
        await asyncio.sleep(0.05)
        assert calls == 1


async def test_stop_cancels_running_work_and_timers() -> None:
    calls: list[str] = []

    async def work(key: str) -> float:
        calls.append(key)
        if key == "stuck":
            await asyncio.sleep(3600)
        return 0.01

    queue: WorkQueue[str] = WorkQueue(work, workers=2)
    queue.start()
    queue.add("timed")
    queue.add("stuck")
    await until(lambda: len(calls) >= 3)
    await queue.stop()
    before = list(calls)
    await asyncio.sleep(0.03)
    assert calls == before
    assert [task for task in asyncio.all_tasks() if "reconcile" in task.get_name()] == []


def test_backoff_grows_and_is_bounded() -> None:
    delays = [backoff(failures) for failures in range(1, 2000)]
    assert delays[:4] == [0.1, 0.2, 0.4, 0.8]
    assert delays == sorted(delays)
    assert delays[-1] == LAST_BACKOFF


async def test_changes_during_rest_cause_one_call() -> None:
    calls: list[str] = []

    async def work(key: str) -> None:
        calls.append(key)

    async with running(work, pause=0.05) as queue:
        queue.add("a")
        await until(lambda: calls == ["a"])
        for _ in range(5):
            queue.add("a")
            await asyncio.sleep(0)
        queue.add("b")  # no other key waits for that
        await until(lambda: calls == ["a", "b"])
        await until(lambda: not queue.active)
        await until(lambda: not len(queue) and not queue.active)
        assert calls == ["a", "b", "a"]


async def test_urgent_key_skips_rest() -> None:
    calls = 0

    async def work(key: str) -> float | None:
        nonlocal calls
        calls += 1
        return 0 if calls < 3 else None

    async with running(work, pause=3600) as queue:
        queue.add("a")
        await until(lambda: calls == 3)


def split_name(key: str) -> str:
    return key.partition("/")[0]


async def test_groups_take_turns() -> None:
    calls: list[str] = []

    async def work(key: str) -> None:
        calls.append(key)

    queue: WorkQueue[str] = WorkQueue(work, workers=1, group=split_name)
    for key in (*(f"a/{number}" for number in range(5)), "b/0", "b/1", "c/0"):
        queue.add(key)
    queue.start()
    await until(lambda: len(calls) == 8)
    await queue.stop()
    assert calls == ["a/0", "b/0", "c/0", "a/1", "b/1", "a/2", "a/3", "a/4"]


@pytest.mark.parametrize("groups", [1, 12])
async def test_waiting_keys_of_any_groups_delay_no_other_group(groups: int) -> None:
    waiting: set[str] = set()
    most: list[int] = []
    done: list[str] = []
    reply = asyncio.Event()

    async def wait(key: str) -> None:
        with lend_worker():
            waiting.add(key)
            most.append(len(waiting))
            await reply.wait()
        waiting.discard(key)

    async def work(key: str) -> None:
        if key.startswith("slow"):
            await asyncio.gather(*(wait(f"{key}-{page}") for page in range(3)))
        done.append(key)

    queue: WorkQueue[str] = WorkQueue(work, workers=2, group=split_name)
    queue.start()
    for number in range(50):
        queue.add(f"slow{number % groups}/{number}")
    await until(lambda: len(waiting) >= 3 * min(groups * 2, 12))
    for number in range(5):
        queue.add(f"other/{number}")
    await until(lambda: len(done) == 5)
    assert {split_name(key) for key in done} == {"other"}
    assert max(most) <= 3 * (2 if groups == 1 else 2 * MAX_WAITING - 2)
    reply.set()
    await until(lambda: len(done) == 55)
    assert queue.alive
    queue.add("other/9")
    await until(lambda: len(done) == 56)
    await queue.stop()


async def test_number_of_waiting_keys_is_bounded() -> None:
    started: list[str] = []

    async def work(key: str) -> None:
        started.append(key)
        with lend_worker():
            await asyncio.sleep(3600)

    queue: WorkQueue[str] = WorkQueue(work, workers=1, group=str)
    queue.start()
    for number in range(50):
        queue.add(str(number))
    await until(lambda: len(started) == MAX_WAITING)
    await asyncio.sleep(0.02)
    assert len(started) == MAX_WAITING
    await queue.stop()


async def test_call_outside_queue_lends_no_worker() -> None:
    with lend_worker():
        pass
