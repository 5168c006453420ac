"""The copies of a rank whose peer fails during the exchange of shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from ddp_trainer.memory.agreement import RingNeighbours
from ddp_trainer.memory.copies import SHARD
from ddp_trainer.memory.ranks import PeerCounter, RankPlace, Ring
from ddp_trainer.memory.state import build_rows, encode_manifest, encode_rows, flatten
from ddp_trainer.memory.writer import Copy, Slots, Writer

PLACE = RankPlace(0, 2, 0, 0)


class LostPeer:
    """A ring whose other rank has been killed."""

    neighbours = RingNeighbours(1, 1, 0, 2)

    def exchange_numbers(self, own: Sequence[int]) -> list[int]:
        raise RuntimeError("Connection closed by peer")


class Counter:
    """Records how a writer counts its copies."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def wait_for_next_copy(self) -> bool:
        self.calls.append("copy")
        return True

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
