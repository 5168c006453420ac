"""Ranks, process groups, DistributedDataParallel, and stopping all ranks after the same step.

This module alone reads torchrun's environment.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from ddp_trainer.config.options import Settings, option
from ddp_trainer.errors import UserError

# How gradients are sent, with the settings that it reads.
COMPRESSIONS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "bf16": (),
    "fp16": (),
    "powersgd": ("distributed.powersgd_rank",),
}


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
    data_parallel: bool = option(
        False,
        "one process for all GPUs of this node, by torch.nn.DataParallel, which shares each batch out: slower than DDP "
        "with a process a GPU, for comparison",
    )
    compression: str = option(
        "none",
        "send gradients as bf16 or fp16, half the bytes, or as low-rank factors (powersgd, nccl only)",
        choices=tuple(COMPRESSIONS),
    )
    powersgd_rank: int = option(4, "rank of PowerSGD's factors", at_least=1)


@dataclass(frozen=True)
class RankEnv:
    """This process's place among the ranks, in torchrun's words."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    restart: int = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Self:
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
        if not (0 <= rank < world_size):
            raise UserError("RANK", f"{rank} does not fit WORLD_SIZE {world_size}", "start the trainer with torchrun")
        return cls(
            rank,
            number("LOCAL_RANK", 0),
            world_size,
            number("LOCAL_WORLD_SIZE", 1),
            number("TORCHELASTIC_RESTART_COUNT", 0),
        )

    @classmethod
    def from_group(cls, rank: int, hosts: Sequence[str], environ: Mapping[str, str] = os.environ) -> Self:
        """Return the place of ``rank`` in a process group whose ranks run on ``hosts``; torchrun's variables win.

        Raises :class:`UserError` as :meth:`from_environ`.
        """
        host = hosts[rank]
        group = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "LOCAL_RANK": str(hosts[:rank].count(host)),
            "LOCAL_WORLD_SIZE": str(hosts.count(host)),
        }
        return cls.from_environ({**group, **environ})

    @classmethod
    def spawned(cls, local_rank: int, processes: int, *, node: int = 0, nodes: int = 1) -> Self:
        """The place of a process that ``torch.multiprocessing.spawn`` has started, of as many on each of the nodes."""
        return cls(node * processes + local_rank, local_rank, nodes * processes, processes)
