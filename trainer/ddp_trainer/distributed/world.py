"""Ranks and process groups: the only module that reads torchrun's environment, and the collectives that are needed.

torch is imported inside the functions, so that ``--help`` and a bad flag are answered without waiting for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ddp_trainer.config.options import Settings, option
from ddp_trainer.errors import UserError, require
from ddp_trainer.machine import available_cpus

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RankEnv:
    """This process's place among the ranks, in torchrun's words."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    restart: int = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> RankEnv:
        """Read torchrun's variables; without them this is one process of its own.

        Raises :class:`UserError` where only a part of them is set or one is not a number.
        """
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            return cls()

        def number(name: str, default: int | None = None) -> int:
            text = environ.get(name)
            if text is None and default is not None:
                return default
            try:
                return int(text or "")
            except ValueError:
                raise UserError(
                    name,
                    f"is {text!r} in the environment",
                    "start the trainer with torchrun, or unset RANK and WORLD_SIZE for one process",
                ) from None

        rank, world_size = number("RANK"), number("WORLD_SIZE")
        require(
            0 <= rank < world_size,
            "RANK",
            f"{rank} does not fit WORLD_SIZE {world_size}",
            "start the trainer with torchrun",
        )
        return cls(
            rank,
            number("LOCAL_RANK", 0),
            world_size,
            number("LOCAL_WORLD_SIZE", 1),
            number("TORCHELASTIC_RESTART_COUNT", 0),
        )


@dataclass(frozen=True)
class DistributedConfig(Settings, group="distributed"):
    """Where the ranks compute and how they talk."""

    device: str = option(
        "auto",
        "cpu, cuda (a GPU for every process of a node), or auto (as cuda where torch sees any GPU, else cpu)",
        choices=("auto", "cpu", "cuda"),
    )
    backend: str = option("auto", "collectives: gloo, nccl, or auto (nccl on cuda)", choices=("auto", "gloo", "nccl"))
    timeout_seconds: float = option(
        600.0, "how long a collective may wait for a rank", flag="--collective-timeout-seconds", above=0
    )
    bucket_mb: float | None = option(
        None,
        "size of DDP's gradient buckets in MiB (default: DDP's own, 25 after a first one of 1; with compression 5, so "
        "that sending begins early)",
        above=0,
    )
    bucket_view: bool = option(True, "let gradients live in DDP's buckets, which saves a copy of them")
    static_graph: bool = option(False, "promise DDP that every step uses the same parameters (not with --accumulate)")
    find_unused_parameters: bool = option(
        False,
        "let DDP look in every step for parameters that the outputs don't depend on: slower, for models that have some",
    )
    broadcast_buffers: bool = option(
        False,
        "send rank 0's buffers to all ranks before every forward pass, as DDP does by itself: for models that read "
        "them in training",
    )
    compression: str = option(
        "none",
        "send gradients as bf16 or fp16, half the bytes, or as low-rank factors (powersgd, nccl only)",
        choices=("none", "bf16", "fp16", "powersgd"),
    )
    powersgd_rank: int = option(4, "rank of PowerSGD's factors", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not (self.backend == "nccl" and self.device == "cpu"),
            "distributed.backend",
            "nccl moves GPU memory only",
            "use backend gloo with device cpu",
        )
        require(
            self.compression != "powersgd" or (self.backend != "gloo" and self.device != "cpu"),
            "distributed.compression",
            "PowerSGD needs nccl, and these ranks talk through gloo",
            "use --compression bf16, or run on GPUs",
        )


