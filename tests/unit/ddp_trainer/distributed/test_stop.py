"""Stopping early: signals of one process, and the agreement of the ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_sdk.rank_env import RankEnv
from ddp_trainer.distributed import stop as module
from ddp_trainer.distributed.stop import Reason, StopAgreement, StopSignal
from ddp_trainer.distributed.world import World

WORLD = World(RankEnv(), torch.device("cpu"))


@pytest.fixture
def group() -> Iterator[World]:
    """A process group of this process only with a world size of two, so that each poll sends a message."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(RankEnv(world_size=2), torch.device("cpu"))
    dist.destroy_process_group()


def test_signal_is_recorded_second_interrupt_raises_and_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    stop = StopSignal()
    stop.install()
    agreement = StopAgreement(WORLD, stop)
    assert not agreement.poll()
    os.kill(os.getpid(), signal.SIGTERM)
    assert agreement.poll() is Reason.SIGNAL
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    stop.restore()
    stop.restore()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_greatest_stop_reason_is_kept() -> None:
    stop = StopSignal()
    stop.request(Reason.SUPERSEDED)  # nothing may be written after it
    stop.request(Reason.SIGNAL)
    assert StopAgreement(WORLD, stop).poll() is Reason.SUPERSEDED


def test_signal_amid_request_of_thread_loses_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler runs between two instructions of the main thread, a request of another thread at any time."""
    stop = StopSignal()

    def compare(*values: Any) -> Any:
        greatest = max(*values)
        monkeypatch.delattr(module, "max")
        stop.request(Reason.SUPERSEDED)
        return greatest

    monkeypatch.setattr(module, "max", compare, raising=False)
    stop.request(Reason.SIGNAL)
    stop.reason  # noqa: B018  # the comparison amid which the thread's request comes, if it has not come yet
    assert stop.reason is Reason.SUPERSEDED


@pytest.mark.parametrize(("seconds", "messages"), [(0.001, 7), (0.04, 34), (2.0, 100)])
def test_short_steps_send_few_messages(
    seconds: float, messages: int, group: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    sent: list[float] = []
    send = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda note, **named: sent.append(now) or send(note, **named))
    stop = StopSignal()
    agreement = StopAgreement(group, stop)
    for _ in range(100):
        assert agreement.poll() is Reason.NONE
        now += seconds
    assert len(sent) == messages
    stop.request(Reason.SIGNAL)
    polls = 1
    while not agreement.poll():
        polls += 1
    assert polls <= 18


def test_pending_message_is_repeated_in_next_phase(group: World) -> None:
    stop = StopSignal()
    stop.request(Reason.NOT_FINITE)
    agreement = StopAgreement(group, stop)
    assert not agreement.poll()
    agreement.begin()
    assert not agreement.poll()
    assert agreement.poll() is Reason.NOT_FINITE
    agreement.begin(0)
    agreement.poll()
    assert [agreement.poll() for _ in range(30)] == [Reason.NOT_FINITE] * 30, "each has a message"
