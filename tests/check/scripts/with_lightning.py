"""Train with Lightning, which wraps the model, replaces the sampler and saves at the end of each epoch."""

import os
from pathlib import Path

import lightning
import torch
from common import StopSignal, load_digits
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss."""
        images, labels = batch
        return cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class StopAfterEpoch(Callback):
    """End after the epoch in which SIGTERM arrives; its checkpoint is saved before."""

    def on_train_start(self, *_: object) -> None:
        """Handle the signal instead of Lightning, whose own handler ends without a checkpoint."""
        self.stop = StopSignal()

    def on_train_epoch_end(self, trainer: lightning.Trainer, _: object) -> None:
        """End the training if a rank has received the signal."""
        trainer.should_stop = trainer.should_stop or self.stop.reached_a_rank()


lightning.seed_everything(0)
saving = ModelCheckpoint(dirpath="checkpoints", save_last=True, save_on_train_epoch_end=True)
trainer = lightning.Trainer(
    accelerator="cpu", strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), max_epochs=5, callbacks=[StopAfterEpoch(), saving],
    logger=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
last = Path("checkpoints/last.ckpt")
loader = DataLoader(load_digits(), batch_size=64, shuffle=True)
trainer.fit(Classifier(), loader, ckpt_path=last if last.exists() else None)
