"""The collectives of two ranks, of which this process is one, and the replicas of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_sdk.errors import UserError
from ddp_sdk.rank_env import RankEnv
from ddp_trainer.distributed import DistributedConfig, ddp
from ddp_trainer.distributed.world import World
from tests.support.trainer_ranks import run_as_rank

WORLD = World(RankEnv(), torch.device("cpu"))
COLLECTIVES = """
from ddp_trainer.distributed.world import find_rank_env
from ddp_sdk.errors import UserError
from ddp_trainer.errors import Superseded
rank = world.rank
assert world.is_distributed and find_rank_env() == world.env
assert world.sum([1.0, rank]) == [2.0, 1.0]
own = torch.tensor([rank + 1])
assert world.sum_on_device(own).tolist() == [3] and own.tolist() == [rank + 1]
assert world.broadcast_bytes(b"main" if rank == 0 else None) == b"main"
norm = torch.nn.BatchNorm1d(2)
norm.running_mean.fill_(rank)
norm.num_batches_tracked.fill_(rank + 5)
world.broadcast_buffers(norm)
assert norm.running_mean.tolist() == [0.0, 0.0] and norm.num_batches_tracked.item() == 5
for error in (UserError("field", "problem", "remedy"), Superseded("attempt 2 has taken over")):
    try:
        with world.agreed():
            if rank == 1:
                raise error
    except type(error) as raised:
        assert raised is error if rank == 1 else str(raised).startswith(str(error).partition(";")[0]), str(raised)
    else:
        raise AssertionError("not raised on this rank")
with world.agreed():
    pass
"""
REPLICAS = """
from ddp_trainer.distributed import ddp
for finds_unused in (False, True):
    config = DistributedConfig(find_unused_parameters=finds_unused)
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))
    replica = ddp.replicate(model, config, world)
    assert ddp.needs_all_gradients(replica, config) is not finds_unused
    with torch.no_grad():
        model[1].running_mean.fill_(world.rank)
    replica(torch.full((2, 2), world.rank + 1.0) + torch.eye(2)).square().sum().backward()
    gradients = torch.cat([value.grad.flatten() for value in model.parameters()])
    assert torch.allclose(world.sum_on_device(gradients), 2 * gradients)
    before = model[1].running_mean.clone()
    assert not torch.equal(world.sum_on_device(before), 2 * before), "each rank has its own statistics"
"""


@pytest.mark.parametrize(
    ("script", "own"), [(COLLECTIVES, 0), (COLLECTIVES, 1), (REPLICAS, 0)], ids=["main", "other", "replicas"]
)
def test_ranks_agree(script: str, own: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    beginning = "from ddp_trainer.distributed import DistributedConfig\n"
    run_as_rank(own, tmp_path, beginning + script, 2, monkeypatch)


def test_single_process_needs_no_wrapper() -> None:
    model = nn.Linear(2, 1)
    assert ddp.replicate(model, DistributedConfig(), WORLD) is model
    assert isinstance(ddp.replicate(model, DistributedConfig(data_parallel=True), WORLD), nn.DataParallel)
    assert not ddp.needs_all_gradients(model, DistributedConfig())
    assert torch.equal(WORLD.sum_on_device(torch.ones(2)), torch.ones(2))
    WORLD.broadcast_buffers(model)
    with pytest.raises(UserError, match=r"data_parallel: .* but 2 processes run"):
        ddp.replicate(model, DistributedConfig(data_parallel=True), World(RankEnv(world_size=2), torch.device("cpu")))


def test_parameters_without_gradient_are_named() -> None:
    model = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(11)])
    model[10](torch.ones(1, 1)).sum().backward()
    names = ", ".join(f"{number}.weight" for number in range(8))
    assert f"step 3 gave no gradient to {names} and 2 more" in str(ddp.missing_gradients(model, 2))
