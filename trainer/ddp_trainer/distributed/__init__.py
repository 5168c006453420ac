"""Ranks, process groups, DistributedDataParallel, and the agreement of all ranks to stop after the same step.

Only this module reads torchrun's environment variables.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from ddp_trainer.config.options import SettingsGroup, option
from ddp_trainer.errors import UserError


@dataclass(frozen=True)
class DistributedConfig(SettingsGroup, group="distributed"):
    """The device of the ranks, and how they communicate."""

    device: str = option(
        "auto",
        "cpu, cuda (a GPU for every process of a node), or auto (as cuda where torch sees any GPU, else cpu)",
        choices=("auto", "cpu", "cuda"),
    )
    backend: str = option("auto", "collectives: gloo, nccl, or auto (nccl on cuda)", choices=("auto", "gloo", "nccl"))
    timeout_seconds: float = option(
        600.0, "longest time that a collective waits for a rank", flag="--collective-timeout-seconds", above=0
    )
    bucket_mb: float | None = option(
        None,
        "size of DDP's gradient buckets in MiB (default: DDP's, 25 after a first bucket of 1; 5 with --compression, "
        "to start sending early)",
        above=0,
    )
    bucket_view: bool = option(True, "keep gradients in DDP's buckets, which saves a copy of them")
    find_unused_parameters: bool = option(
        False,
        "search in every step for parameters that the outputs don't depend on: slower, for models that have some",
    )
    broadcast_buffers: bool = option(
        False,
        "send rank 0's buffers to all ranks before every forward pass (DDP's default), for models that read them in "
        "training",
    )
    data_parallel: bool = option(
        False,
        "one process for all GPUs of this node by torch.nn.DataParallel, which splits each batch: slower than DDP, "
        "for comparison",
    )
    compression: str = option(
        "none", "send gradients as bf16 or fp16, which halves the bytes", choices=("none", "bf16", "fp16")
    )


@dataclass(frozen=True)
class RankEnv:
    """This process's ranks and world sizes, with torchrun's names."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    restart: int = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read torchrun's variables; without them, describe a single process.

        Raises :class:`UserError` if only some of them are set or one is not a number.
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
                    f"is {text!r} in the environment, not a number",
                    "start the trainer with torchrun, or unset RANK and WORLD_SIZE for one process",
                ) from None

        rank = number("RANK")
        world_size = number("WORLD_SIZE")
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
        """Describe ``rank`` of a process group whose ranks run on ``hosts``; torchrun's variables take precedence.

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
        """Describe a process that ``torch.multiprocessing.spawn`` started, one of ``processes`` on each node."""
        return cls(node * processes + local_rank, local_rank, nodes * processes, processes)
