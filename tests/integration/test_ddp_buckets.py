"""Whether a run that wraps its model in DDP again, as after a restart, ends with the same bits: docs/checkpoints.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import HeldPort

pytestmark = pytest.mark.process

# Prints for each way the parameters' digests of an undisturbed run, and of one that wraps its model again at step 4.
SCRIPT = """
import hashlib, json, multiprocessing, os, sys
import torch
import torch.distributed as dist

WAYS = ("default", "find_unused_parameters", "first backward pass before training")

def train(way, wrapped_again_at):
    torch.manual_seed(1)
    layers = [[torch.nn.Linear(48, 48), torch.nn.BatchNorm1d(48), torch.nn.ReLU()] for _ in range(6)]
    inner = torch.nn.Sequential(*[layer for block in layers for layer in block])
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3)

    def wrap():
        options = {"find_unused_parameters": way == "find_unused_parameters", "bucket_cap_mb": 0.02}
        model = torch.nn.parallel.DistributedDataParallel(inner, **options)
        if way.startswith("first backward pass"):
            model.eval()
            model(torch.zeros(4, 48)).sum().backward()
            optimizer.zero_grad()
            model.train()
        return model

    model = wrap()
    for step in range(8):
        if step == wrapped_again_at:
            model = wrap()
        torch.manual_seed(1000 * step + dist.get_rank())
        loss = model(torch.randn(16, 48)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    values = [parameter.detach().numpy().tobytes() for parameter in inner.parameters()]
    return hashlib.sha256(b"".join(values)).hexdigest()

def run_rank(rank, world):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    digests = {way: [train(way, None), train(way, 4)] for way in WAYS}
    if rank == 0:
        print(json.dumps(digests), flush=True)
    dist.destroy_process_group()

world = int(sys.argv[1])
fork = multiprocessing.get_context("fork")
ranks = [fork.Process(target=run_rank, args=(rank, world)) for rank in range(world)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
"""
Digests = dict[str, list[str]]


def run_ranks(folder: Path, world: int) -> Digests:
    (folder / "buckets.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", str(folder / "buckets.py"), str(world)]
    with HeldPort() as held:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.number)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    digests: Digests = json.loads(done.stdout)
    return digests


def test_two_ranks_end_bit_by_bit_with_any_buckets(tmp_path: Path) -> None:
    for way, (undisturbed, wrapped_again) in run_ranks(tmp_path, 2).items():
        assert undisturbed == wrapped_again, way


def test_four_ranks_end_bit_by_bit_if_ddp_does_not_rebuild_its_buckets(tmp_path: Path) -> None:
    ends = run_ranks(tmp_path, 4)
    equal = {way for way, (undisturbed, wrapped_again) in ends.items() if undisturbed == wrapped_again}
    assert equal == {"find_unused_parameters", "first backward pass before training"}