class World:
    """The ranks of this run: who this process is, its device, and the collectives over all of them.

    With one process there is no process group and every collective returns its own argument.
    """

    def __init__(self, env: RankEnv, device: torch.device) -> None:
        self.env = env
        self.device = device

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.env.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.env.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that prints and writes files."""
        return self.env.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self.env.world_size > 1

    @classmethod
    def start(cls, config: DistributedConfig, env: RankEnv) -> World:
        """Choose the device and join the process group.

        Raises :class:`UserError` where the node has too few GPUs.
        """
        import torch

        problem: UserError | None = None
        try:
            device = _choose_device(config, env)
        except UserError as error:
            # Said after joining the group: rank 0, which alone prints, may be on a node that is well.
            problem, device = error, torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, available_cpus() // env.local_world_size))
        if env.world_size > 1:
            import torch.distributed as dist

            backend = config.backend
            if backend == "auto":
                backend = "nccl" if device.type == "cuda" else "gloo"
            # Next to NCCL a gloo backend for CPU tensors: agreeing on errors and signals must not touch the device.
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo", timeout=timedelta(seconds=config.timeout_seconds)
            )
        world = cls(env, device)
        with world.agreed():
            if problem is not None:
                raise problem
        on_gpu = int(world.sum([float(device.type == "cuda")])[0])
        require(
            on_gpu in (0, world.size),
            "distributed.device",
            f"{on_gpu} of {world.size} ranks have a GPU",
            "give every node its GPUs, or --device cpu",
        )
        return world

    def close(self) -> None:
        """Leave the process group."""
        if self.is_distributed:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks, in double precision on the CPU."""
        if not self.is_distributed:
            return list(values)
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def broadcast_bytes(self, data: bytes | None) -> bytes | None:
        """Rank 0's ``data`` on every rank; the other ranks' argument is ignored."""
        if not self.is_distributed:
            return data
        import torch
        import torch.distributed as dist

        size = torch.tensor([-1 if data is None else len(data)])
        dist.broadcast(size, src=0)
        if size.item() < 0:
            return None
        buffer = torch.empty(int(size.item()), dtype=torch.uint8)
        if self.is_main:
            assert data is not None
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(buffer, src=0)
        return buffer.numpy().tobytes()

    def broadcast_buffers(self, module: torch.nn.Module) -> None:
        """Give every rank rank 0's buffers of ``module`` (batch-norm statistics).

        DDP by default does this before every forward pass. Training never reads running statistics, so once before
        they are used has the same outcome.
        """
        if not self.is_distributed:
            return
        import torch
        import torch.distributed as dist

        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in module.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(flat, src=0)
            for buffer, part in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(part.view_as(buffer))

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Make a :class:`UserError` on any rank one on every rank, with the lowest failing rank's words.

        Without this the ranks that are well would wait in the next collective for the one that is gone.
        """
        error: UserError | None = None
        try:
            yield
        except UserError as caught:
            error = caught
        if self.is_distributed:
            import torch.distributed as dist

            mine = None if error is None else (error.field, error.problem, error.remedy)
            everyone: list[Any] = [None] * self.size
            dist.all_gather_object(everyone, mine)
            for rank, theirs in enumerate(everyone):
                if theirs is not None:
                    if rank == self.rank and error is not None:
                        raise error
                    field, problem, remedy = theirs
                    raise UserError(field, f"{problem} (rank {rank})" if rank else problem, remedy)
        elif error is not None:
            raise error


def _choose_device(config: DistributedConfig, env: RankEnv) -> torch.device:
    import torch

    gpus = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0
    if config.device == "cpu" or (config.device == "auto" and gpus == 0):
        require(
            config.backend != "nccl",
            "distributed.backend",
            "nccl needs GPUs and this node shows none",
            "use --backend gloo or run where nvidia-smi lists a GPU",
        )
        return torch.device("cpu")
    require(
        gpus > 0,
        "distributed.device",
        "cuda was asked for but torch sees no GPU",
        "install a CUDA build of torch, check nvidia-smi, or give --device cpu",
    )
    require(
        env.local_rank < gpus,
        "distributed.device",
        f"this node runs {env.local_world_size} processes but shows {gpus} GPU{'s' if gpus > 1 else ''}",
        f"start at most {gpus} a node (--nproc-per-node) or give --device cpu",
    )
    return torch.device("cuda", env.local_rank)
