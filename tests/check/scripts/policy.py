"""Learn a policy by its own rollouts: NumPy, hooks that average gradients, and a rate that follows the divergence."""

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

SEED = int(os.environ.get("SEED", "0"))


class Cart:
    def __init__(self, source):
        self.source = source
        self.places = source.normal(size=(16, 4))

    def step(self, actions):
        pushed = self.places[:, :1] + 0.1 * actions
        drift = 0.05 * self.source.normal(size=self.places.shape)
        self.places = 0.95 * np.concatenate([self.places[:, 1:], pushed], axis=1) + drift
        return self.places.copy(), -np.abs(self.places).sum(1)


class RunningMeanStd:
    """Mean and variance of what all ranks have observed."""

    def __init__(self, size):
        self.mean = np.zeros(size)
        self.var = np.ones(size)
        self.count = 1e-4

    def update(self, values):
        sums = torch.from_numpy(np.stack([values.mean(0), values.var(0)]))
        dist.all_reduce(sums)
        mean, var = (sums / dist.get_world_size()).numpy()
        share = len(values) / (self.count + len(values))
        self.mean = (1 - share) * self.mean + share * mean
        self.var = (1 - share) * self.var + share * var
        self.count += len(values)

    def __call__(self, values):
        return torch.from_numpy((values - self.mean) / np.sqrt(self.var + 1e-8)).float()


def average_gradient(weight):
    dist.all_reduce(weight.grad)
    weight.grad /= dist.get_world_size()


class Learner:
    def __init__(self, rank):
        self.rank = rank
        self.source = np.random.default_rng(100 * SEED + rank)
        self.cart = Cart(self.source)
        self.scale = RunningMeanStd(4)
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        for weight in self.actor.parameters():
            dist.broadcast(weight.data, src=0)
            weight.register_post_accumulate_grad_hook(average_gradient)
        self.optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-3, eps=1e-5)
        self.updates = 0

    def collect(self, length=4):
        seen, actions, rewards = [], [], []
        for _ in range(length):
            self.scale.update(self.cart.places)
            observed = self.scale(self.cart.places)
            with torch.no_grad():
                action = self.actor(observed).numpy() + 0.3 * self.source.normal(size=(16, 1))
            seen.append(observed)
            actions.append(torch.from_numpy(action).float())
            rewards.append(torch.from_numpy(self.cart.step(action)[1]).float())
        return torch.cat(seen), torch.cat(actions), torch.cat(rewards)

    def learn(self):
        seen, actions, rewards = self.collect()
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        with torch.no_grad():
            before = self.actor(seen)
        for part in np.array_split(self.source.permutation(len(seen)), 2):
            distance = (self.actor(seen[part]) - actions[part]).square().squeeze(1)
            loss = (advantages[part] * distance).mean()
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.actor.parameters(), 0.5)
            self.optimizer.step()
        with torch.no_grad():
            divergence = (self.actor(seen) - before).square().mean() / 0.18
        dist.all_reduce(divergence)
        divergence /= dist.get_world_size()
        self.adapt(divergence.item())
        self.updates += 1

    def adapt(self, divergence, wanted=2e-4):
        for group in self.optimizer.param_groups:
            if divergence > 2 * wanted:
                group["lr"] = max(1e-5, group["lr"] / 1.5)
            elif divergence < wanted / 2:
                group["lr"] = min(1e-2, group["lr"] * 1.5)

    def save(self, path):
        mine = {"source": self.source.bit_generator.state, "places": self.cart.places}
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, mine)
        if self.rank == 0:
            scale = {"mean": self.scale.mean, "var": self.scale.var, "count": self.scale.count}
            content = {"actor": self.actor.state_dict(), "optimizer": self.optimizer.state_dict(), "scale": scale}
            torch.save({**content, "updates": self.updates, "ranks": states}, path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)

    def load(self, path):
        content = torch.load(path, weights_only=False)
        self.actor.load_state_dict(content["actor"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.updates = content["updates"]
        self.scale.mean = content["scale"]["mean"]
        self.scale.var = content["scale"]["var"]
        self.scale.count = content["scale"]["count"]
        self.cart.places = content["ranks"][self.rank]["places"]
        self.source.bit_generator.state = content["ranks"][self.rank]["source"]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    learner = Learner(dist.get_rank())
    path = Path("policy.pt")
    if path.exists():
        learner.load(path)
    while learner.updates < 20:
        learner.learn()
        if learner.updates % 2 == 0:
            learner.save(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
