"""Train with the Trainer of transformers, which continues from its last checkpoint."""

import os

import torch
from common import StopSignal, load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Classifier(nn.Module):
    """A small network whose output has the loss, as models of transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return loss and scores."""
        scores = self.network(images)
        return {"loss": cross_entropy(scores, labels), "logits": scores}


class SaveAndStop(TrainerCallback):
    """Save and end after the step in which SIGTERM arrives."""

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Handle the signal."""
        self.stop = StopSignal()

    def on_step_end(self, arguments: object, state: object, control: object, **_: object) -> None:
        """Ask the Trainer to save and to stop if a rank has received the signal."""
        if self.stop.reached_a_rank():
            control.should_save = True
            control.should_training_stop = True


set_seed(0)
arguments = TrainingArguments(
    "checkpoints", use_cpu=True, num_train_epochs=5, per_device_train_batch_size=64, learning_rate=1e-2,
    save_strategy="epoch", report_to="none", disable_tqdm=True,
)  # fmt: skip
data = [{"images": image, "labels": label} for image, label in load_digits()]
trainer = Trainer(Classifier(), arguments, train_dataset=data, callbacks=[SaveAndStop()])
last = get_last_checkpoint("checkpoints") if os.path.isdir("checkpoints") else None
trainer.train(resume_from_checkpoint=last)
