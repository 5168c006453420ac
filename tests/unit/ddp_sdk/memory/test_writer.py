"""The copies of a rank whose peer fails during the exchange of shards."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch

from ddp_sdk.memory import writer as writer_module
from ddp_sdk.memory.agreement import RingNeighbours
from ddp_sdk.memory.copies import SHARD, CopyFile
from ddp_sdk.memory.ranks import PeerCounter, RankPlace, Ring
from ddp_sdk.memory.state import Leaf, build_rows, encode_manifest, encode_rows, flatten
from ddp_sdk.memory.writer import Copy, GpuCopies, GpuCopy, Slots, ThreadTimes, Writer, compute_contention

PLACE = RankPlace(0, 2, 0, 0)


class SlowGpu:
    """Copies only when the thread waits for the end of the copies. ``allowed``: set when it may."""

    def __init__(self) -> None:
        self.allowed = threading.Event()
        self._copies: Sequence[GpuCopy] = ()

    def start(self, copies: Sequence[GpuCopy]) -> None:
        self._copies = copies

    def synchronize(self) -> None:
        assert self.allowed.wait(60)
        for copy in self._copies:
            copy.target.copy_(copy.source.view(torch.uint8))

    def fence(self) -> None:
        pass


class OnGpu:
    """A leaf of the state whose tensor is on a GPU. ``source``: its stand-in."""

    path = "model.weight"

    def __init__(self, source: torch.Tensor) -> None:
        self.source = source
        self.memory = source
        self.tensor = SimpleNamespace(is_cuda=True)


@pytest.mark.parametrize("fenced", [True, False])
def test_copy_of_gpu_tensor_that_changed_before_next_step_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fenced: bool
) -> None:
    monkeypatch.setattr(CopyFile, "pin", lambda file: None)
    gpu = SlowGpu()
    slots = Slots(str(tmp_path / "shard-0"))
    writer = Writer(slots, PLACE, finite_only=False)
    writer._gpu = cast("GpuCopies", gpu)
    weight = torch.full((100,), 3.0)
    copy = build_copy(3)
    writer.write(copy._replace(leaves=[cast("Leaf", OnGpu(weight))]))
    if fenced:
        writer.fence()  # an optimizer's step follows, whose stream waits for the copy
    weight.add_(1.0)
    gpu.allowed.set()
    assert writer.wait(60)
    assert (slots.find(SHARD, 3, 0) is not None) is fenced
    assert writer.changed == ("" if fenced else "model.weight")
    writer.close(60)


class LostPeer:
    """A ring whose other rank has been killed."""

    neighbours = RingNeighbours(1, 1, 0, 2)

    def exchange_numbers(self, own: Sequence[int]) -> list[int]:
        raise RuntimeError("Connection closed by peer")


class Neighbour:
    """A ring whose other rank sends its shard of each step, as this rank does."""

    neighbours = RingNeighbours(1, 1, 0, 2)

    def exchange_numbers(self, own: Sequence[int]) -> list[int]:
        return list(own)

    def exchange(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        incoming.copy_(outgoing)


class Counter:
    """Records how a writer counts its copies. ``fails_at``: the number of a copy that another rank does not have."""

    def __init__(self, fails_at: int = 0) -> None:
        self.calls: list[str] = []
        self.fails_at = fails_at

    def agree_on_copy(self, is_complete: bool) -> bool:
        assert is_complete
        self.calls.append("copy")
        return len(self.calls) != self.fails_at

    def abandon(self) -> None:
        self.calls.append("abandon")

    def stop_waiting(self) -> None:
        self.calls.append("stop")


def build_copy(step: int) -> Copy:
    state = flatten({"model": {"weight": torch.full((100,), float(step))}})
    rows = build_rows(state.leaves)
    return Copy(SHARD, step, state.leaves, rows, encode_manifest(state.tree, encode_rows(rows)), [None], 0, 0.0)


def test_lost_peer_keeps_the_own_copy_and_ends_copies_of_all_ranks(tmp_path: Path) -> None:
    slots = Slots(str(tmp_path / "shard-0"))
    counter = Counter()
    writer = Writer(slots, PLACE, finite_only=False)
    writer.count_copies(cast("PeerCounter", counter))
    writer.exchange_shards(cast("Ring", LostPeer()), Slots(str(tmp_path / "peer-0")))
    writer.write(build_copy(3))
    assert writer.wait(60)
    kept = slots.find(SHARD, 3, 0)
    assert kept is not None
    assert kept.verify()
    assert writer.problem == "RuntimeError: Connection closed by peer"
    writer.close(60)
    assert counter.calls == ["abandon", "stop"]


def test_shards_in_a_single_pod_are_overwritten_only_after_all_ranks_have_newer_ones(tmp_path: Path) -> None:
    counter = Counter()
    writer = Writer(Slots(str(tmp_path / "shard-0")), PLACE, finite_only=False)
    writer.count_copies(cast("PeerCounter", counter))
    for step in (1, 2):
        writer.write(build_copy(step))
    assert writer.wait(60)
    assert counter.calls == ["copy", "copy"]
    writer.close(60)


def test_copy_that_another_rank_does_not_have_is_overwritten_before_the_one_of_all_ranks(tmp_path: Path) -> None:
    slots = Slots(str(tmp_path / "shard-0"))
    peer_slots = Slots(str(tmp_path / "peer-0"))
    writer = Writer(slots, PLACE, finite_only=False)
    writer.count_copies(cast("PeerCounter", Counter(fails_at=3)))
    writer.exchange_shards(cast("Ring", Neighbour()), peer_slots)
    kept = []
    for step in range(1, 5):
        writer.write(build_copy(step))
        assert writer.wait(60)
        steps = [{header.step for _, header in files.list_copies()} for files in (slots, peer_slots)]
        assert steps[0] == steps[1]
        kept.append(steps[0])
    writer.close(60)
    assert kept == [{1}, {1, 2}, {2}, {2, 4}]


class FakeStream:
    """A stream of a GPU. ``order``: what it waited for, and what it did."""

    def __init__(self, device: torch.device) -> None:
        self.order: list[Any] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.order.append(other)

    def wait_event(self, event: FakeEvent) -> None:
        self.order.append(event)


class FakeEvent:
    """An event that is reached when somebody waits for it."""

    def __init__(self, **_: Any) -> None:
        self.reached = False

    def record(self, stream: FakeStream) -> None:
        stream.order.append(self)

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True

    def elapsed_time(self, other: FakeEvent) -> float:
        return 250.0


class FakeSource(NamedTuple):
    """A tensor of a GPU."""

    device: torch.device
    memory: torch.Tensor

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        return self.memory.view(dtype)

    def record_stream(self, stream: FakeStream) -> None:
        stream.order.append("read")


def test_gpu_copies_follow_the_training_which_waits_for_them_at_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    training = FakeStream(device)
    created: list[FakeStream] = []
    entered: list[FakeStream] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: created.append(FakeStream(device)) or created[-1])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered.append(stream) or contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: training)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    gpu = GpuCopies()
    gpu.fence()
    assert gpu.measure_stall() == 0
    for value in (1.0, 2.0):
        target = torch.zeros(8, dtype=torch.uint8)
        gpu.start([GpuCopy(target, cast("torch.Tensor", FakeSource(device, torch.full((2,), value))))])
        assert target.view(torch.float32).tolist() == [value] * 2
        (stream,) = created  # one for all copies: torch hands out 32, and the training has one of them
        assert entered[-1] is stream
        assert stream.order[-3:-1] == [training, "read"]
        finished = stream.order[-1]
        gpu.fence()
        gpu.fence()
        assert training.order[-3:] == [training.order[-3], finished, finished]
        assert gpu.measure_stall() == 0  # not known yet
        gpu.synchronize()
        training.order[-3].reached = True
        assert gpu.measure_stall() == 0.25


def test_copy_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyFile, "pin", lambda file: None)
    monkeypatch.setattr("ddp_sdk.memory.writer.SECONDS_FOR_COPY", 0.01)
    gpu = SlowGpu()
    writer = Writer(Slots(str(tmp_path / "state")), PLACE, finite_only=False)
    writer.close(60)  # without a copy there is nothing to do
    writer._gpu = cast("GpuCopies", gpu)
    copy = build_copy(3)
    writer.write(copy._replace(leaves=[cast("Leaf", OnGpu(torch.ones(100)))]))
    writer.write(build_copy(4))
    assert writer.problem == "the copy of an earlier step took more than 0.01 s"
    gpu.allowed.set()
    writer.close(60)
    assert writer.slots.find(SHARD, 3, 0) is not None


@pytest.mark.parametrize(
    ("used", "waited", "contended"),
    [(0.05, 0.0, 0.0), (0.05, 0.001, 0.001), (0.05, 0.2, 0.05), (0.0, 0.0, 0.0)],
    ids=["idle CPU", "short wait", "busy CPU", "not counted by the system"],
)
def test_contention_is_what_others_wait_for(used: float, waited: float, contended: float) -> None:
    before = ThreadTimes(1.0, 2.0)
    after = ThreadTimes(1.0 + used, 2.0 + waited)
    assert compute_contention(before, after) == pytest.approx(contended)


def test_contention_of_a_copy_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([ThreadTimes(0.0, 0.0), ThreadTimes(0.04, 0.06)])
    monkeypatch.setattr(writer_module, "read_thread_times", lambda: next(times))
    writer = Writer(Slots(str(tmp_path / "state")), PLACE, finite_only=False)
    writer.write(build_copy(3))
    assert writer.wait(60)
    assert writer.take_contention() == pytest.approx(0.04)
    assert writer.take_contention() == 0
    writer.close(60)
