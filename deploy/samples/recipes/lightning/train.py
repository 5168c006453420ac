"""Train a classifier with Lightning on random data, and resume from the last epoch."""

import os

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    """A small network with a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss."""
        images, labels = batch
        scores = self.network(images)
        self.accuracy(scores, labels)
        self.log("accuracy", self.accuracy, prog_bar=True)
        return nn.functional.cross_entropy(scores, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
images = torch.randn(640, 64)
loader = DataLoader(TensorDataset(images, images[:, :10].argmax(dim=1)), batch_size=32, shuffle=True)

# At the end of an epoch: within one, Lightning resumes with the same batches only if the DataLoader saves its state.
saving = ModelCheckpoint(os.environ.get("DDP_CHECKPOINT_DIR", "checkpoints"), save_last=True)
trainer = lightning.Trainer(
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    strategy="ddp",
    max_epochs=5,
    logger=False,
    callbacks=[saving],
)
trainer.fit(Classifier(), loader, ckpt_path="last")
