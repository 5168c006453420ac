"""Train a denoiser by steps: an endless iterator over epochs, noise of a generator, and an average in a hook."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SEED = int(os.environ.get("SEED", "0"))
STEPS = 40
LEVELS = torch.linspace(0.99, 0.05, 50)


class Rings(Dataset):
    def __len__(self):
        return 240

    def __getitem__(self, index):
        angle = torch.tensor(index * 0.61803 + SEED)
        return torch.stack([angle.cos(), angle.sin(), (2 * angle).cos(), (2 * angle).sin()])


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.levels = nn.Embedding(len(LEVELS), 16)
        self.enter = nn.Linear(4, 16)
        self.leave = nn.Sequential(nn.SiLU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 4))

    def forward(self, values, level):
        return self.leave(self.enter(values) + self.levels(level))


def track_average(network, optimizer, decay=0.95):
    shadow = [weight.detach().clone() for weight in network.parameters()]

    def update(*_):
        torch._foreach_lerp_(shadow, [weight.detach() for weight in network.parameters()], 1 - decay)

    optimizer.register_step_post_hook(update)
    return shadow


def cycle(loader, skipped):
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        for values in loader:
            if skipped > 0:
                skipped -= 1
            else:
                yield values
        epoch += 1


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(SEED)
    network = Denoiser()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.99))
    shadow = track_average(network, optimizer)
    noises = torch.Generator().manual_seed(1000 * SEED + rank)
    data = Rings()
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data), num_workers=1)

    step = 0
    if os.path.exists("denoiser.pt"):
        saved = torch.load("denoiser.pt", weights_only=True)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        for mean, value in zip(shadow, saved["shadow"], strict=True):
            mean.copy_(value)
        noises.set_state(saved["noises"][rank])
        step = saved["step"]
    batches = cycle(loader, step)
    while step < STEPS:
        values = next(batches)
        level = torch.randint(len(LEVELS), (len(values),), generator=noises)
        noise = torch.randn(values.shape, generator=noises)
        kept = LEVELS[level][:, None]
        loss = (model(kept.sqrt() * values + (1 - kept).sqrt() * noise, level) - noise).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 4 == 0:
            states = [None] * dist.get_world_size()
            dist.all_gather_object(states, noises.get_state())
            if rank == 0:
                saved = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "shadow": shadow}
                torch.save(saved | {"noises": states, "step": step}, "denoiser.new")
                os.replace("denoiser.new", "denoiser.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
