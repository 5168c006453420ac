"""What the scripts share: data and checkpoints."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

SEED = int(os.environ.get("SEED", "0"))
PATH = "checkpoint.pt"
EVERY = 4


def load_digits(samples=640):
    """Return images of 8 x 8 pixels, 64 numbers each, and their classes."""
    generator = torch.Generator().manual_seed(7 + SEED)
    classes = torch.randn(10, 64, generator=generator)
    labels = torch.randint(10, (samples,), generator=generator)
    return TensorDataset(classes[labels] + torch.randn(samples, 64, generator=generator), labels)


class StopSignal:
    """SIGTERM reaches the ranks at different times, so they agree on it after each step."""

    def __init__(self):
        self.arrived = torch.zeros(1)
        signal.signal(signal.SIGTERM, lambda *_: self.arrived.fill_(1))

    def reached_a_rank(self):
        """Return whether any rank has received SIGTERM. Every rank has to call it."""
        dist.all_reduce(self.arrived)
        return bool(self.arrived)


class Checkpoints:
    """Saves the parts every few batches and after SIGTERM, which ends the script."""

    def __init__(self, *, draws_numbers=False, **parts):
        self.draws_numbers = draws_numbers
        self.parts = parts
        self.stop = StopSignal()

    def load(self):
        """Load the last checkpoint; return the epoch and the batch to continue with."""
        if not os.path.exists(PATH):
            return 0, 0
        state = torch.load(PATH)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        if self.draws_numbers:
            torch.set_rng_state(state["random"][dist.get_rank()])
        return state["epoch"], state["batch"]

    def end_step(self, epoch, batch):
        """Save if it is time to."""
        self.end_if_stopped(epoch, batch + 1)
        if (batch + 1) % EVERY == 0:
            self.save(epoch, batch + 1)

    def end_if_stopped(self, epoch, batch):
        """Save and end if a rank got SIGTERM."""
        if self.stop.reached_a_rank():
            self.save(epoch, batch)
            dist.destroy_process_group()
            sys.exit(143)

    def save(self, epoch, batch):
        """Save what continues with this batch."""
        random_states = [None] * dist.get_world_size()
        if self.draws_numbers:
            dist.all_gather_object(random_states, torch.get_rng_state())
        if dist.get_rank() == 0:
            state = {name: part.state_dict() for name, part in self.parts.items()}
            torch.save({**state, "random": random_states, "epoch": epoch, "batch": batch}, PATH + ".new")
            os.replace(PATH + ".new", PATH)


class EpochOrder:
    """A part of the samples for each rank, in another order each epoch."""

    def __init__(self, samples, rank, ranks):
        self.samples = samples
        self.rank = rank
        self.ranks = ranks
        self.epoch = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(100 * SEED + self.epoch)
        order = torch.randperm(self.samples, generator=generator).tolist()
        return iter(order[self.rank : self.samples - self.samples % self.ranks : self.ranks])

    def __len__(self):
        return self.samples // self.ranks


def finish(model):
    """Save the trained model and end."""
    weights = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(weights, "trained.pt")
    dist.destroy_process_group()
