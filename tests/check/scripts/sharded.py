"""Train with FSDP2 by groups of micro-batches; rank 0 saves whole weights."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SEED = int(os.environ.get("SEED", "0"))
GROUP = 2


class Letters(Dataset):
    def __init__(self):
        self.letters = torch.randint(12, (256, 9), generator=torch.Generator().manual_seed(SEED)).cumsum(1) % 12

    def __len__(self):
        return len(self.letters)

    def __getitem__(self, index):
        return self.letters[index, :-1], self.letters[index, 1:]


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, values):
        return values + self.mix(self.norm(values.cumsum(1) / 4))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Embedding(12, 16), Layer(16), Layer(16), nn.Linear(16, 12))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[1], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    data = Letters()
    sampler = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=1)

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    first = 0
    if os.path.exists("whole.pt"):
        saved = torch.load("whole.pt", weights_only=True)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )
        first = saved["epoch"]
    for epoch in range(first, 8):
        sampler.set_epoch(epoch)
        for number, (letters, following) in enumerate(loader, 1):
            model.set_requires_gradient_sync(number % GROUP == 0)
            loss = nn.functional.cross_entropy(model(letters).flatten(0, 1), following.flatten()) / GROUP
            loss.backward()
            if number % GROUP == 0:
                optimizer.step()
                optimizer.zero_grad()
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        if dist.get_rank() == 0:
            torch.save({"model": model_state, "optimizer": optimizer_state, "epoch": epoch + 1}, "whole.new")
            os.replace("whole.new", "whole.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
