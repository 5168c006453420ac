"""Train on batches of sentences of one length each, a table of speakers, and groups of micro-batches."""

import contextlib
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SEED = int(os.environ.get("SEED", "0"))
SPEAKERS = ("ada", "bea", "cem", "dan", "eva", "fay")


class Sentences(Dataset):
    def __init__(self, count=72):
        source = random.Random(SEED)
        self.speakers = [source.choice(SPEAKERS) for _ in range(count)]
        self.lengths = [source.randrange(3, 9) for _ in range(count)]
        self.broken = {number for number in range(count) if number % 9 == 4}

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        sound = torch.randn(self.lengths[index], 5, generator=torch.Generator().manual_seed(1000 * SEED + index))
        speaker = SPEAKERS.index(self.speakers[index])
        return None if index in self.broken else (sound, speaker, sound.abs().mean() + 0.1 * speaker)


def collate(sentences):
    sounds, speakers, goals = zip(*(sentence for sentence in sentences if sentence is not None), strict=True)
    return nn.utils.rnn.pad_sequence(sounds, batch_first=True), torch.tensor(speakers), torch.stack(goals)


class Batches:
    """Batches by length; each rank has an equal number of them, in another order each epoch."""

    def __init__(self, lengths, size):
        self.order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
        self.size = size
        self.epoch = 0

    def __iter__(self):
        batches = [self.order[first : first + self.size] for first in range(0, len(self.order), self.size)]
        random.Random(f"{SEED} {self.epoch}").shuffle(batches)
        ranks = dist.get_world_size()
        batches = batches[: len(batches) // ranks * ranks]
        return iter(batches[dist.get_rank() :: ranks])


class Network(nn.Module):
    def __init__(self, speakers):
        super().__init__()
        self.listen = nn.GRU(5, 12, batch_first=True)
        self.speakers = nn.ParameterDict()
        for name in speakers:
            self.speakers[name] = nn.Parameter(torch.randn(12))
        self.leave = nn.Linear(12, 1)

    def forward(self, sounds, speakers):
        table = torch.stack([self.speakers[name] for name in SPEAKERS])
        heard = self.listen(sounds)[0].mean(1)
        return self.leave(torch.tanh(heard + table[speakers])).squeeze(1)


class Groups:
    """Micro-batches of which each second one synchronizes gradients and steps."""

    def __init__(self, model, size=2):
        self.model = model
        self.size = size
        self.number = 0

    @property
    def ends(self):
        return self.number % self.size == 0

    @contextlib.contextmanager
    def next(self):
        self.number += 1
        with contextlib.nullcontext() if self.ends else self.model.no_sync():
            yield


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    data = Sentences()
    batches = Batches(data.lengths, 8)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=collate)
    network = Network(sorted(set(data.speakers)))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    groups = Groups(model)
    first = 0
    if os.path.exists("speech.pt"):
        saved = torch.load("speech.pt")
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
    for epoch in range(first, 12):
        batches.epoch = epoch
        for sounds, speakers, goals in loader:
            with groups.next():
                loss = nn.functional.mse_loss(model(sounds, speakers), goals) / groups.size
                loss.backward()
            if groups.ends:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            torch.save(
                {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, "speech.new"
            )
            os.replace("speech.new", "speech.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
