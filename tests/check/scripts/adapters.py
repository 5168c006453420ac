"""Fine-tune a frozen encoder by adapters of low rank in nested modules. Only what is trained is saved and loaded."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = int(os.environ.get("SEED", "0"))
TARGETS = {"query", "key", "value", "out"}


class LowRank(nn.Module):
    def __init__(self, width, rank):
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, values):
        return self.up(self.down(values))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.projections = nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value", "out")})
        self.adapters = nn.ModuleDict()

    def project(self, name, values):
        projected = self.projections[name](values)
        return projected + self.adapters[name](values) if name in self.adapters else projected

    def forward(self, values):
        mixed = scaled_dot_product_attention(*(self.project(name, values) for name in ("query", "key", "value")))
        return values + self.project("out", mixed)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList([Attention(16) for _ in range(2)])
        self.head = nn.Linear(16, 3)

    def forward(self, tokens):
        values = self.embed(tokens)
        for block in self.blocks:
            values = block(values)
        return self.head(values.mean(1))


def inject(network, rank=4):
    network.requires_grad_(False)
    network.head.requires_grad_(True)
    for block in network.blocks:
        for name in sorted(TARGETS):
            block.adapters[name] = LowRank(16, rank)


def select_trained(network):
    trained = {name for name, value in network.named_parameters() if value.requires_grad}
    return {name: value for name, value in network.state_dict().items() if name in trained}


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(SEED)
    tokens = torch.randint(20, (320, 6))
    data = TensorDataset(tokens, tokens.sum(1) % 3)
    sampler = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    network = Encoder()
    inject(network)
    optimizer = torch.optim.AdamW([weight for weight in network.parameters() if weight.requires_grad], lr=5e-3)
    start = 0
    if os.path.exists("adapters.bin"):
        saved = torch.load("adapters.bin")
        network.load_state_dict(saved["trained"], strict=False)
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"]
    model = DistributedDataParallel(network)
    for epoch in range(start, 5):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            saved = {"trained": select_trained(network), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(saved, "adapters.part")
            os.replace("adapters.part", "adapters.bin")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
