"""The turns of long steps: the event loop between two of them, and other namespaces before one that owes much."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from ddp_operator.reconcile.fair_turns import BURST, ORDINARY, ORDINARY_PER_POD, SHARE, Debts, FairTurns
from ddp_operator.reconcile.turns import Payer, Turns
from ddp_operator.reconcile.workqueue import WorkQueue


class SteppedCpu:
    """The CPU time of steps, without spending it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.done: list[str] = []

    def __call__(self) -> float:
        return self.seconds

    def step(self, name: str, seconds: float) -> str:
        self.seconds += seconds
        self.done.append(name)
        return name


class SteppedClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def run_all(turns: Turns, cpu: SteppedCpu, *steps: tuple[str, str, float]) -> list[str]:
    """Start steps (namespace, name, CPU seconds) in this order. Return their names in the order of execution."""
    async with asyncio.timeout(60):
        await asyncio.gather(*(turns.run(Payer(where), cpu.step, name, seconds) for where, name, seconds in steps))
    return cpu.done


async def test_loop_reads_its_connections_between_two_long_steps() -> None:
    cpu = SteppedCpu()
    turns = FairTurns(cpu=cpu)
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    with reader, writer:

        def receive() -> None:
            if reader.recv(1):
                cpu.done.append("io")

        asyncio.get_running_loop().add_reader(reader, receive)

        def step(name: str) -> None:
            cpu.step(name, 10 * ORDINARY)
            writer.send(b"x")

        await asyncio.gather(*(turns.run(Payer("a"), step, str(number)) for number in range(4)))
        asyncio.get_running_loop().remove_reader(reader)
    assert cpu.done[:7] == ["0", "io", "1", "io", "2", "io", "3"]


async def test_short_steps_do_not_wait_for_loop() -> None:
    cpu = SteppedCpu()
    turns = FairTurns(cpu=cpu)
    calls = []
    asyncio.get_running_loop().call_soon(calls.append, "loop")
    for number in range(3):
        await turns.run(Payer("a"), cpu.step, str(number), ORDINARY / 4)
    assert calls == []


async def test_short_steps_after_turn_of_loop_do_not_wait_for_it() -> None:
    cpu = SteppedCpu()
    turns = FairTurns(cpu=cpu)
    await turns.run(Payer("a"), cpu.step, "long", 2 * ORDINARY)
    await turns.run(Payer("a"), cpu.step, "after the loop", ORDINARY / 4)
    calls = []
    asyncio.get_running_loop().call_soon(calls.append, "loop")
    await turns.run(Payer("a"), cpu.step, "at once", ORDINARY / 4)
    assert calls == []


async def test_namespace_that_used_its_share_waits_for_others() -> None:
    cpu = SteppedCpu()
    debts = Debts()
    debts.charge("a", BURST + SHARE / 10)  # for a hundredth of a second
    order = await run_all(FairTurns(debts, cpu), cpu, ("a", "a1", 0), ("a", "a2", 0), ("b", "b1", 0), ("c", "c1", 0))
    assert order == ["b1", "c1", "a1", "a2"]


async def test_namespace_that_owes_least_goes_first() -> None:
    cpu = SteppedCpu()
    long = 5 * ORDINARY
    steps = [("a", f"a{number}", long) for number in range(4)]
    order = await run_all(FairTurns(cpu=cpu), cpu, *steps, ("b", "b1", long), ("b", "b2", 0.0))
    assert order.index("b1") == 1
    assert order.index("b2") < order.index("a3")


async def test_waiting_call_lends_its_worker() -> None:
    clock = SteppedClock()
    cpu = SteppedCpu()
    debts = Debts(clock)
    debts.charge("a", 2 * BURST)
    turns = FairTurns(debts, cpu)
    ended = asyncio.Event()

    async def work(key: str) -> None:
        await turns.run(Payer(key), cpu.step, key, 0.0)
        ended.set()

    queue: WorkQueue[str] = WorkQueue(work, workers=1, group=lambda key: key)
    queue.add("a")
    queue.add("b")
    queue.start()
    async with asyncio.timeout(60):
        await ended.wait()
    await queue.stop()
    assert cpu.done == ["b"]


@pytest.mark.parametrize(("cancelled", "rest"), [(0, ["b", "c"]), (1, ["a", "c"])], ids=["given", "waiting"])
async def test_cancelled_call_leaves_its_turn_to_next(cancelled: int, rest: list[str]) -> None:
    cpu = SteppedCpu()
    turns = FairTurns(cpu=cpu)
    calls = [asyncio.create_task(turns.run(Payer("x"), cpu.step, name, 0.0)) for name in ("a", "b", "c")]
    await turns.run(Payer("x"), cpu.step, "first", 10 * ORDINARY)
    await asyncio.sleep(0)  # all three wait, and the first of them is given the turn
    calls[cancelled].cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(*calls, return_exceptions=True)
    assert cpu.done == ["first", *rest]


async def test_failed_step_is_charged_and_ends_its_turn() -> None:
    cpu = SteppedCpu()
    clock = SteppedClock()
    debts = Debts(clock)
    turns = FairTurns(debts, cpu)

    def fail() -> None:
        cpu.step("failed", BURST)
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        await turns.run(Payer("a"), fail)
    assert debts.owed("a") > 0
    assert await run_all(turns, cpu, ("b", "b1", 0)) == ["failed", "b1"]


async def test_ordinary_steps_and_those_over_many_pods_are_not_charged() -> None:
    cpu = SteppedCpu()
    debts = Debts(SteppedClock())
    turns = FairTurns(debts, cpu)
    for _ in range(1000):
        await turns.run(Payer("a"), cpu.step, "", ORDINARY / 2)
    await turns.run(Payer("a", pods=5000), cpu.step, "", 5000 * ORDINARY_PER_POD)
    assert debts.owed("a") == 0
    await turns.run(Payer("a", pods=10), cpu.step, "", 2 * ORDINARY)
    assert debts.owed("a") > 0


def test_debt_is_paid_off_and_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    clock = SteppedClock()
    debts = Debts(clock)
    charges: list[Callable[[], None]] = [lambda: debts.charge("a", BURST / 2), lambda: debts.charge("a", BURST)]
    for charge in charges:
        charge()
    assert debts.delay("a") == pytest.approx(BURST / 2 / SHARE)
    assert debts.delay("b") == 0
    [record] = caplog.records
    assert "namespace a: the checks of its jobs took" in record.message
    clock.now += BURST / 2 / SHARE - 0.5  # so that it still waits, but for less than a second
    debts.charge("a", 0.0)
    assert len(caplog.records) == 1, "it is named once while it waits"
    clock.now += BURST / SHARE + 0.5
    debts.charge("b", 1.0)
    assert (debts.owed("a"), debts.delay("a"), list(debts._paid_at)) == (0, 0, ["b"])


def test_namespace_that_waits_for_less_than_second_is_named(caplog: pytest.LogCaptureFixture) -> None:
    debts = Debts(SteppedClock())
    debts.charge("a", BURST + 0.5 * SHARE)
    assert debts.delay("a") == pytest.approx(0.5)
    assert len(caplog.records) == 1
