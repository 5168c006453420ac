"""Samples of parameters and batches, and their comparison over all ranks."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_pod.contract.group_facts import DIFFERENT, LOST_LOSS, SAME_DATA, GroupFacts
from ddp_pod.features import list_rank_features
from ddp_pod.features.replicas import rank, sampler
from ddp_pod.features.replicas.comparison import RankSample, ReplicaComparison, decode_samples, encode_samples
from ddp_pod.features.replicas.loss_history import LossHistory, find_lost_step
from ddp_pod.features.replicas.sampler import find_next_step, find_part
from ddp_pod.features.replicas.samples import ReplicaSample, read_samples, write_sample
from ddp_pod.rank import counters
from ddp_pod.rank.counter_slots import create_private_slot, open_slot
from ddp_pod.rank.counters import CounterMemory
from ddp_pod.rank.steps import StepCounter
from tests.bench.replica_flips import Order, start_replicas
from tests.support.launcher_config import launcher_pod

KEY = 7


def take(rank: int, step: int, digest: int = 5, part: int = 1, **values: Any) -> RankSample:
    """Return a sample of a rank, in the pod of two ranks."""
    sample = ReplicaSample(step, part, digest, KEY, batch=100 * rank + step, data=3, shares=1)
    return RankSample(rank // 2, rank, sample._replace(**values))


def compare(*samples: RankSample) -> GroupFacts | None:
    return ReplicaComparison(4).update(samples)


def take_steps(ranks: int, *steps: int, **values: Any) -> list[RankSample]:
    return [take(rank, step, **values) for rank in range(ranks) for step in steps]


class TestParameters:
    @pytest.mark.parametrize(
        ("samples", "result"),
        [
            (take_steps(4, 2, 3), None),
            ([*take_steps(3, 2, 3), take(3, 2, 6), take(3, 3, 8)], (3, 1)),
            ([*take_steps(3, 2, 3), take(3, 2, 6), take(3, 3)], None),  # one step shows it alone
            ([*take_steps(3, 2, 3), take(3, 2, 6), take(3, 9, 8)], None),  # not at one step
            ([*take_steps(3, 2, 3), take(3, 2, 6, part=2), take(3, 3, 6, part=2)], None),
            ([*take_steps(3, 2, 3), take(3, 2, 6, key=8), take(3, 3, 6, key=8)], None),  # another model or shard
            ([*take_steps(2, 2, 3, key=0), take(2, 2, 6, key=0), take(2, 3, 6, key=0)], None),
            ([*take_steps(1, 2, 3), take(1, 2, 6), take(1, 3, 6)], (None, None)),  # of two ranks none has a majority
            ([*take_steps(2, 2, 3), *take_steps(4, 2, 3, digest=6)[4:]], (None, None)),
            ([*take_steps(4, 2, 3)[:6], take(3, 4, 6)], None),
            ([*take_steps(5, 2, 3)[:6], *(take(rank, step, 6) for rank in (3, 4) for step in (2, 3))], (None, None)),
        ],
    )  # fmt: skip
    def test_rank_is_named_where_a_majority_is_equal(
        self, samples: list[RankSample], result: tuple[int | None, int | None] | None
    ) -> None:
        facts = compare(*samples)
        assert (None if facts is None else (facts.state, facts.rank, facts.pod)) == (result and (DIFFERENT, *result))

    def test_difference_waits_for_the_samples_of_all_ranks(self) -> None:
        comparison = ReplicaComparison(3)
        late = [take(2, 1), take(2, 2), take(2, 3)]
        known = [take(0, 2), take(0, 3), take(1, 2, 6), take(1, 3, 6)]
        assert comparison.update([*known, late[0]]) is None
        facts = comparison.update([*known, *late])
        assert facts is not None
        assert facts.rank == 1

    @pytest.mark.parametrize(
        ("shares", "equal_before", "is_mistake"), [(1, False, False), (0, True, False), (0, False, True)]
    )
    def test_replicas_that_never_were_equal_are_a_mistake(
        self, shares: int, equal_before: bool, is_mistake: bool
    ) -> None:
        samples = take_steps(2, 1, shares=shares) if equal_before else []
        samples += take_steps(1, 2, 3, shares=shares) + [take(1, step, 6, shares=shares) for step in (2, 3)]
        facts = compare(*samples)
        assert facts is not None
        assert facts.is_mistake is is_mistake
        assert ("same seed" in facts.remedy) is is_mistake

    def test_difference_is_remembered(self) -> None:
        comparison = ReplicaComparison(3)
        first = comparison.update([*take_steps(2, 2, 3), take(2, 2, 6), take(2, 3, 6)])
        assert first is not None
        assert comparison.update(take_steps(3, 8, 9)) == first


NAN = math.nan
USUAL = [2.0, 1.5, 1.8]


class TestLosses:
    @pytest.mark.parametrize(
        ("losses", "step"),
        [
            (USUAL, 0),
            ([*USUAL, NAN, 1.7], 0),  # one step that a GradScaler skipped
            ([*USUAL, 5e9], 0),  # absurd, but finite so far
            ([*USUAL, NAN, math.inf, NAN], 13),
            ([*USUAL, 5e9, NAN], 13),
            ([*USUAL, -5e9, NAN], 13),
            ([*USUAL, 19.0, NAN], 14),
            ([*USUAL, 500.0, NAN], -14),  # training diverges
            ([NAN, NAN], 0),  # what is usual is unknown
        ],
    )
    def test_lost_step_is_the_first_of_those_at_the_end(self, losses: list[float], step: int) -> None:
        assert find_lost_step(range(10, 10 + len(losses)), losses) == step

    @pytest.mark.parametrize(
        ("lost", "ranks"),
        [
            ((8, 8, 7, 8), (2,)),
            ((7, 8, 8, 7), (0, 3)),
            ((8, 7, 7, 7), None),  # not a few before many
            ((8, 8, 8, 8), None),
            ((8, 8, 7, 0), None),
            ((-8, 8, 7, 8), None),
        ],
    )
    def test_rank_that_lost_its_loss_before_all_others_is_named(
        self, lost: tuple[int, ...], ranks: tuple[int, ...] | None
    ) -> None:
        facts = compare(*take_steps(4, 4), *(take(rank, 8, lost=step) for rank, step in enumerate(lost)))
        if ranks is None:
            assert facts is None
            return
        assert facts is not None
        assert (facts.state, facts.rank) == (LOST_LOSS, ranks[0] if len(ranks) == 1 else None)
        assert f"loss of rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))} " in facts.message
        assert "step 7" in facts.message

    def test_losses_name_the_rank_that_parameters_do_not(self) -> None:
        comparison = ReplicaComparison(2)
        different = [take(0, 2), take(0, 3), take(1, 2, 6), take(1, 3, 6)]
        facts = comparison.update(different)
        assert facts is not None
        assert facts.rank is None
        facts = comparison.update([*different, take(0, 4, lost=4), take(1, 4, lost=3)])
        assert facts is not None
        assert (facts.state, facts.rank, facts.pod) == (LOST_LOSS, 1, 0)

    def test_losses_of_ranks_that_may_share_data_are_not_compared(self) -> None:
        assert compare(*(take(rank, 8, lost=8 - (rank == 2), data=0) for rank in range(4))) is None

    def test_history_keeps_scalars_that_are_no_views(self) -> None:
        history = LossHistory(torch)
        weights = torch.ones(3, requires_grad=True)
        for root in (weights * 2, (weights * 2)[0], (weights * math.nan).sum(), weights.sum()):
            history.add(5.0, root)
        steps, losses = history.stack()
        assert steps == [5, 5]
        assert not losses.requires_grad
        assert history.find_lost(steps, losses.tolist()) == 0
        assert history.find_lost([5, 6], [3.0, NAN]) == 6
        assert history.find_lost([9], [NAN]) == 6, "the first one is remembered"


class TestBatches:
    @pytest.mark.parametrize(
        ("samples", "is_same"),
        [
            (take_steps(2, 1, 2, 3), False),
            ([take(rank, step, batch=step) for rank in (0, 1) for step in (1, 2, 3)], True),
            ([take(rank, step, batch=step) for rank in (0, 1) for step in (1, 2)], False),
            ([take(rank, step, batch=9) for rank in (0, 1) for step in (1, 2, 3)], False),  # as in a benchmark
            ([take(rank, step, batch=step, data=0) for rank in (0, 1) for step in (1, 2, 3)], False),
            ([take(rank, step, batch=step, data=rank) for rank in (0, 1) for step in (1, 2, 3)], False),
            ([take(rank, step, batch=step) for rank in (0, 1) for step in (1, 2, 3)] + take_steps(2, 4), False),
            ([take(rank, step, batch=step) for rank in (0, 1) for step in (1, 2, 3)] + [take(2, 1)], False),
        ],
    )
    def test_same_batches_at_three_steps_are_reported(self, samples: list[RankSample], is_same: bool) -> None:
        facts = compare(*samples)
        assert (facts is not None and facts.state == SAME_DATA) is is_same


class TestSamples:
    def test_memory_keeps_equal_steps_of_ranks_that_are_read_at_different_times(self) -> None:
        read = []
        for last in (1000, 1063):
            slot = create_private_slot()
            step = 1
            while step <= last:
                write_sample(slot, ReplicaSample(step, 1, -step, 1 << 62, 2, 3, 1))
                step = find_next_step(step, 4)
            read.append({sample.step: sample for sample in read_samples(slot)})
        assert {1, 512, 513} <= read[0].keys() & read[1].keys()
        assert read[0][512] == ReplicaSample(512, 1, -512, 1 << 62, 2, 3, 1)

    def test_steps_of_a_longer_interval_are_steps_of_a_shorter_one(self) -> None:
        steps: dict[int, list[int]] = {}
        for interval in (2, 16):
            step = 1
            while step < 200:
                steps.setdefault(interval, []).append(step)
                step = find_next_step(step, interval)
        assert steps[16][:9] == [1, 2, 3, 4, 5, 8, 9, 16, 17]
        assert set(steps[16]) < set(steps[2])

    def test_all_parts_have_their_turn_at_two_steps_in_a_row(self) -> None:
        assert {find_part(step, 5) for step in range(0, 64 * 40, 64)} == set(range(5))
        assert all(find_part(step, 5) == find_part(step + 1, 5) for step in range(0, 64, 2))

    @pytest.mark.parametrize("raw", [None, 5, [5], [[1, 2]], [[1, 2, 3, 4, 5, 6, 7, 8, True]], [[0.5] * 9]])
    def test_invalid_samples_are_omitted(self, raw: Any) -> None:
        assert decode_samples(1, raw) == []

    def test_samples_survive_their_way_to_pod_0(self) -> None:
        sample = take(3, 2).sample
        assert decode_samples(1, encode_samples({3: [sample]})) == [RankSample(1, 3, sample)]


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process, in which others are imagined."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def train_four_steps(
    monkeypatch: pytest.MonkeyPatch, folder: Path, world_size: int = 2, bad_step: int = 0
) -> dict[int, ReplicaSample]:
    """Return the samples of a rank that makes four steps, by step.

    ``world_size``: as its launcher has set it; ``bad_step``: whose batch has NaN.
    """
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    memory = CounterMemory(str(folder), 1)
    slot = open_slot(str(folder), 0)
    slot[counters.WORLD_SIZE] = world_size
    slot[counters.PID] = os.getpid()
    backward = torch.Tensor.backward
    counter = StepCounter(slot, create_sampler=rank.PART.sample)
    counter.watch(sys.modules["torch.optim.optimizer"])
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for number in range(4):
            model(torch.full((2, 4), math.nan if number + 1 == bad_step else float(number))).sum().backward()
            optimizer.step()
        counts = memory.read(0)
    finally:
        counter.stop()
        torch.Tensor.backward = backward  # type: ignore[method-assign]
    assert counts is not None
    assert counts.steps == 4
    return {sample.step: sample for sample in read_samples(memory.view_feature_numbers(0))}


@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_samples_when_the_group_spans_all_ranks(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    state = torch.get_rng_state()
    nn.Linear(4, 2)
    expected = torch.get_rng_state()
    torch.set_rng_state(state)
    samples = train_four_steps(monkeypatch, tmp_path, world_size)
    assert sorted(samples) == ([1, 2, 3] if world_size == 2 else [])
    assert len({sample.digest for sample in samples.values()}) == len(samples)
    assert len({sample.batch for sample in samples.values()}) == len(samples)
    assert all(sample.key and sample.data and not sample.shares for sample in samples.values())
    assert torch.equal(expected, torch.get_rng_state())


def test_sample_has_the_step_since_which_the_loss_is_not_finite(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = train_four_steps(monkeypatch, tmp_path, bad_step=3)
    assert [samples[step].lost for step in (1, 2, 3)] == [0, 0, 3]


def test_nothing_is_sampled_while_a_cuda_graph_is_captured(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler.ReplicaSampler, "_is_capturing", lambda own: own._step == 2)
    assert sorted(train_four_steps(monkeypatch, tmp_path)) == [1, 3]


def test_stages_of_a_pipeline_are_no_replicas(group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.pipelining", torch)
    samples = train_four_steps(monkeypatch, tmp_path)
    assert {(sample.key, sample.data) for sample in samples.values()} == {(0, 0)}


@pytest.mark.parametrize("method", ["_publish", "_observe"])
def test_sampler_that_fails_stops_and_steps_are_still_counted(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    calls = []

    def fail(*args: Any) -> None:
        calls.append(args)
        raise RuntimeError("another version of PyTorch")

    monkeypatch.setattr(sampler.ReplicaSampler, method, fail)
    assert train_four_steps(monkeypatch, tmp_path) == {}
    assert len(calls) == 1


@pytest.mark.process
def test_flipped_bit_names_its_rank() -> None:
    with start_replicas() as three:
        assert three.run(Order(1, None, 11)) is None
        facts = three.run(Order(2, 1, 12))
        assert facts is not None
        assert (facts.state, facts.rank, facts.pod) == (DIFFERENT, 1, 1)
        facts = three.run(Order(10, 1, 10))  # the loss of this flip is NaN
        assert facts is not None
        assert (facts.rank, facts.pod) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "is_used"),
    [
        ({"nproc_per_node": 2}, True),
        ({"nodes": 2}, True),
        ({"nproc_per_node": 2, "auto_instrument": False}, False),
        ({}, False),
    ],
)
def test_ranks_are_sampled_if_there_are_several_whose_steps_are_counted(
    tmp_path: Path, changes: dict[str, Any], is_used: bool
) -> None:
    pod = launcher_pod(tmp_path, **{"nodes": 1, "nproc_per_node": 1, "auto_instrument": True, **changes})
    assert ("replicas" in list_rank_features(pod)) is is_used
