"""What the scripts of this folder share: data to learn from, and the agreement to stop."""

import signal

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset


def load_digits(samples: int = 1280) -> TensorDataset:
    """Return images of 64 pixels and their classes."""
    generator = torch.Generator().manual_seed(7)
    centers = torch.randn(10, 64, generator=generator)
    labels = torch.randint(10, (samples,), generator=generator)
    return TensorDataset(centers[labels] + torch.randn(samples, 64, generator=generator), labels)


class StopSignal:
    """Whether the job is to stop: SIGTERM reaches the ranks at different times, so they agree at each step."""

    def __init__(self) -> None:
        self._arrived = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: object) -> None:
        self._arrived = True

    def reached_a_rank(self) -> bool:
        """Return whether any rank has received SIGTERM. Every rank has to call it."""
        arrived = torch.tensor(float(self._arrived))
        dist.all_reduce(arrived, dist.ReduceOp.MAX)
        return bool(arrived)
