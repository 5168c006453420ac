"""The cost of step counting for a rank: alternating blocks of steps with and without the hooks, on one and two ranks.

Then that of the samples of replicas, likewise.

Asserts nothing. ``make bench`` runs it.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from ddp_pod.features.replicas.rank import PART
from ddp_pod.features.replicas.sampler import ReplicaSampler
from ddp_pod.rank.counter_slots import open_slot
from ddp_pod.rank.counters import RANK, WORLD_SIZE, CounterMemory
from ddp_pod.rank.steps import StepCounter
from tests.bench.figures import table

STEPS = 400
ROUNDS = 60
SAMPLED_STEPS = 400
SAMPLED_ROUNDS = 12


def train(rank: int, ranks: int, port: int, runtime: str) -> None:
    """Measure in one rank; rank 0 prints."""
    torch.set_num_threads(1)
    model: torch.nn.Module = torch.nn.Linear(16, 4)
    if ranks > 1:
        store = torch.distributed.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        model = DistributedDataParallel(model)
    without, with_hooks = measure(build_step(model), runtime, rank)
    if rank == 0:
        rows = {
            "step without hooks": [1e6 * seconds for seconds in without],
            "step with hooks": [1e6 * seconds for seconds in with_hooks],
            "difference of neighbours": [1e6 * (on - off) for on, off in zip(with_hooks, without, strict=True)],
        }
        print(table(f"{ranks} rank{'s' if ranks > 1 else ''}", rows, "us", 1), flush=True)


def build_step(model: torch.nn.Module, device: str = "cpu") -> Callable[[], None]:
    """Return a step of ``model``, which has 16 inputs, so small that the host decides its time on a GPU too."""
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(8, 16, device=device)

    def step() -> None:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(step: Callable[[], None], runtime: str, rank: int, rounds: int = ROUNDS) -> tuple[list[float], list[float]]:
    """Return the mean seconds of a step in each block without hooks, and with them. The first blocks warm up."""
    original = torch.Tensor.backward
    optimizers = sys.modules["torch.optim.optimizer"]
    without: list[float] = []
    with_hooks: list[float] = []
    for _ in range(rounds):
        without.append(time_block(step))
        counter = StepCounter(open_slot(runtime, rank), create_sampler=PART.sample)
        counter.watch(optimizers)
        with_hooks.append(time_block(step))
        counter.stop()
        torch.Tensor.backward = original
    return without[1:], with_hooks[1:]


def time_block(step: Callable[[], None], steps: int = STEPS) -> float:
    """Return the mean CPU seconds of the training thread in a step, because the machine may be busy."""
    start = time.thread_time()
    for _ in range(steps):
        step()
    return (time.thread_time() - start) / steps


def train_sampled(rank: int, ranks: int, port: int, runtime: str) -> None:
    """Measure the samples of replicas in one of two ranks; rank 0 prints."""
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    layers = [torch.nn.Linear(512, 512) for _ in range(6)]
    step = build_step(DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 512), *layers)))
    slot = open_slot(runtime, rank)
    slot[RANK] = rank
    slot[WORLD_SIZE] = ranks
    counter = StepCounter(slot, create_sampler=PART.sample)
    counter.watch(sys.modules["torch.optim.optimizer"])
    time_block(step, 1100)  # the first samples follow each other more closely
    without: list[float] = []
    with_samples: list[float] = []
    sampler = counter._sampler
    losses = counter._losses
    assert isinstance(sampler, ReplicaSampler)
    assert losses is not None
    for _ in range(SAMPLED_ROUNDS):
        for steps in (without, with_samples):
            counter._sample_step = float("inf") if steps is without else 0.0
            losses.history = None if steps is without else sampler._history
            steps.append(time_block(step, SAMPLED_STEPS))
    if rank == 0:
        rows = {
            "step without samples": [1e6 * seconds for seconds in without],
            "step with samples": [1e6 * seconds for seconds in with_samples],
            "difference of neighbours": [1e6 * (on - off) for on, off in zip(with_samples, without, strict=True)],
        }
        print(table("2 ranks, samples", rows, "us", 1))
        print(f"a sample: {1e6 * sampler._cost:.0f} us; two of {sampler._interval} steps", flush=True)


def main() -> None:
    """Run the benchmark."""
    for measured, ranks in ((train, 1), (train, 2), (train_sampled, 2)):
        with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            server.close()
            memory = CounterMemory(folder, ranks)
            torch.multiprocessing.spawn(measured, (ranks, port, folder), nprocs=ranks)
            del memory


if __name__ == "__main__":
    main()
