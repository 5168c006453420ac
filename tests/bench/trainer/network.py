"""The cost of sending gradients: a measured link, and two models of averaging over it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

FORMULAS = """\
ring all-reduce     t = 2 (n - 1) / n * S / B + 2 (n - 1) * a
parameter server    t = 2 n * S / B + 2 a
S: bytes of gradients; B: bytes a second and direction of one link; a: time of a message without content."""


@dataclass(frozen=True)
class Link:
    """A measured connection between two ranks: ``bandwidth`` in bytes a second one way, ``latency`` in seconds."""

    bandwidth: float
    latency: float
    what: str


def ring_seconds(ranks: int, size: float, link: Link) -> float:
    """Time of a ring all-reduce of ``size`` bytes over ``ranks`` ranks."""
    return 2 * (ranks - 1) / ranks * size / link.bandwidth + 2 * (ranks - 1) * link.latency if ranks > 1 else 0.0


def parameter_server_seconds(ranks: int, size: float, link: Link) -> float:
    """Time in which one parameter server receives ``size`` bytes from each of ``ranks`` workers and returns them."""
    return 2 * ranks * size / link.bandwidth + 2 * link.latency if ranks > 1 else 0.0


def probe(device: Any, size: int = 32 << 20, repeats: int = 5) -> tuple[float, float] | None:
    """Bandwidth and latency between ranks 0 and 1 by messages in both directions; None on the other ranks.

    All ranks of the group call this. The best of ``repeats`` counts, because disturbances only slow it down.
    """
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()

    def back_and_forth(message: torch.Tensor) -> float:
        best = float("inf")
        for _ in range(repeats + 1):
            if device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            started = time.perf_counter()
            if rank == 0:
                dist.send(message, 1)
                dist.recv(message, 1)
            elif rank == 1:
                dist.recv(message, 0)
                dist.send(message, 0)
            if device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - started)
        return best

    latency = back_and_forth(torch.zeros(1, dtype=torch.uint8, device=device)) / 2
    seconds = back_and_forth(torch.zeros(size, dtype=torch.uint8, device=device)) / 2
    return (size / max(seconds - latency, 1e-9), latency) if rank == 0 else None
