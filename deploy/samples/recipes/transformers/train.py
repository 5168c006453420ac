"""Train a small Llama with the Trainer of transformers on random tokens, and resume from the newest checkpoint."""

import os

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

FOLDER = os.environ.get("DDP_CHECKPOINT_DIR", "checkpoints")


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random texts."""

    def __init__(self) -> None:
        self.tokens = torch.randint(256, (320, 32), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


set_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
)  # fmt: skip
arguments = TrainingArguments(
    FOLDER,
    use_cpu=not torch.cuda.is_available(),
    per_device_train_batch_size=8,
    num_train_epochs=3,
    save_steps=5,
    save_total_limit=2,
    enable_jit_checkpoint=True,  # saves on SIGTERM, within checkpoint.graceSeconds
    report_to="none",
)
newest = get_last_checkpoint(FOLDER) if os.path.isdir(FOLDER) else None
Trainer(LlamaForCausalLM(config), arguments, train_dataset=Tokens()).train(resume_from_checkpoint=newest)
