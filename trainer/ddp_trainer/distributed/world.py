"""The process group: joining it, and the collectives that a run needs."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from ddp_sdk.errors import UserError, require
from ddp_sdk.rank_env import RankEnv
from ddp_trainer.distributed import DistributedConfig
from ddp_trainer.errors import Superseded
from ddp_trainer.machine import available_cpus, identify_host

# Next to NCCL a gloo backend for CPU tensors: agreeing on errors and signals must not touch the device.
_BOTH_BACKENDS = "cpu:gloo,cuda:nccl"


def find_rank_env() -> RankEnv:
    """Describe this process by the process group that the program initialized, or else by torchrun's variables.

    With a group this is a collective. Raises :class:`UserError` if the environment or the group is unusable.
    """
    if not _group_exists():
        return RankEnv.from_environ()
    hosts: list[Any] = [identify_host()] * dist.get_world_size()
    if len(hosts) > 1:
        _check_backend()
        dist.all_gather_object(hosts, identify_host())
    return RankEnv.from_group(dist.get_rank(), hosts)


def _group_exists() -> bool:
    return dist.is_available() and dist.is_initialized()


def _check_group(env: RankEnv) -> None:
    """Raise :class:`UserError` if the initialized process group is not the one that ``env`` describes."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    require(
        (rank, size) == (env.rank, env.world_size),
        "distributed",
        f"the initialized process group has rank {rank} of {size}, but the environment or env= names rank {env.rank} "
        f"of {env.world_size}",
        "unset RANK and WORLD_SIZE and omit env= to train in the group, or call destroy_process_group first",
    )
    if size > 1:
        _check_backend()


def _check_backend() -> None:
    backend = dist.get_backend_config()
    require(
        "cpu:" in backend,
        "distributed",
        f"the initialized process group has the backend {backend}, which accepts no CPU tensors",
        f"call init_process_group with the backend {_BOTH_BACKENDS} or gloo, or remove the call",
    )


class World:
    """The ranks of this run: this process's rank and device, and the collectives over all ranks.

    A single process has no process group, and every collective returns its own argument.
    """

    def __init__(self, env: RankEnv, device: torch.device) -> None:
        self.env = env
        self.device = device
        self._joined = False
        # Released at the end of the run, also after an exception.
        self.resources = contextlib.ExitStack()

    @property
    def rank(self) -> int:
        return self.env.rank

    @property
    def size(self) -> int:
        return self.env.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that prints and writes files."""
        return self.env.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.env.world_size > 1

    @classmethod
    def start(cls, config: DistributedConfig, env: RankEnv) -> Self:
        """Choose the device and join the process group.

        A group that the program initialized is used, and not destroyed at the end. Raises :class:`UserError` if that
        group contradicts ``env``, the node has too few GPUs, or ranks can't find rank 0.
        """
        joined = _group_exists()
        if joined:
            _check_group(env)
        problem: UserError | None = None
        try:
            device = _choose_device(config, env)
        except UserError as error:
            # Raised after joining the group: rank 0, which alone prints, may run on a node without a problem.
            problem = error
            device = torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, available_cpus() // env.local_world_size))
        world = cls(env, device)
        if world.is_distributed and not joined:
            world._join(config)
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

    def _join(self, config: DistributedConfig) -> None:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        require(
            not missing,
            "distributed",
            f"{' and '.join(missing)} are not in the environment",
            "start the trainer with torchrun, or set them to the same value on all ranks",
        )
        dist.init_process_group(
            _BOTH_BACKENDS if self.device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=config.timeout_seconds),
            rank=self.rank,
            world_size=self.size,
        )
        self._joined = True

    def close(self) -> None:
        """Leave the process group if the trainer created it."""
        if self._joined and dist.is_initialized():
            dist.destroy_process_group()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum ``values`` element by element over all ranks, in double precision on the CPU."""
        if not self.is_distributed:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def sum_on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over all ranks on its device; on a GPU the host does not wait for the sum."""
        if not self.is_distributed:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def broadcast_bytes(self, data: bytes | None) -> bytes | None:
        """Return rank 0's ``data`` on every rank; the argument of other ranks is ignored."""
        if not self.is_distributed:
            return data
        box = [data]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def broadcast_buffers(self, module: torch.nn.Module) -> None:
        """Copy rank 0's buffers of ``module`` (batch-norm statistics) to every rank.

        DDP by default does this before every forward pass. Training never reads running statistics, so one broadcast
        before validation has the same result.
        """
        if not self.is_distributed:
            return
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
        """Raise a :class:`UserError` or :class:`Superseded` of any rank on every rank, with the lowest rank's message.

        Otherwise the ranks without an error would wait in the next collective for the rank that has exited.
        """
        own_error: UserError | Superseded | None = None
        own_message: tuple[str, ...] | None = None
        try:
            yield
        except UserError as error:
            own_error = error
            own_message = (error.field, error.problem, error.remedy)
        except Superseded as error:
            own_error = error
            own_message = (str(error),)

        messages: list[Any] = [own_message] * self.size
        if self.is_distributed:
            dist.all_gather_object(messages, own_message)
        rank = next((rank for rank, message in enumerate(messages) if message is not None), None)
        if rank is None:
            return
        if rank == self.rank and own_error is not None:
            raise own_error
        if len(messages[rank]) == 1:
            raise Superseded(*messages[rank])
        field, problem, remedy = messages[rank]
        raise UserError(field, f"{problem} (rank {rank})" if rank else problem, remedy)


def _choose_device(config: DistributedConfig, env: RankEnv) -> torch.device:
    gpus = 0
    if config.device != "cpu" and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
    if config.device == "cpu" or (config.device == "auto" and gpus == 0):
        return torch.device("cpu")
    require(
        gpus > 0,
        "distributed.device",
        "--device cuda is set, but torch finds no GPU",
        "install a CUDA build of torch, check nvidia-smi, or give --device cpu",
    )
    require(
        env.local_rank < gpus,
        "distributed.device",
        f"this node runs {env.local_world_size} processes but has {gpus} GPU{'s' if gpus > 1 else ''}",
        f"start at most {gpus} processes per node (--nproc-per-node), or give --device cpu",
    )
    return torch.device("cuda", env.local_rank)
