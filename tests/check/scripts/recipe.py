"""A recipe as torchtune has them: FSDP2, a warm-up by hand, steps counted over epochs, and a checkpoint per epoch."""

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from common import SEED, EpochOrder
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden):
        return hidden + self.down(F.silu(self.up(self.norm(hidden))))


class Decoder(nn.Module):
    def __init__(self, width=16, tokens=32):
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.output = nn.Linear(width, tokens)

    def forward(self, tokens):
        hidden = self.tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.output(hidden)


class Recipe:
    def setup(self, config):
        self.config = config
        self.model = Decoder()
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr)
        generator = torch.Generator().manual_seed(SEED + 9)
        tokens = torch.randint(32, (320, 9), generator=generator)
        self.order = EpochOrder(len(tokens), dist.get_rank(), dist.get_world_size())
        self.loader = DataLoader(TensorDataset(tokens), batch_size=8, sampler=self.order, drop_last=True)
        self.epochs_run = 0
        self.global_step = 0
        if os.path.exists(config.path):
            self.load_checkpoint()

    def load_checkpoint(self):
        content = torch.load(self.config.path, weights_only=True)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
            options=WHOLE,
        )
        self.epochs_run = content["epochs_run"]
        self.global_step = content["global_step"]

    def save_checkpoint(self):
        model, optimizer = get_state_dict(self.model, self.optimizer, options=WHOLE)
        if dist.get_rank() == 0:
            content = {"model": model, "optimizer": optimizer}
            content |= {"epochs_run": self.epochs_run, "global_step": self.global_step}
            torch.save(content, self.config.path + ".part")
            os.replace(self.config.path + ".part", self.config.path)

    def train(self):
        for epoch in range(self.epochs_run, self.config.epochs):
            self.order.epoch = epoch
            for (tokens,) in self.loader:
                for group in self.optimizer.param_groups:
                    group["lr"] = self.config.lr * min(1.0, (self.global_step + 1) / self.config.warmup)
                scores = self.model(tokens[:, :-1])
                loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.global_step += 1
            self.epochs_run = epoch + 1
            self.save_checkpoint()


dist.init_process_group("gloo")
torch.manual_seed(SEED)
recipe = Recipe()
recipe.setup(SimpleNamespace(lr=1e-2, warmup=20, epochs=6, path="recipe.pt"))
recipe.train()
dist.destroy_process_group()
