"""Random single-bit flips in the parameters of one of three gloo replicas: how often the comparison names the rank.

``python -m tests.bench.replica_flips [flips] [runs without a flip]``. Asserts nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_pod.contract.group_facts import LOST_LOSS, GroupFacts
from ddp_pod.features.replicas import rank as rank_part
from ddp_pod.features.replicas import sampler
from ddp_pod.features.replicas.comparison import RankSample, ReplicaComparison
from ddp_pod.features.replicas.samples import read_samples
from ddp_pod.rank import counters
from ddp_pod.rank.counter_slots import create_private_slot, open_slot
from ddp_pod.rank.counters import CounterMemory
from ddp_pod.rank.steps import StepCounter

RANKS = 3
_STEPS_WITHOUT_FLIP = 300
_MOST_STEPS = 1500
_STEPS_WITHOUT_LOSS = 64  # until the next samples show it


class Order(NamedTuple):
    """A run of the replicas. ``victim``: the rank in which a bit flips; None: none."""

    number: int
    victim: int | None
    seed: int


class Replicas:
    """Three processes that train, and what the launcher reads of them."""

    def __init__(self, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._memory = CounterMemory(folder, RANKS)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._orders = context.Array("l", [0, 0, 0])
        self._begun = context.Array("l", [0] * RANKS)
        self.finite = context.Value("i", 1)
        shared = (port, folder, self._orders, self._begun, self.finite)
        self._processes = [context.Process(target=_train, args=(rank, *shared), daemon=True) for rank in range(RANKS)]
        for process in self._processes:
            process.start()

    def run(self, order: Order) -> GroupFacts | None:
        """Return what the comparison reports of a run."""
        with self._orders.get_lock():
            self._orders[:] = [order.number, -1 if order.victim is None else order.victim, order.seed]
        while list(self._begun) != [order.number] * RANKS:
            time.sleep(0.01)
        self.finite.value = 1  # the former run may have lost its loss until now
        comparison = ReplicaComparison(RANKS)
        most = _STEPS_WITHOUT_FLIP if order.victim is None else _MOST_STEPS
        steps = 0
        while steps < most:
            time.sleep(0.02)
            read = self._memory.read(0)
            steps = read.steps if read is not None else 0
            if not self.finite.value:
                most = min(most, steps + _STEPS_WITHOUT_LOSS)
            samples = [
                RankSample(rank, rank, sample)
                for rank in range(RANKS)
                for sample in read_samples(self._memory.view_feature_numbers(rank))
            ]
            facts = comparison.update(samples)
            if facts is not None:
                return facts
        return None

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


@contextmanager
def start_replicas() -> Iterator[Replicas]:
    """Run three replicas."""
    with tempfile.TemporaryDirectory() as folder:
        started = Replicas(folder)
        try:
            yield started
        finally:
            started.end()


def _train(rank: int, port: int, folder: str, orders: Any, begun: Any, finite: Any) -> None:
    torch.set_num_threads(1)
    sampler._SECONDS = 0.0  # type: ignore[attr-defined]
    sampler._SHARE = 1.0  # type: ignore[attr-defined]
    sampler._ELEMENTS["cpu"] = 256
    store = torch.distributed.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    slot = open_slot(folder, rank)
    backward = torch.Tensor.backward
    counter: StepCounter | None = None
    number = 0
    step = 0
    while True:
        order = torch.tensor(list(orders)) if rank == 0 else torch.zeros(3, dtype=torch.int64)
        torch.distributed.broadcast(order, 0)
        if order[0] != number:
            number, victim, seed = order.tolist()
            torch.manual_seed(seed)
            model: Any = nn.Sequential(
                nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 4)
            )
            model = DistributedDataParallel(model)
            optimizer = [torch.optim.SGD, torch.optim.Adam][seed % 2](model.parameters(), lr=0.01)
            dice = random.Random(seed)
            flips_at = dice.randrange(3, 60)
            torch.manual_seed(seed * RANKS + rank)
            if counter is not None:
                counter.stop()
                torch.Tensor.backward = backward
            slot[:] = create_private_slot()
            slot[counters.RANK] = rank
            slot[counters.WORLD_SIZE] = RANKS
            slot[counters.PID] = os.getpid()
            counter = StepCounter(slot, create_sampler=rank_part.PART.sample)
            counter.watch(sys.modules["torch.optim.optimizer"])
            step = 0
            begun[rank] = number
        elif not number:
            time.sleep(0.01)
            continue
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(4, (8,)))
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and not loss.isfinite():
            finite.value = 0
        if step == flips_at and rank == victim:
            _flip(dice, model)


def _flip(dice: random.Random, model: Any) -> None:
    """Flip a random bit of a random parameter."""
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    numbers = dice.choices(parameters, sizes)[0].detach().view(-1).view(torch.int32)
    bit = dice.randrange(32)
    numbers[dice.randrange(len(numbers))] ^= (1 << bit) if bit < 31 else -(1 << 31)


def main() -> None:
    """Count the flips whose rank is named, and the alarms without a flip."""
    flips, runs = map(int, sys.argv[1:3] or (100, 20))
    results: Counter[str] = Counter()
    with start_replicas() as three:
        for number in range(1, flips + runs + 1):
            victim = number % RANKS if number <= flips else None
            facts = three.run(Order(number, victim, number))
            if victim is None:
                results["no flip: " + ("no alarm" if facts is None else "false alarm")] += 1
            elif facts is not None:
                named = f"rank named by its {'loss' if facts.state == LOST_LOSS else 'parameters'}"
                results["flip: " + (named if facts.rank == victim else f"other: {facts.message}")] += 1
            else:
                lost = "the losses of all ranks became NaN, none before the others"
                results["flip: " + ("not found" if three.finite.value else lost)] += 1
    for result, count in sorted(results.items()):
        print(f"{count:4d}  {result}")


if __name__ == "__main__":
    main()
