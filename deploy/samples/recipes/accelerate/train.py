"""Train with accelerate on random data, and resume from the last epoch."""

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FOLDER = os.environ.get("DDP_CHECKPOINT_DIR", "checkpoints")

accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    # Without it a resumed run has another order of the data.
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    project_config=ProjectConfiguration(FOLDER, automatic_checkpoint_naming=True, total_limit=2),
)
set_seed(0)
images = torch.randn(640, 64)
loader = DataLoader(TensorDataset(images, images[:, :10].argmax(dim=1)), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

first = 0
saved = [int(path.name.rpartition("_")[2]) for path in Path(FOLDER, "checkpoints").glob("checkpoint_*")]
if saved:
    first = max(saved) + 1
    accelerator.load_state()
    accelerator.project_configuration.iteration = first

for epoch in range(first, 5):
    loader.set_epoch(epoch)
    for batch, labels in loader:
        loss = nn.functional.cross_entropy(model(batch), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
    accelerator.save_state()
    accelerator.print(f"epoch {epoch + 1}/5: loss {loss.item():.4f}")

accelerator.end_training()
