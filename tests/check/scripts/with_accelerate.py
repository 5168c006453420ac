"""Train with accelerate, which wraps the model, shards the data and saves the state of all its parts."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from common import StopSignal, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

LATEST = Path("latest.txt")

# Without it the order of a resumed run starts again.
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
stop = StopSignal()
set_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
loader = DataLoader(load_digits(), batch_size=64, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)


def save(epoch: int, batch: int) -> None:
    """Save all states. ``epoch``, ``batch``: to continue with."""
    accelerator.save_state(f"checkpoint-{epoch}-{batch}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        Path("latest.new").write_text(f"{epoch} {batch}")
        Path("latest.new").replace(LATEST)


start = (0, 0)
if LATEST.exists():
    epoch, batch = LATEST.read_text().split()
    accelerator.load_state(f"checkpoint-{epoch}-{batch}")
    start = (int(epoch), int(batch))

for epoch in range(start[0], 5):
    loader.set_epoch(epoch)
    for batch, (images, labels) in enumerate(loader):
        if (epoch, batch) < start:
            continue
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        if stop.reached_a_rank():
            save(epoch, batch + 1)
            raise SystemExit(0)
    save(epoch + 1, 0)

accelerator.end_training()
