"""Draw batches from a long text without a DataLoader, by a generator of each rank that is saved."""

import os

import torch
import torch.distributed as dist
from common import SEED
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

TEXT = torch.randint(30, (5000,), generator=torch.Generator().manual_seed(SEED + 1))
WARMUP = 30


class Bigrams(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 16)
        self.head = nn.Linear(16, 30)

    def forward(self, tokens):
        return self.head(torch.tanh(self.table(tokens)))


def draw(generator):
    starts = torch.randint(len(TEXT) - 9, (16,), generator=generator)
    windows = torch.stack([TEXT[start : start + 9] for start in starts])
    return windows[:, :-1], windows[:, 1:]


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(SEED)
network = Bigrams()
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(10 * SEED + rank)
step = 0
if os.path.exists("drawn.pt"):
    saved = torch.load("drawn.pt")
    network.load_state_dict(saved["network"])
    optimizer.load_state_dict(saved["optimizer"])
    generator.set_state(saved["generators"][rank])
    step = saved["step"]

while step < 80:
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min(1.0, (step + 1) / WARMUP)
    tokens, following = draw(generator)
    loss = cross_entropy(model(tokens).flatten(0, 1), following.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    step += 1
    if step % 6 == 0:
        generators = [None] * dist.get_world_size()
        dist.all_gather_object(generators, generator.get_state())
        if rank == 0:
            saved = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**saved, "generators": generators, "step": step}, "drawn.new")
            os.replace("drawn.new", "drawn.pt")
dist.destroy_process_group()
