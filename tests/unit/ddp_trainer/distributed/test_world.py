from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_trainer.distributed import DistributedConfig, RankEnv
from ddp_trainer.distributed.world import World
from ddp_trainer.errors import UserError
from ddp_trainer.machine import available_cpus


def test_without_torchrun_there_is_one_rank() -> None:
    assert RankEnv.from_environ({}) == RankEnv(0, 0, 1, 1, 0)


def test_torchruns_variables_are_read() -> None:
    environ = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    assert RankEnv.from_environ(environ) == RankEnv(5, 1, 8, 4, 2)


@pytest.mark.parametrize(
    "environ",
    [{"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "two", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}],
)
def test_half_an_environment_is_a_user_error(environ: dict[str, str]) -> None:
    with pytest.raises(UserError, match="torchrun"):
        RankEnv.from_environ(environ)


@pytest.mark.parametrize(("text", "expected"), [("max 100000", None), ("150000 100000", 1), ("50000 100000", 1)])
def test_the_cgroups_quota_limits_the_cpus(tmp_path: Path, text: str, expected: int | None) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(text)
    unlimited = available_cpus(tmp_path / "missing")
    assert available_cpus(file) == (unlimited if expected is None else min(unlimited, expected))


def test_a_quota_above_the_affinity_adds_no_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3}, raising=False)
    (tmp_path / "cpu.max").write_text("1600000 100000")
    assert available_cpus(tmp_path / "cpu.max") == 2


@pytest.mark.parametrize(
    ("processes", "environ", "threads"), [(1, {}, [8]), (3, {}, [2]), (9, {}, [1]), (3, {"OMP_NUM_THREADS": "5"}, [])]
)
def test_the_processes_of_a_node_share_its_cpus(
    processes: int, environ: dict[str, str], threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("ddp_trainer.distributed.world.available_cpus", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    World.start(DistributedConfig(device="cpu"), RankEnv(local_world_size=processes))
    assert chosen == threads


def test_collectives_wait_as_long_as_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def ask(backend: str, timeout: timedelta, rank: int, world_size: int) -> None:
        raise Asked(backend, timeout)

    monkeypatch.setattr("torch.distributed.init_process_group", ask)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(UserError, match=r"^distributed: MASTER_PORT"):
        World.start(DistributedConfig(device="cpu"), RankEnv(world_size=2))
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(Asked) as asked:
        World.start(DistributedConfig(device="cpu", timeout_seconds=7.5), RankEnv(world_size=2))
    assert asked.value.args == ("gloo", timedelta(seconds=7.5))


def test_cuda_without_a_gpu_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"distributed.device: cuda was asked for"):
        World.start(DistributedConfig(device="cuda"), RankEnv())


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_nccl_without_a_gpu_is_a_user_error(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"distributed.backend: nccl needs GPUs"):
        World.start(DistributedConfig(backend="nccl", device=device), RankEnv())


def test_more_processes_than_gpus_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="2 processes but shows 1 GPU;"):
        World.start(DistributedConfig(), RankEnv(local_rank=1, local_world_size=2))


def test_spawned_processes_are_counted_node_by_node() -> None:
    assert RankEnv.spawned(1, 2) == RankEnv(1, 1, 2, 2)
    assert RankEnv.spawned(1, 4, node=2, nodes=3) == RankEnv(9, 1, 12, 4)


def test_a_group_that_is_there_already_is_used_and_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match=r"rank 0's of 1 with .*; the trainer needs rank 0 of 2"):
            World.start(DistributedConfig(device="cpu"), RankEnv(world_size=2))
        World(RankEnv(world_size=2), torch.device("cpu")).close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_one_process_needs_no_process_group() -> None:
    world = World.start(DistributedConfig(device="cpu"), RankEnv())
    assert not torch.distributed.is_initialized()
    assert world.sum([1.0, 2.0]) == [1.0, 2.0]
    assert world.broadcast_bytes(b"x") == b"x"
    with pytest.raises(UserError), world.agreed():
        raise UserError("field", "problem", "remedy")
    world.close()
