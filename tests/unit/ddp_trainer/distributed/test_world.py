from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_sdk.errors import UserError
from ddp_sdk.rank_env import RankEnv
from ddp_trainer.distributed import DistributedConfig
from ddp_trainer.distributed.world import World, find_rank_env
from ddp_trainer.machine import available_cpus, identify_host


def test_process_without_torchrun_is_single_rank() -> None:
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
def test_partial_environment_is_user_error(environ: dict[str, str]) -> None:
    with pytest.raises(UserError, match="torchrun"):
        RankEnv.from_environ(environ)


@pytest.mark.parametrize(("text", "expected"), [("max 100000", None), ("150000 100000", 1), ("50000 100000", 1)])
def test_cgroups_quota_limits_cpus(tmp_path: Path, text: str, expected: int | None) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(text)
    unlimited = available_cpus(tmp_path / "missing")
    assert available_cpus(file) == (unlimited if expected is None else min(unlimited, expected))


def test_quota_above_affinity_adds_no_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3}, raising=False)
    (tmp_path / "cpu.max").write_text("1600000 100000")
    assert available_cpus(tmp_path / "cpu.max") == 2


@pytest.mark.parametrize(
    ("processes", "environ", "threads"), [(1, {}, [8]), (3, {}, [2]), (9, {}, [1]), (3, {"OMP_NUM_THREADS": "5"}, [])]
)
def test_processes_of_node_share_its_cpus(
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


def test_collectives_use_configured_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    class InitialisationRequested(Exception):
        pass

    def ask(backend: str, timeout: timedelta, rank: int, world_size: int) -> None:
        raise InitialisationRequested(backend, timeout)

    monkeypatch.setattr("torch.distributed.init_process_group", ask)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(UserError, match=r"^distributed: MASTER_PORT"):
        World.start(DistributedConfig(device="cpu"), RankEnv(world_size=2))
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(InitialisationRequested) as asked:
        World.start(DistributedConfig(device="cpu", timeout_seconds=7.5), RankEnv(world_size=2))
    assert asked.value.args == ("gloo", timedelta(seconds=7.5))


def test_cuda_without_gpu_is_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"distributed.device: --device cuda is set"):
        World.start(DistributedConfig(device="cuda"), RankEnv())


def test_more_processes_than_gpus_is_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="2 processes but has 1 GPU;"):
        World.start(DistributedConfig(), RankEnv(local_rank=1, local_world_size=2))


def test_spawned_processes_are_counted_node_by_node() -> None:
    assert RankEnv.spawned(1, 2) == RankEnv(1, 1, 2, 2)
    assert RankEnv.spawned(1, 4, node=2, nodes=3) == RankEnv(9, 1, 12, 4)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_initialized_group_is_not_destroyed_when_world_closes() -> None:
    World.start(DistributedConfig(device="cpu"), RankEnv()).close()
    World(RankEnv(world_size=2), torch.device("cpu")).close()
    assert dist.is_initialized()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("env", [RankEnv(world_size=2), RankEnv(rank=1, world_size=2)])
def test_initialized_group_that_contradicts_env_is_refused(env: RankEnv) -> None:
    names = f"has rank 0 of 1, but the environment or env= names rank {env.rank} of 2; unset RANK"
    with pytest.raises(UserError, match=names):
        World.start(DistributedConfig(device="cpu"), env)


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2)])
def test_single_process_env_in_larger_group_is_refused(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: size)
    with pytest.raises(UserError, match=rf"^distributed: .* has rank {rank} of {size}, .* names rank 0 of 1;"):
        World.start(DistributedConfig(device="cpu"), RankEnv())


def test_initialized_group_without_cpu_tensors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(UserError, match=r"has the backend cuda:nccl, .* with the backend cpu:gloo,cuda:nccl or gloo"):
        find_rank_env()
    with pytest.raises(UserError, match=r"^distributed: "):
        World.start(DistributedConfig(device="cpu"), RankEnv(world_size=2))


@pytest.mark.usefixtures("group_of_one")
def test_initialized_group_of_one_rank_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert find_rank_env() == RankEnv()


@pytest.mark.parametrize(
    ("rank", "environ", "expected"),
    [
        (0, {}, RankEnv(0, 0, 5, 3)),
        (2, {}, RankEnv(2, 1, 5, 3)),
        (3, {}, RankEnv(3, 1, 5, 2)),
        (4, {}, RankEnv(4, 2, 5, 3)),
        (4, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, RankEnv(4, 0, 5, 1)),
        (4, {"RANK": "0", "WORLD_SIZE": "1"}, RankEnv(0, 2, 1, 3)),
    ],
)
def test_place_in_group_counts_ranks_of_same_host(rank: int, environ: dict[str, str], expected: RankEnv) -> None:
    assert RankEnv.from_group(rank, ["a", "b", "a", "b", "a"], environ) == expected


def test_host_identity_without_boot_id_is_hostname(tmp_path: Path) -> None:
    boot_id = tmp_path / "boot_id"
    assert identify_host(boot_id) == socket.gethostname()
    boot_id.write_text("1234\n")
    assert identify_host(boot_id) == f"{socket.gethostname()} 1234"


def test_one_process_needs_no_process_group() -> None:
    world = World.start(DistributedConfig(device="cpu"), RankEnv())
    assert not torch.distributed.is_initialized()
    assert world.sum([1.0, 2.0]) == [1.0, 2.0]
    assert world.broadcast_bytes(b"x") == b"x"
    with pytest.raises(UserError), world.agreed():
        raise UserError("field", "problem", "remedy")
    world.close()
