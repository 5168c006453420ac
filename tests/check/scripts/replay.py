"""Learn to act: each rank plays in an environment of its own and trains on a buffer of what it has seen."""

import copy
import os
import random

import torch
import torch.distributed as dist
from common import SEED
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ACTIONS = 3
SIZE = 6


class Environment:
    """A walk whose reward is high near the middle."""

    def __init__(self, seed):
        self.source = random.Random(seed)
        self.place = [self.source.gauss(0, 1) for _ in range(SIZE)]

    def act(self, action):
        self.place = [value + 0.1 * (action - 1) + self.source.gauss(0, 0.1) for value in self.place]
        return list(self.place), -abs(sum(self.place))


class ReplayBuffer:
    def __init__(self, most):
        self.most = most
        self.items = []

    def add(self, item):
        self.items.append(item)
        del self.items[: -self.most]

    def sample(self, count, source):
        chosen = [self.items[source.randrange(len(self.items))] for _ in range(count)]
        places, actions, rewards, following = zip(*chosen, strict=True)
        return torch.tensor(places), torch.tensor(actions), torch.tensor(rewards), torch.tensor(following)


class Agent:
    def __init__(self, rank):
        self.rank = rank
        self.values = nn.Sequential(nn.Linear(SIZE, 32), nn.ReLU(), nn.Linear(32, ACTIONS))
        self.target = copy.deepcopy(self.values).requires_grad_(False)
        self.model = DistributedDataParallel(self.values)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.source = random.Random(1000 * SEED + rank)
        self.environment = Environment(2000 * SEED + rank + 7)
        self.buffer = ReplayBuffer(200)
        self.played = 0

    def choose(self):
        self.played += 1
        if self.source.random() < max(0.1, 1 - self.played / 400):
            return self.source.randrange(ACTIONS)
        with torch.no_grad():
            return int(self.values(torch.tensor(self.environment.place)).argmax())

    def play(self, moves):
        for _ in range(moves):
            before = list(self.environment.place)
            action = self.choose()
            following, reward = self.environment.act(action)
            self.buffer.add((before, action, reward, following))

    def learn(self):
        places, actions, rewards, following = self.buffer.sample(32, self.source)
        with torch.no_grad():
            goal = rewards + 0.9 * self.target(following).max(1).values
        expected = self.model(places).gather(1, actions[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(expected, goal)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for slow, fast in zip(self.target.parameters(), self.values.parameters(), strict=True):
            slow.lerp_(fast, 0.05)

    def state(self):
        environment = (self.environment.source.getstate(), self.environment.place)
        mine = {"buffer": self.buffer.items, "source": self.source.getstate(), "environment": environment}
        mine["played"] = self.played
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return {
            "values": self.values.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ranks": everyone,
        }

    def restore(self, state):
        self.values.load_state_dict(state["values"])
        self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(state["optimizer"])
        mine = state["ranks"][self.rank]
        self.buffer.items = mine["buffer"]
        self.source.setstate(mine["source"])
        self.environment.source.setstate(mine["environment"][0])
        self.environment.place = mine["environment"][1]
        self.played = mine["played"]


dist.init_process_group("gloo")
torch.manual_seed(SEED)
agent = Agent(dist.get_rank())
first = 0
if os.path.exists("agent.pt"):
    loaded = torch.load("agent.pt", weights_only=False)
    agent.restore(loaded["agent"])
    first = loaded["round"]
for number in range(first, 60):
    agent.play(10)
    agent.learn()
    if (number + 1) % 5 == 0:
        state = {"agent": agent.state(), "round": number + 1}
        if dist.get_rank() == 0:
            torch.save(state, "agent.new")
            os.replace("agent.new", "agent.pt")
dist.destroy_process_group()
